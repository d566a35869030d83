"""mlxkv's compressed caches inside vLLM, as a plug-in (`vllm.general_plugins`).

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"mlxkv": "int4"}'

A block of vLLM's is a page of 64 tokens (`kernels.record`). The exact tokens of a layer, its first and its most recent
ones, are a second cache beside it, of vLLM's own sliding-window kind: vLLM allocates, hashes, evicts and frees both.

`settings` reads what was asked for, `specs` tells vLLM what blocks are, `backend` writes and reads them, by
`kernels` on a GPU.
"""

# vLLM is an optional dependency, and has no wheel for most of the machines that check types.
# pyright: reportMissingImports=false

from __future__ import annotations

BACKEND = "cuda_track.vllm.backend.CompressedBackend"


def register() -> None:
    """Make the attention backend CUSTOM mlxkv's. vLLM calls this in each of its processes, perhaps twice."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from cuda_track.vllm import specs

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    specs.register()
