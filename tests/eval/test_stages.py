"""The stages task: errors agree with NumPy, in every model family, and the model is left unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import emulator
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from on_emulator import make
from random_models import random_model, tokens
from small_models import TINY, story_tokens

from mlxkv.codec.codec import Codec, codec
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import stages
from mlxkv.eval.tasks.part import TaskOptions
from mlxkv.formats.presets import PRESETS
from mlxkv.metal import launch
from mlxkv.models import attach, detach, load
from mlxkv.models.hooks.taps import observe, put_observers

OLD = not hasattr(KVCache, "keys_and_values")  # mlx-lm before 0.32
LEFT_OUT = {"deepseek_v3", "mamba2"}
LEFT_OUT |= {"gemma3n", "afm7"} if OLD else set()
# Something stands between attention and W_o, or attention is the family's own code (plamo).
GATED = {"qwen3_next", "iquestloopcoder", "plamo"}
PARTLY = {"iquestloopcoder"}  # does not call its layers as a whole
OWN = ("keys", "values", "scores_kl", "attention")
WINDOWS = {"sink": 16, "recent": 16, "page": 16}


def arms_of(model, *names: str, **windows: int) -> Arms:
    arms = Arms(SimpleNamespace(model=model), names)
    arms.configs = {n: replace(c, **(windows or WINDOWS)) for n, c in arms.configs.items()}
    return arms


def measure(arms: Arms, names: list[str], count: int, queries: int) -> dict:
    text = tokens(count + queries).tolist()
    return stages.measure(arms, names, text, count, lambda _: None)


@pytest.fixture(scope="module")
def tiny():
    loaded = load(TINY, "fp16")
    arms = Arms(loaded, ["fp16/int4", "int8", "int4", "srft-int2+g32"])
    options = TaskOptions(contexts=(384,))
    (part,) = stages.parts(arms, options, lambda count: story_tokens(loaded, count))
    steps = []
    out = part.run(arms, arms.names, steps.append)
    assert sum(steps) == part.steps * len(arms.names)
    assert (part.task, part.name, part.asks["queries"]) == ("stages", "384", 64)
    assert part.asks["tokens"] == story_tokens(loaded, 384 + 64)
    return json.loads(json.dumps(out))


def test_full_precision_against_itself_is_zero(tiny):
    row = tiny[BASELINE]
    assert row["logits_kl"] == 0 and (row["tokens"], row["queries"]) == (384, 64)
    assert len(row["layers"]) == 8
    for layer in row["layers"]:
        assert not layer["compressed"] and layer["attention_at"] is None
        assert all(layer[name] == 0 for name in (*OWN, "sealed", "hidden"))


def test_exact_keys_have_no_error_where_values_have_one(tiny):
    for layer in full_layers(tiny["fp16/int4"]):
        assert layer["keys"] == layer["scores_kl"] == 0
        assert layer["values"] > 0 and layer["attention"] > 0 and layer["hidden"] > 0


def test_fewer_bits_are_worse_at_every_stage(tiny):
    rows = [tiny[name] for name in ("int8", "int4", "srft-int2+g32")]
    assert 0 < rows[0]["logits_kl"] < rows[1]["logits_kl"] < rows[2]["logits_kl"]
    for layers in zip(*map(full_layers, rows), strict=True):
        for stage in (*OWN, "hidden"):
            errors = [layer[stage] for layer in layers]
            assert 0 < errors[0] < errors[1] < errors[2], (layers[0]["index"], stage, errors)
        assert {layer["attention_at"] for layer in layers} == {"output projection"}
        # 384 tokens at once, less sink and at most recent + page: four pages; one more from queries
        assert {layer["sealed"] for layer in layers} == {256}


def full_layers(row: dict) -> list[dict]:
    """Every second layer: the others slide."""
    out = [layer for layer in row["layers"] if layer["compressed"]]
    assert [layer["index"] for layer in out] == [1, 3, 5, 7]
    return out


def relative(error: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(error) / np.linalg.norm(exact))


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def test_one_layer_agrees_with_numpy():
    """One sealed page, four query heads on two kv heads, computed again in float64."""
    count, queries = 100, 8
    model = random_model("llama", num_hidden_layers=1)
    arms = arms_of(model, "srft-int2+g32", sink=16, recent=64, page=16)
    row = measure(arms, ["srft-int2+g32"], count, queries)["srft-int2+g32"]["layers"][0]

    text, layer = tokens(count + queries)[None], model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(text))
    attention, heads = layer.self_attn, {}
    for name, turned in (("q", True), ("k", True), ("v", False)):
        flat = getattr(attention, f"{name}_proj")(x)
        heads[name] = flat.reshape(1, count + queries, -1, 64).swapaxes(1, 2)
        heads[name] = attention.rope(heads[name]) if turned else heads[name]
    side = PRESETS["srft-int2+g32"].keys
    page, stored = codec(side, 64, 16), {}
    for name in "kv":
        decoded = page.decode(page.encode(heads[name][:, :, 16:32]), mx.float32)
        exact = float64(heads[name])
        stored[name] = exact.copy()
        stored[name][:, :, 16:32] = float64(decoded)
        error = relative(stored[name][:, :, 16:32] - exact[:, :, 16:32], exact[:, :, 16:32])
        assert row[{"k": "keys", "v": "values"}[name]] == pytest.approx(error, rel=1e-4)
    assert row["sealed"] == 16

    q = float64(heads["q"])[:, :, count:]
    seen = np.arange(count, count + queries)[:, None] >= np.arange(count + queries)

    def attend(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = (x.repeat(2, axis=1) for x in (k, v))
        scores = np.where(seen, q @ k.swapaxes(-1, -2) * attention.scale, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        joined = (p @ v).swapaxes(1, 2).reshape(queries, -1)
        return p, joined @ float64(attention.o_proj.weight).T

    (p, out), (p_stored, out_stored) = (
        attend(float64(heads["k"]), float64(heads["v"])),
        attend(stored["k"], stored["v"]),
    )
    terms = np.where(seen, p * np.log(np.where(seen, p / np.maximum(p_stored, 1e-300), 1)), 0)
    assert row["scores_kl"] == pytest.approx(terms.sum(axis=-1).mean(), rel=1e-3)
    assert row["attention"] == pytest.approx(relative(out_stored - out, out), rel=1e-3)
    assert row["attention_at"] == "output projection" and row["kind"] == "full attention"


def test_every_family(subtests):
    """An exact side with another mask, head order or scale would be off by far more than int8 is."""
    for family in ("llama", "gpt_oss", "gemma2", "qwen3_next", "iquestloopcoder"):
        with subtests.test(family=family):
            model = random_model(family)
            row = measure(arms_of(model, "int8"), ["int8"], 140, 12)["int8"]
            assert 0 < row["logits_kl"] < 0.01
            compressed = [layer for layer in row["layers"] if layer["compressed"]]
            assert compressed and len(row["layers"]) == len(model.layers)
            for layer in compressed:
                assert layer["sealed"] >= 64
                assert 0 < layer["keys"] < 0.02 and 0 < layer["values"] < 0.02
                assert 0 < layer["scores_kl"] < 1e-3 and 0 < layer["attention"] < 0.03
                assert layer["attention_at"] == (
                    "heads" if family in GATED else "output projection"
                )
            for layer in row["layers"]:
                assert (layer["hidden"] is None) == (family in PARTLY)
                if not layer["compressed"]:
                    assert all(layer[name] == 0 for name in OWN)


@pytest.mark.skipif(emulator.why_not() is not None, reason="needs the kernel emulator")
def test_records_are_measured_as_codes_are():
    """Decoding by kernels over page records, here in the emulator, against plain ops."""
    config, rows = {"sink": 16, "recent": 16, "page": 64}, []
    for factory in (make, None):
        model = random_model("llama")
        with launch.using(factory):
            arms = arms_of(model, "int4", **config)
            rows.append(measure(arms, ["int4"], 150, 8)["int4"]["layers"])
            assert ("kernels" in arms.reports["int4"][0].kernel) == (factory is make)
    for record, code in zip(*rows, strict=True):
        assert record["sealed"] == code["sealed"] == 64
        for stage in (*OWN, "hidden"):
            assert record[stage] == pytest.approx(code[stage], rel=0.02)


def test_shuffled_pages_show(tiny, monkeypatch):
    """Keys of other tokens are unrelated vectors, and mix other values."""
    loaded, encode, shifts = load(TINY, "fp16"), Codec.encode, cycle((5, 0))  # keys, values
    monkeypatch.setattr(
        Codec, "encode", lambda self, x, way: encode(self, mx.roll(x, next(shifts), axis=2), way)
    )
    arms = Arms(loaded, ["int8"])
    text = story_tokens(loaded, 384 + stages.QUERIES)
    wrong = stages.measure(arms, ["int8"], text, 384, lambda _: None)["int8"]
    assert wrong["logits_kl"] > 100 * tiny["int8"]["logits_kl"]
    for layer, right in zip(full_layers(wrong), full_layers(tiny["int8"]), strict=True):
        assert layer["values"] == pytest.approx(right["values"], rel=0.5)
        for stage in ("keys", "scores_kl", "attention", "hidden"):
            assert layer[stage] > 10 * right[stage]


def test_watching_changes_nothing_and_leaves_no_trace():
    model, text = random_model("gpt_oss"), tokens(140)[None]
    classes = [type(m) for _, m in model.named_modules()]
    plain = model(text)
    attach(model, arms_of(model, "int4").configs["int4"])
    outs, seen = [], []
    for watched in (False, True):
        cache = make_prompt_cache(model)
        if watched:
            assert len(put_observers(cache)) == 2  # the other two slide
        model(text[:, :-8], cache=cache)
        if not watched:
            outs.append(model(text[:, -8:], cache=cache))
            continue
        with observe(model, cache, seen.append):
            outs.append(model(text[:, -8:], cache=cache))
    detach(model)
    assert mx.array_equal(*outs)
    assert [visit.index for visit in seen] == [visit.cache for visit in seen] == [0, 1, 2, 3]
    assert [len(visit.calls) for visit in seen] == [0, 1, 0, 1]
    assert [type(m) for _, m in model.named_modules()] == classes
    assert mx.array_equal(model(text), plain)


def test_an_error_while_watching_leaves_no_trace():
    model = random_model("llama")
    classes = [type(m) for _, m in model.named_modules()]
    calls = []

    def fail(visit):
        calls.append(visit)
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"), observe(model, [], fail):
        model(tokens(4)[None])
    assert len(calls) == 1
    assert [type(m) for _, m in model.named_modules()] == classes
