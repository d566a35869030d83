"""Kernels are judged on their own codes, and their codes with an allowance for ties."""

import mlx.core as mx
import pytest
from on_emulator import broken, make

from mlxkv.cache import selftest
from mlxkv.cache.backends import PortableBackend
from mlxkv.formats.presets import PRESETS
from mlxkv.metal import quantize


@pytest.mark.parametrize("preset", ("int4", "oscar-int2", "polar-int2"))
def test_kernels_pass(preset):
    found = selftest.test(PRESETS[preset], 64, mx.float16, PortableBackend(make))
    assert found.reason is None and set(found.errors) == {
        "attend",
        "keys",
        "values",
        "prefill",
        "seal",
    }
    assert found.errors["seal"] < selftest.QUANTIZE_BOUND / 2 and found.ties < 0.002


def test_heads_of_512_dims_fit_in_threadgroup_memory():
    """Of a dial preset that takes most of it: scales of several groups of values would be 700 bytes too many."""
    shape = selftest.AttentionShape(4, 1)
    backend = PortableBackend(make)
    assert selftest.test(PRESETS["int3"], 512, mx.float16, backend, shape).reason is None


def test_a_product_rounded_to_ten_bits_passes(monkeypatch):
    """What TF32 does to a rotation: some codes fall to the other side, nothing is wrong."""
    monkeypatch.setattr(quantize, "DENSE_TOKENS", 0)
    store = quantize.Transform.store

    def rounded(self, x):
        down = self.down.view(mx.uint32) + 0x1000 & 0xFFFFE000
        return x.astype(mx.float32) @ down.view(mx.float32)

    def build(*args, **more):
        monkeypatch.setattr(quantize.Transform, "store", rounded)  # once plain ops are done
        return make(*args, **more)

    found = selftest.test(PRESETS["oscar-int2"], 64, mx.float16, PortableBackend(build))
    assert quantize.Transform.store is rounded is not store
    assert found.reason is None, found
    assert 2e-3 < found.errors["seal"] < selftest.QUANTIZE_BOUND and found.ties > 0


@pytest.mark.parametrize(
    ("part", "good", "bad", "said"),
    [
        ("mlxkv_quantize", "fma(left[", "fma(-left[", "seal"),
        ("mlxkv_quantize", "return kv_ranked<RANK>", "return 3.0f * kv_ranked<RANK>", "seal"),
        ("mlxkv_dequantize", "scales[at] = scale", "scales[at] = 0.9f * scale", "keys"),
        ("mlxkv_merge", "T(total * share)", "T(1.05f * total * share)", "attend"),
    ],
)
def test_faults_are_found_by_what_is_wrong(part, good, bad, said):
    build = broken(part, good, bad)
    reason = selftest.test(PRESETS["oscar-int2"], 64, mx.float16, PortableBackend(build)).reason
    assert any(build.held), good
    assert reason is not None and reason.startswith(said), reason


def test_two_bases_in_one_pass_are_on_trial_where_they_will_be_used():
    fault = broken("mlxkv_merge", "run < runs", "run < 1")
    reason = selftest.test(PRESETS["oja-0.75+int4"], 64, mx.float16, PortableBackend(fault)).reason
    assert reason is not None and reason.startswith("attend"), reason
    assert selftest.test(PRESETS["int4"], 64, mx.float16, PortableBackend(fault)).reason is None


def test_ties_are_allowed_for_only_behind_a_rotation_that_is_multiplied():
    """A fault as small as what TF32 does: none of it may come from a fast transform."""
    small = broken("mlxkv_quantize", "kv_inverse(step) *", "1.001f * kv_inverse(step) *")
    found = selftest.test(PRESETS["srft-int4+g64"], 64, mx.float16, PortableBackend(small))
    assert selftest.BOUND < found.errors["seal"] < selftest.QUANTIZE_BOUND
    assert found.reason is not None and found.reason.startswith("seal")
