// Words of threadgroup memory, for attend_latent.metal.

#ifndef KV_STAGE // cuda.h has its own
typedef const threadgroup uint* kv_words;
#endif
