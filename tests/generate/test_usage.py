"""Memory figures follow one rule: what is held, what 16 bits would take for it, allocation apart."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from random_models import random_model, tokens
from small_caches import memory_of, read

from mlxkv.formats.names import parse_kv
from mlxkv.generate.usage import projected, usage
from mlxkv.loading.attach import attach

EXACT = 2  # bytes of a number in full precision, though random models run in 32 bits here


@pytest.mark.parametrize(
    ("family", "kv"),
    [("llama", "int4"), ("llama", "kivi-int2"), ("llama", "fp16"), ("gemma3_text", "int4")]
    + [("qwen3_next", "int4")],
)
def test_a_server_computes_what_a_chat_measures(family, kv):
    """What is held, and what has to be allocated for it."""
    model = random_model(family)
    attach(model, kv)
    memory = memory_of(model)
    for count in (5, 192, 193, 300, 900):
        caches = read(model, count)
        found = usage(caches)
        assert found.tokens == count
        assert found.kv_bytes == pytest.approx(memory.in_use(count), rel=1e-6)
        assert found.kv_bytes_fp16 == memory.fp16(count)
        assert found.kv_bytes <= found.allocated
        for _ in range(2):  # decode steps make room, behind one in which mlx-lm cuts a window
            mx.eval(model(tokens(1)[None], cache=caches))
        taken = sum(cache.nbytes for cache in caches)
        assert taken <= memory.need(count + 2)
        assert memory.need(count + 2) <= (1.2 if count in (5, 900) else 2) * taken


@pytest.mark.parametrize("case", [("llama", "fp16/int4"), ("deepseek_v3", "naive-int4")])
def test_exact_numbers_in_pages_are_promised_in_the_type_of_the_model(case):
    """Keys in full precision, and rotary keys beside latents: 32 bits here, which count as 16 where they are in use."""
    family, kv = case
    model = random_model(family)
    attach(model, kv)
    memory = memory_of(model)
    for count in (5, 193, 900):
        caches = read(model, count)
        assert usage(caches).kv_bytes == pytest.approx(memory.in_use(count), rel=1e-6)
        for _ in range(2):
            mx.eval(model(tokens(1)[None], cache=caches))
        taken = sum(cache.nbytes for cache in caches)
        assert taken <= memory.need(count + 2) <= 2.2 * taken


def test_what_is_held_is_counted_token_by_token():
    """int4 on a llama: 64 + 64 exact tokens, pages of 64, and the exact tokens of the last page."""
    model = random_model("llama")
    attach(model, "int4")
    caches = read(model, 300)
    recent = caches[0].keys_and_values()[0].recent[0]
    numbers = 2 * recent.shape[1] * recent.shape[3]  # of a token
    bits = parse_kv("int4").bits_per_value(recent.shape[3], recent.shape[3])
    pages = -(-(300 - 192) // 64)
    held = pages * 64 * bits / 8 + (300 - pages * 64 + 64) * EXACT
    found = usage(caches[:1])
    assert found.kv_bytes == numbers * held
    assert found.kv_bytes_fp16 == 2 * numbers * 300


@pytest.mark.parametrize(
    ("count", "kv", "said"),
    [
        (1, "int4", "nothing compressed yet (exact up to 192 tokens)"),
        (192, "int4", "nothing compressed yet (exact up to 192 tokens)"),
        (200, "int4", "little compressed yet (exact up to 192 tokens)"),
        (160, "kivi-int2", "nothing compressed yet (exact up to 192 tokens)"),
        (380, "oscar-int4", "nothing compressed yet (exact up to 384 tokens)"),
        (900, "fp16", "nothing compressed (full precision)"),
        (900, "int4", None),
    ],
)
def test_no_bits_above_16_without_a_sentence(count, kv, said):
    model = random_model("llama")
    config = parse_kv(kv)
    if config.calibrated:
        from mlxkv.calibration.measure import random

        attach(model, config, calibration=random(model))
    else:
        attach(model, kv)
    found = usage(read(model, count))
    assert found.note == said
    assert (found.bits_per_value is None) == (said is not None)
    assert found.figures["bits_per_value"] is None or 4.5 < found.bits_per_value < 16
    assert (said or "instead of") in found.line()
    assert ("saves" in found.line()) == (said is None)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_a_projection_is_what_a_longer_text_takes(family):
    model = random_model(family)
    attach(model, "int4")
    short, long = read(model, 5), usage(read(model, 900))
    ahead = projected(short, 900)
    assert (ahead.tokens, ahead.kv_bytes_fp16) == (900, long.kv_bytes_fp16)
    assert ahead.kv_bytes == pytest.approx(long.kv_bytes, rel=1e-6)
    assert long.compressed == 768 and ahead.kv_bytes < ahead.kv_bytes_fp16


def test_full_precision_in_16_bits_takes_what_16_bits_take():
    cache = KVCache()
    cache.update_and_fetch(*(mx.zeros((1, 2, 70, 64), mx.float16) for _ in range(2)))
    found = usage([cache])
    assert found.kv_bytes == found.kv_bytes_fp16 == 70 * 2 * 2 * 64 * 2
    assert found.allocated == 256 * 2 * 2 * 64 * 2
    assert usage([]).kv_bytes == usage([]).tokens == 0
