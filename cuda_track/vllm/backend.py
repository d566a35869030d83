"""The attention backend: writes exact tokens and codes into vLLM's blocks, and attends to both.

Decodes read codes by the kernels of `kernels`. Prefills, and everything where there is no GPU, decode the context of a
request once per layer into room of its own, for flash attention (or SDPA).
"""

# vLLM is an optional dependency, and has no wheel for most of the machines that check types.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from cuda_track.cache.attention import DECODE_TOKENS
from cuda_track.kernels import launch
from cuda_track.vllm.blocks import SUFFIX, Blocks, Prefill, Requests, Run, runs_of
from cuda_track.vllm.settings import DIMS, PAGE


@dataclass
class Metadata(AttentionMetadata):
    """Of one cache group.

    requests: what kernels read. decodes: requests at the front that a kernel serves, of `new` tokens at most. ragged:
    where the tokens of decodes lie in [decodes, new], if some have fewer. runs: the others.
    """

    requests: Requests
    decodes: int
    new: int
    ragged: torch.Tensor | None
    runs: list[Run]


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds the metadata of both kinds of blocks."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        most = launch.ROWS * kv_cache_spec.num_kv_heads // heads
        self.most_new = min(self.reorder_batch_threshold or 1, DECODE_TOKENS, most)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        common: CommonAttentionMetadata = common_attn_metadata
        starts = common.query_start_loc_cpu
        decodes = 0
        if not current_platform.is_cpu():
            decodes = split_decodes_and_prefills(common, self.most_new)[0]
        lengths = starts[1 : decodes + 1] - starts[:decodes]
        new, ragged = int(lengths.max()) if decodes else 0, None
        if decodes and int(starts[decodes]) not in (0, decodes * new):
            rows = torch.repeat_interleave(torch.arange(decodes), lengths)
            at = torch.arange(len(rows)) - starts[rows]
            ragged = (rows * new + at).to(self.device, non_blocking=True)
        prefills = []
        if decodes < common.num_reqs:
            totals = common.seq_lens_cpu_upper_bound  # right for prefills
            totals = common.seq_lens.cpu() if totals is None else totals
            for row in range(decodes, common.num_reqs):
                first, last = int(starts[row]), int(starts[row + 1])
                if first < last:
                    prefills.append(Prefill(row, first, last, int(totals[row]) - (last - first)))
        requests = Requests(
            common.seq_lens,
            common.query_start_loc,
            common.block_table_tensor,
            common.slot_mapping,
            common.num_actual_tokens,
            common.max_query_len,
        )
        return Metadata(requests, decodes, new, ragged, runs_of(prefills, self.device))


class CompressedBackend(AttentionBackend):
    """Blocks of codes: uint8 [blocks, kv heads, 1, bytes of a record]."""

    accept_output_buffer = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return CompressedImpl

    @staticmethod
    def get_builder_cls():
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [PAGE]

    @classmethod
    def supported_kv_cache_layouts(cls):
        """Ask vLLM 0.32 for each layer's blocks in one run, and heads outermost in a block: kernels count on both."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(DIMS)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, num_kv_heads, 1, -1  # of the bytes that `CodesSpec` says

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Refuse vLLM 0.33's adaptive verification, which shortens drafts on the GPU: `Builder` counts on the CPU."""
        return False


class ExactBackend(CompressedBackend):
    """Blocks of exact tokens: [blocks, kv heads, tokens, 2 D], keys then values. They are read by `CompressedImpl`."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class CompressedImpl(AttentionImpl[Metadata]):
    """Attention of one layer. Raises NotImplementedError for what is more than causal softmax."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None, sinks=None, **others,
    ):  # fmt: skip
        asked = {
            "alibi": alibi_slopes,
            "a sliding window": sliding_window,
            "soft caps": logits_soft_cap,
            "shared caches": kv_sharing_target_layer_name,
            "attention sinks": sinks,
        }
        if wrong := [name for name, x in asked.items() if x]:
            raise NotImplementedError(
                f"[vllm] layers with {', '.join(wrong)} are not compressed yet; choose vLLM's own --kv-cache-dtype here"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._blocks: Blocks | None = None

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output=None,
        output_scale=None, output_block_scale=None,
    ):  # fmt: skip
        """query [N, H, D]; key, value [N, G, D]; kv_cache: blocks of codes."""
        output = torch.empty_like(query) if output is None else output
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        context, name = get_forward_context(), layer.layer_name + SUFFIX
        exact, near = context.no_compile_layers[name], context.attn_metadata[name]
        held, meta = self._blocks, attn_metadata
        if held is None or held.pool.data_ptr() != kv_cache.data_ptr():
            held = self._blocks = exact.blocks(kv_cache)
        out, q = (
            output.view(-1, self.num_heads, self.head_size),
            query.view(-1, self.num_heads, self.head_size),
        )
        held.write(key, value, meta.requests, near.requests)
        if meta.decodes:
            held.decode(q, out, meta, near, self.scale)
        for run in meta.runs:
            held.prefill(q, key, value, out, run, meta.requests, near.requests, self.scale)
        return output
