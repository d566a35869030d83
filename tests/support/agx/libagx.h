// Textures, which Mesa asks its library about and kernels here never reach.
#pragma once
#include "nir_builder.h"
#define STUB(name) \
  static inline nir_def* name(nir_builder* b, ...) { return nir_imm_int(b, 0); }
STUB(libagx_txs)
STUB(libagx_texture_levels)
STUB(libagx_texture_samples)
STUB(libagx_buffer_texture_offset)
STUB(libagx_texture_is_rgb32)
STUB(libagx_texture_load_rgb32)
STUB(libagx_lower_txf_robustness)
STUB(libagx_buffer_texel_address)
STUB(libagx_image_texel_address)
STUB(libagx_buffer_image_offset)
