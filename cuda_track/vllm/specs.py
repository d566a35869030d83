"""What vLLM knows of a layer's blocks: pages of codes of all tokens, and a sliding window of exact ones.

Both come from vLLM's one pool, as blocks of the same bytes. A token is written exactly and, when its page is full, as
codes. So prefix caching, chunked prefill, preemption, refused drafts and asynchronous scheduling need nothing here.
"""

# vLLM is an optional dependency, and has no wheel for most of the machines that check types.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from cuda_track.kernels import launch
from cuda_track.vllm import settings
from cuda_track.vllm.blocks import SUFFIX, Blocks, tokens_that_fit
from cuda_track.vllm.settings import DIMS, PAGE, RECENT, SINK, Heads, Plan
from mlxkv.errors import UserError

logger = init_logger("vllm.mlxkv")
LAYERS_HAVE_SHAPES = hasattr(
    AttentionSpec, "tokens_per_state"
)  # since vLLM 0.32: [blocks, heads, states, bytes]


@dataclass(frozen=True, kw_only=True)
class CodesSpec(FullAttentionSpec):
    """Blocks of codes. record: bytes of a block of one kv head."""

    record: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        return self.num_kv_heads * self.record

    @classmethod
    def merge(cls, specs):
        merged = super().merge(
            specs
        )  # first: vLLM tries unlike specs and expects its AssertionError
        if len({spec.record for spec in specs}) > 1:
            raise AssertionError("layers whose blocks have different bytes")
        return replace(merged, record=specs[0].record)


@dataclass(frozen=True, kw_only=True)
class ExactSpec(SlidingWindowSpec):
    """Blocks of exact tokens, padded to the bytes of a block of codes. The first SINK tokens are never freed."""

    def max_admission_blocks_per_request(self, *args, **kwargs) -> int:
        return super().max_admission_blocks_per_request(*args, **kwargs) + kept_blocks(self)

    @property
    def num_retained_tokens(self) -> int:
        """Keep workers of vLLM 0.33 from clearing a table below the window, where the first tokens are: 0 is never."""
        return 0


def kept_blocks(spec) -> int:
    """Return how many blocks of a window hold the first SINK tokens."""
    return -(-SINK // spec.block_size)


class ExactManager(SlidingWindowManager):
    """Frees what leaves the window, but for the first tokens; a prefix is found only with those."""

    @property
    def _kept(self) -> int:
        return kept_blocks(self.kv_cache_spec)

    def _skipped(self, tokens: int) -> int:
        """Return how many of the first blocks are outside the window after `tokens`."""
        return self.get_num_skipped_tokens(tokens) // self.block_size

    def remove_skipped_blocks(self, request_id, *args, **kwargs) -> None:
        tokens = args[0] if args else kwargs["processed_computed_tokens"]
        self._remove_blocks_in_range(request_id, self._kept, self._skipped(tokens))

    def get_num_blocks_to_allocate(
        self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
    ) -> int:
        more = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if request_id in self.num_cached_block:
            return more
        kept = new_computed_blocks[: min(self._kept, self._skipped(total_computed_tokens))]
        return more + self._get_num_evictable_blocks(kept)

    def add_local_computed_blocks(
        self,
        request_id,
        new_computed_blocks,
        num_local_computed_tokens,
        num_external_computed_tokens,
    ) -> None:
        total = num_local_computed_tokens + num_external_computed_tokens
        kept = new_computed_blocks[: min(self._kept, self._skipped(total))]
        self.block_pool.touch(kept)  # before others are, so that none of them is evicted
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self.req_to_blocks[request_id][: len(kept)] = kept

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes,
        max_length,
        kv_cache_group_ids,
        block_pool,
        kv_cache_spec,
        *args,
        **kwargs,
    ):
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )
        hashes = resolve_block_hashes(
            block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size
        )
        for i in range(min(len(found[0]), kept_blocks(kv_cache_spec))):
            cached = block_pool.get_cached_block(hashes[i], kv_cache_group_ids)
            if cached is None:
                return tuple([] for _ in found), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[i] = block
        return found, length

    @classmethod
    def reachable_block_mask(cls, start_block, end_block, *args, **kwargs):
        mask = super().reachable_block_mask(start_block, end_block, *args, **kwargs)
        spec = kwargs.get("kv_cache_spec") or next(x for x in args if isinstance(x, ExactSpec))
        for i in range(start_block, min(end_block, kept_blocks(spec))):
            if mask is not None:
                mask[i - start_block] = True
        return mask


class ExactTokens(AttentionLayerBase):
    """The window of a layer, in vLLM's static forward context under the layer's name and SUFFIX."""

    def __init__(self, layer: Attention, dtype: torch.dtype):
        self.layer, self.dtype, self.kv_cache = layer, dtype, torch.tensor([])

    def get_attn_backend(self):
        from cuda_track.vllm.backend import ExactBackend

        return ExactBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig):
        heads = heads_of(self.layer)
        record = plan_of(vllm_config).record(heads).size
        tokens = settings.exact_tokens(record, heads.dims, self.dtype.itemsize)
        return ExactSpec(
            block_size=tokens,
            num_kv_heads=heads.count,
            head_size=heads.dims,
            dtype=self.dtype,
            # vLLM keeps one token less: the recent ones, and what begins their first page.
            sliding_window=RECENT + PAGE,
            page_size_padded=heads.count * record,
        )

    def blocks(self, pool: torch.Tensor) -> Blocks:
        """Return the blocks of the layer, whose codes lie in `pool`."""
        heads, index = heads_of(self.layer), extract_layer_index(self.layer.layer_name)
        codecs = self.layer.mlxkv_plan.codecs(index, heads, pool.device)
        if index == 0:
            length = self.layer.mlxkv_longest
            room = tokens_that_fit(len(pool), self.kv_cache.shape[2], length)
            logger.info(
                "mlxkv: %s blocks hold %s tokens in sequences of %s, exact ones included; vLLM's figure above sets "
                "prefills of whole batches aside",
                *(f"{n:,}" for n in (len(pool), room, length)),
            )
        return Blocks(codecs, pool, self.kv_cache, heads.count, heads.dims)


def plan_of(vllm_config: VllmConfig) -> Plan:
    """Return how the layers of this engine are compressed. Raises UserError."""
    return settings.plan(vllm_config.additional_config, vllm_config.model_config.model)


def heads_of(layer: Attention) -> Heads:
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    return Heads(layer.num_kv_heads, layer.head_size, rank, size)


def codes_spec(layer: Attention, vllm_config: VllmConfig) -> CodesSpec:
    """Return the spec of a layer's codes."""
    heads, record = heads_of(layer), plan_of(vllm_config).record(heads_of(layer)).size
    shape = {"state_content_bytes": record, "tokens_per_state": PAGE} if LAYERS_HAVE_SHAPES else {}
    return CodesSpec(
        block_size=PAGE,
        num_kv_heads=heads.count,
        head_size=heads.dims,
        dtype=torch.uint8,
        record=record,
        **shape,
    )


def register() -> None:
    """Tell vLLM about both specs, and make its attention layers ask for them."""
    KVCacheSpecRegistry._ensure_registered()  # else ours count as the whole registration
    KVCacheSpecRegistry.register(CodesSpec, FullAttentionManager, FullAttentionSpec)
    KVCacheSpecRegistry.register(ExactSpec, ExactManager, SlidingWindowSpec)
    if getattr(Attention, "_mlxkv", False):
        return
    own_init, own_spec = Attention.__init__, Attention.get_kv_cache_spec

    def init(layer, *args, **kwargs):
        own_init(layer, *args, **kwargs)
        if _compressed(layer):
            config = get_current_vllm_config()
            layer.mlxkv_plan = _checked(layer, config)
            layer.mlxkv_longest = config.model_config.max_model_len
            context = config.compilation_config.static_forward_context
            context[layer.layer_name + SUFFIX] = ExactTokens(layer, config.model_config.dtype)

    def spec(layer, vllm_config):
        return (
            codes_spec(layer, vllm_config) if _compressed(layer) else own_spec(layer, vllm_config)
        )

    Attention._mlxkv, Attention.__init__, Attention.get_kv_cache_spec = True, init, spec
    if current_platform.is_cpu():
        _serve_on_cpu()


def _compressed(layer: Attention) -> bool:
    from cuda_track.vllm.backend import CompressedBackend

    return layer.attn_backend is CompressedBackend


def _checked(layer: Attention, vllm_config: VllmConfig) -> Plan:
    """Return the plan. Raises UserError for what the engine is asked to do and blocks of codes cannot."""
    parallel, cache, dims = (
        vllm_config.parallel_config,
        vllm_config.cache_config,
        layer.head_size,
    )
    plan, total = plan_of(vllm_config), vllm_config.model_config.get_total_num_kv_heads()
    if cache.cache_dtype != "auto":
        raise UserError(
            f"[vllm] --additional-config says what is stored; got --kv-cache-dtype {cache.cache_dtype} too; choose auto"
        )
    if cache.user_specified_block_size and cache.block_size != PAGE:
        raise UserError(
            f"[vllm] a block is a page of {PAGE} tokens; got --block-size {cache.block_size}; choose {PAGE}"
        )
    for wrong, what in (
        (
            dims not in DIMS and f"heads of {' or '.join(map(str, DIMS))} dims are served",
            f"{dims} dims",
        ),
        (launch.why_not(plan.config, (dims, dims)), f"heads of {dims} dims"),
        (layer.head_size_v != dims and "keys and values differ", "a head of two sizes"),
        (
            parallel.decode_context_parallel_size > 1 and "a context stays on one GPU",
            "decode context parallelism",
        ),
        (
            parallel.tensor_parallel_size > total and f"the model has {total} kv heads",
            f"--tensor-parallel-size {parallel.tensor_parallel_size}",
        ),
        (
            vllm_config.kv_transfer_config is not None and "blocks do not travel yet",
            "a KV connector",
        ),
    ):
        if wrong:
            raise UserError(f"[vllm] {wrong}; got {what}; choose vLLM's own --kv-cache-dtype here")
    if extract_layer_index(layer.layer_name) == 0:
        bits = plan.record(heads_of(layer)).size * 8 / (2 * PAGE * dims)
        logger.info(
            "mlxkv: %s, %.2f bits a value in blocks of %d tokens; the first %d and the last %d to %d tokens of a "
            "sequence stay exact",
            *(plan.config.label, bits, PAGE, SINK, RECENT, RECENT + PAGE - 1),
        )
    return plan


def _serve_on_cpu() -> None:
    """Let vLLM's CPU platform, which knows one backend, take CUSTOM: by plain ops, for tests."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls, selected_backend, *args, **kwargs):
        if selected_backend == AttentionBackendEnum.CUSTOM:
            return AttentionBackendEnum.CUSTOM.get_path()
        return own(cls, selected_backend, *args, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)
