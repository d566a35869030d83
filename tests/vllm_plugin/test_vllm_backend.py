"""What vLLM may ask of the attention backend, by vLLM's own check (`make vllm`)."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType

from cuda_track.vllm.backend import CompressedBackend, ExactBackend
from cuda_track.vllm.settings import DIMS, PAGE

PLAIN = {
    "head_size": DIMS[0], "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": PAGE, "use_mla": False,
    "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0), "attn_type": AttentionType.DECODER,
}  # fmt: skip
OTHER = {
    "head_size": 96, "kv_cache_dtype": "fp8", "block_size": PAGE // 2, "use_mla": True, "has_sink": True,
    "use_mm_prefix": True, "attn_type": AttentionType.ENCODER_ONLY, "has_sliding_window": True, "use_non_causal": True,
    "use_kv_connector": True, "use_pcp": True, "use_dcp": True, "use_adaptive_verification": True, "use_rswa": True,
}  # fmt: skip
KNOWN = inspect.signature(CompressedBackend.validate_configuration).parameters


def test_plain_decoders_are_served():
    assert CompressedBackend.validate_configuration(**PLAIN) == []
    for backend in (CompressedBackend, ExactBackend):
        assert not backend.__abstractmethods__
        for cls in (backend.get_impl_cls(), backend.get_builder_cls()):
            assert not cls.__abstractmethods__


@pytest.mark.parametrize("option", OTHER)
def test_what_is_not_served_is_refused(option):
    if option not in KNOWN:
        pytest.skip("this vLLM does not ask")
    assert len(CompressedBackend.validate_configuration(**{**PLAIN, option: OTHER[option]})) == 1
