"""A quantizer of the caller's own: read as a format of ours with the same codes is, in a model and in batches; and what
cannot be one is refused in a line."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from samples import data
from small_models import TINY

import mlxkv
from mlxkv import CacheConfig, Method, Side, UserError
from mlxkv.codec import own
from mlxkv.codec.codec import Codec
from mlxkv.formats.quantizers import Affine
from mlxkv.spec.bounds import rms

LONG = "The harbour of Amsel lies east of the mill. " * 30
TWIN = Side(Affine(4, group=0, symmetric=True))  # the same codes


def encode(x):
    scale = (mx.abs(x).max(-1, keepdims=True) / 7).astype(mx.float16)
    codes = mx.round(x / mx.maximum(scale.astype(mx.float32), 1e-9))
    return {"codes": codes.astype(mx.int8), "scale": scale}


def decode(stored):
    return stored["codes"] * stored["scale"].astype(mx.float32)


MINE = Method("mine", encode, decode, bits=4.25)


@pytest.fixture(scope="module")
def loaded():
    return mlxkv.load(str(TINY), "fp16")


def logits(loaded, kv) -> np.ndarray:
    """What a model says after each of the last tokens of a text that is read in chunks."""
    mlxkv.attach(loaded.model, kv)
    cache, tokens = make_prompt_cache(loaded.model), loaded.tokenizer.encode(LONG)
    parts = [mx.array(tokens[i : i + 100])[None] for i in range(0, len(tokens), 100)]
    out = [loaded.model(part, cache=cache)[0] for part in parts]
    return np.array(mx.concatenate(out[-2:]).astype(mx.float32))


def test_it_is_read_as_a_format_with_the_same_codes(subtests, loaded):
    exact = logits(loaded, "fp16")
    for name, change in {
        "both": lambda side: CacheConfig(side, side),
        "values": lambda side: replace(mlxkv.parse_kv("int8"), values=side),
        "a transform": lambda side: CacheConfig(replace(side, transform="hadamard"), side),
        "a calibrated map": lambda side: CacheConfig(replace(side, transform="balanced"), side),
        "longer pages": lambda side: CacheConfig(side, side, page=128, sink=4, recent=16),
    }.items():
        with subtests.test(name=name):
            ours, twin = logits(loaded, change(Side(MINE))), logits(loaded, change(TWIN))
            # Rounded from the scale in float16 by both: a code at a boundary may fall the other way.
            assert rms(ours, twin) < 1e-3 < rms(exact, twin)


def test_a_method_alone_is_a_cache(loaded):
    reports = mlxkv.attach(loaded.model, MINE)
    said = {(one.reason, one.bits_per_value) for one in reports if one.compressed}
    assert said == {("mine", 4.25)}
    assert mlxkv.parse_kv(MINE) == CacheConfig(Side(MINE), Side(MINE))
    assert mlxkv.parse_kv(Method("fp16", encode, decode)).label != "fp16"


def test_single_steps_and_batches(loaded):
    mlxkv.attach(loaded.model, CacheConfig(TWIN, TWIN))
    prompts = [loaded.tokenizer.encode(text) for text in (LONG, LONG[300:] + "The mill")]
    model, tokenizer = loaded
    twin = [x.text for x in stream_generate(model, tokenizer, prompts[0], max_tokens=8)]
    both = batch_generate(model, tokenizer, prompts, max_tokens=8).texts
    mlxkv.attach(model, MINE)
    assert [x.text for x in stream_generate(model, tokenizer, prompts[0], max_tokens=8)] == twin
    assert batch_generate(model, tokenizer, prompts, max_tokens=8).texts == both


def test_arrays_of_every_type_and_shape_come_back():
    kinds = {
        "bits": (lambda x: x > 0),
        "words": (lambda x: mx.abs(x[:, ::16, :8]).astype(mx.uint32)),
        "halves": (lambda x: x.mean((1, 2)).astype(mx.float16)),
        "wide": (lambda x: x.astype(mx.bfloat16)),
        "numbers": (lambda x: x[:, :, None, :3]),
        "signed": (lambda x: x[:, 0].astype(mx.int8)),
    }
    seen = []

    def give(x):
        return {name: kind(x) for name, kind in kinds.items()}

    def take(stored):
        seen.append(stored)
        return stored["wide"].astype(mx.float32)

    code = Codec(Side(Method("kinds", give, take)), 32, 64)
    x = mx.array(data(2, 3, 128, 32))
    stored = code.encode(x)
    assert code.decode(stored, mx.float16).shape == x.shape
    rows = mx.reshape(x, (-1, 64, 32))
    for name, y in give(rows).items():
        assert seen[-1][name].dtype == y.dtype and mx.array_equal(seen[-1][name], y), name
    assert 8 * sum(y.nbytes for y in stored.values()) == x.size * code.quantizer.bits_per_value(
        32, 64
    )


def test_bits_are_those_of_the_arrays_unless_they_are_given():
    assert Method("mine", encode, decode).bits_per_value(128, 64) == 8 + 16 / 128
    assert MINE.bits_per_value(128, 64) == 4.25


def bad(change) -> tuple:
    """encode with its dict changed, and decode."""
    return lambda x: change(encode(x), x), decode


BAD = [
    ((lambda x: x, decode), "bad: encode returns no dict of arrays; got array; return arrays by"),
    ((lambda x: {}, decode), "bad: encode returns no dict of arrays; got dict; return arrays by"),
    (bad(lambda s, x: s | {"n": 3}), "bad: encode returns no dict of arrays; got dict; "),
    (
        bad(lambda s, x: s | {"scale": s["scale"][0]}),
        "bad: encode returns 'scale' of another number of pages; got shape (64, 1) for x of (3, 64, 128); keep axis 0",
    ),
    ((lambda x: x.no, decode), "bad: encode fails; got AttributeError: 'array' object has no "),
    ((encode, lambda s: s["no"]), "bad: decode fails; got KeyError: 'no'; try it on pages [P, "),
    (
        (encode, lambda s: decode(s)[..., :64]),
        "bad: decode returns another shape; got shape (3, 64, 64); return (3, 64, 128)",
    ),
    ((encode, lambda s: None), "bad: decode returns another shape; got NoneType; return (3, 64, "),
    (
        (lambda x: {"x": x / mx.abs(x).max(-1, keepdims=True)}, lambda s: s["x"]),
        "bad: decode returns NaN or infinity; got a page of usual values, one of zeros, one of values around 100; ",
    ),
    (
        (encode, lambda s: s["codes"] / s["scale"] * mx.square(s["scale"])),
        "bad: decode returns NaN or infinity; got a page of usual values, one of zeros",
    ),
    (
        (lambda x: {"x": x, "one": mx.ones(len(x))}, lambda s: s["x"] / s["one"][:, None, None]),
        "bad: decode returns NaN or infinity; got arrays of zeros; ",
    ),
    (
        (
            lambda x: {"x": mx.round(x / mx.abs(x).max()), "s": mx.abs(x).max() + 0 * x[:, 0, 0]},
            lambda s: s["x"] * s["s"][:, None, None],
        ),
        "bad encodes a page otherwise among others; got another result for 3 pages than for one; take no statistics "
        "over axis 0, and draw no random numbers",
    ),
]


def test_what_cannot_be_a_method_is_refused_in_one_line(subtests, loaded):
    """And leaves the model as it was."""
    mlxkv.attach(loaded.model, "int4")
    for functions, line in BAD:
        with subtests.test(line=line):
            with pytest.raises(UserError) as error:
                mlxkv.attach(loaded.model, Method("bad", *functions))
            assert str(error.value).startswith(f"[Method] {line}")
            assert "\n" not in str(error.value)
            label = make_prompt_cache(loaded.model)[1].config.label
            assert label == "int4"
    for arguments, line in [
        (("mine", None, decode), "[Method] encode is no function; got None; pass one"),
        (("", encode, decode), "[Method] no name for reports; got ''; pass a text"),
        (("mine", encode, decode, 0), "[Method] bits per value are above 0 and at most 32; got 0"),
    ]:
        with pytest.raises(UserError) as error:
            Method(*arguments)
        assert str(error.value).startswith(line)


def test_a_file_of_such_a_cache_is_refused(loaded, tmp_path):
    mlxkv.attach(loaded.model, MINE)
    cache = make_prompt_cache(loaded.model)
    loaded.model(mx.array(loaded.tokenizer.encode(LONG))[None], cache=cache)
    save_prompt_cache(str(tmp_path / "x.safetensors"), cache)
    with pytest.raises(UserError, match="not a cache configuration this version reads"):
        load_prompt_cache(str(tmp_path / "x.safetensors"))


def test_it_is_tried_once_for_a_size(monkeypatch):
    calls = []

    def counted(x):
        calls.append(x.shape)
        return encode(x)

    one = Method("counted", counted, decode)
    for _ in range(3):
        own.form(one, 64, 64)
    assert calls == [(3, 64, 64), (1, 64, 64)]
