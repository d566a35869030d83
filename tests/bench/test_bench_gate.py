"""The gate of `mlxkv bench`, and the bytes that a token reads."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from bench_workers import shuffle, subject

from mlxkv.bench.whole import gate, reading
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS


def test_every_preset_is_right_on_gaussian_values(subtests):
    for preset in [name for name in PRESETS if name != "fp16"]:
        with subtests.test(preset=preset):
            cache, pair = gate.filled(parse_kv(preset), (1, 64, 64), mx.float32)
            found = gate.judge(cache, pair, 2)
            assert found["reason"] is None
            # The bound of the codes means something: noise as large as what was encoded is far above it.
            assert 0 < found["errors"]["keys"] < found["bounds"]["keys"] < 1


def test_sides_windows_and_types_of_their_own():
    config = replace(parse_kv("int8/srft-int2+g32"), sink=0)
    cache, pair = gate.filled(config, (2, 64, 128), mx.bfloat16)
    found = gate.judge(cache, pair, 4)
    assert found["reason"] is None and found["shape"] == "H4.G2.D64"
    assert found["errors"]["keys"] < 0.02 < found["errors"]["values"]


def test_shuffled_codes_are_found(subtests):
    for side, name in [(0, "keys"), (1, "values")]:
        for preset in ["int8", "int4", "srft-int2+g32"]:
            with subtests.test(side=side, name=name, preset=preset):
                cache, pair = gate.filled(parse_kv(preset), (1, 64, 64), mx.float32)
                shuffle(cache, "codes", side)
                reason = gate.judge(cache, pair, 2)["reason"]
                assert reason.startswith(f"{name} off by")


def test_wrong_attention_and_wrong_windows_are_found(monkeypatch):
    cache, pair = gate.filled(parse_kv("int4"), (1, 64, 64), mx.float32)
    right = gate.attention.attend
    for factor, words in ((1.01, "attention off"), (float("nan"), "attention off by nan")):
        monkeypatch.setattr(gate.attention, "attend", lambda *a, f=factor: f * right(*a))
        found = gate.judge(cache, pair, 2)
        assert words in found["reason"] and json.dumps(found, allow_nan=False)
    monkeypatch.undo()
    cache._live[0][:, :, 3] = 0
    assert "keys in windows off" in gate.judge(cache, pair, 2)["reason"]


def test_a_whole_model_passes_its_gate():
    found = gate.check(subject(), "int4")
    assert found["ok"] and found["reason"] is None
    assert [c["shape"] for c in found["checks"]] == ["H4.G2.D64"]


def test_nan_in_the_logits_and_nothing_to_compress_are_red():
    it = subject("llama")
    it.model.model.norm.weight = mx.full(it.model.model.norm.weight.shape, float("nan"))
    found = gate.check(it, "int4")
    assert not found["ok"] and "NaN or infinity in the logits at token 1" in found["reason"]
    with pytest.warns(UserWarning, match="NOTHING"):
        found = gate.check(subject("mamba2"), "int4")
    assert not found["ok"] and "NOTHING IS COMPRESSED" in found["reason"]


def test_bytes_read_are_those_of_stored_tokens(subtests):
    for preset in ["fp16", "int4", "mlx-lm-kv4"]:
        with subtests.test(preset=preset):
            from mlxkv.bench.whole.decode import WARM, measure

            it = subject("llama")
            found = measure(it, preset, 300, "prefill", 4)
            tokens, values = 300 + WARM + 4, 2 * 2 * 2 * 64  # layers, sides, heads, dims
            if preset == "fp16":
                assert found["read_bytes"] == tokens * values * 4 < found["kv_bytes"]
            elif preset == "mlx-lm-kv4":  # scales and biases in float32, one pair for 64 values
                assert found["read_bytes"] == pytest.approx(
                    tokens * values * (4 + 64 / 64) / 8, rel=0.01
                )
            else:
                pages = (tokens - 128) // 64 * 64
                assert found["read_bytes"] == values * (pages * 4.5 / 8 + (tokens - pages) * 4)


def test_weights_that_a_token_reads():
    tied, untied = (subject("llama", tie_word_embeddings=t) for t in (True, False))
    table = 64 * 32 * 4
    assert reading.weight_bytes(untied.model, untied.config) == reading.weight_bytes(
        tied.model, tied.config
    )
    assert sum(x.nbytes for _, x in reading.tree_flatten(untied.model.parameters())) == (
        reading.weight_bytes(untied.model, untied.config) + table
    )
    experts = subject("gpt_oss")
    weights = dict(reading.tree_flatten(experts.model.parameters()))
    routed = sum(x.nbytes for name, x in weights.items() if ".experts." in name)
    looked_up = table if "lm_head.weight" in weights else 0
    assert reading.weight_bytes(experts.model, experts.config) == pytest.approx(
        sum(x.nbytes for x in weights.values()) - looked_up - routed / 2  # 2 of 4 experts
    )
    assert routed
