"""The seam to mlx-lm: copies, pickles, caches out of place, what users set and pass."""

from __future__ import annotations

import copy
import importlib
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import KVCache, make_prompt_cache

from experiments.attack.frame import Attempt
from experiments.fixtures import QWEN, TINY
from mlxkv.errors import UserError
from mlxkv.models import attach, detach, load

PRESETS = ("int4", "int8", "kvarn-int2", "polar", "turbo-int3", "int8/int4", "int4+keep0.5")
CALIBRATED = ("oja-0.75+int4",)  # of a model that ships a calibration
FAMILIES = ("llama", "qwen2", "qwen3")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
TEXT = mx.arange(400) % 251
NOT_MODELS = (
    None,
    TINY,
    3,
    {},
    [],
    object(),
    nn.Linear(2, 2),
    nn.ReLU(),
    (nn.Linear(2, 2), None),
)
NOT_KV = (None, 4, 0.5, b"int4", ["int4"], {"keys": "int4"}, object(), "", "int5", "int4/int4/int4")


def attempts(short: bool) -> Iterator[Attempt]:
    models = {name: _random(name) for name in FAMILIES}
    cases = [("llama", kv) for kv in (PRESETS[:2] if short else PRESETS)]
    if not short:
        models[QWEN] = load(QWEN, "fp16").model
        cases += [(QWEN, kv) for kv in CALIBRATED]
        cases += [(name, "int4") for name in FAMILIES[1:]]
    for name, kv in cases:
        for what, use in USES.items():
            model = models[name]
            attach(model, kv)
            yield _attempt(f"{name}, {kv}: {what}", lambda use=use, model=model: use(model))
            detach(model)
            vars(model).pop("make_cache", None)  # what a use has set
    for thing in NOT_KV:
        yield _refused(
            f"attach(llama, {thing!r:.20})", lambda kv=thing: attach(models["llama"], kv)
        )
    for thing in NOT_MODELS:
        yield _refused(f"attach({thing!r:.20}, int4)", lambda thing=thing: attach(thing, "int4"))
        if not isinstance(thing, nn.Module):
            yield _refused(f"detach({thing!r:.20})", lambda thing=thing: detach(thing))


def _random(family: str) -> nn.Module:
    """A small model with random weights."""
    mx.random.seed(0)
    file = importlib.import_module(f"mlx_lm.models.{family}")
    model = file.Model(file.ModelArgs.from_dict(SIZES | {"model_type": family}))
    mx.eval(model.parameters())
    return model


def _attempt(name: str, use: Callable[[], bool]) -> Attempt:
    """One use, which returns whether it held; an error does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Attempt(name, bool(use()), "gave something else")
    except Exception as error:  # whatever comes is what a user would see
        return Attempt(name, False, f"{type(error).__name__}: {str(error)[:120]}")


def _refused(name: str, use: Callable[[], object]) -> Attempt:
    """A mistake, which has to be refused in one line that says where."""
    return _attempt(name, lambda: _says(use))


def _says(use: Callable[[], object]) -> bool:
    try:
        use()
    except UserError as error:
        return str(error).startswith("[") and "\n" not in str(error)
    return False


# -- uses of an attached model; each returns whether it held


def _read(model, cache: list | None = None, text: mx.array = TEXT) -> mx.array:
    out = model(text[None], cache=cache or make_prompt_cache(model))[0, -1]
    mx.eval(out)
    return out


def _twin(make: Callable, first: int) -> Callable:
    def use(model) -> bool:
        right, pair = _read(model), [model, make(model)]
        held = mx.array_equal(_read(pair[1]), right).item()
        detach(pair[first])
        held &= mx.array_equal(_read(pair[1 - first]), right).item()
        detach(pair[1 - first])
        return held and all(_plain(each) for each in pair)

    return use


def _plain(model) -> bool:
    return not any(
        "Compressed" in type(c).__name__ or "Adaptive" in type(c).__name__
        for c in make_prompt_cache(model)
    )


def _pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def _saved(caches: list) -> list:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cache.safetensors")
        mlx_cache.save_prompt_cache(file, caches)
        out = mlx_cache.load_prompt_cache(file)
        mx.eval([cache.state for cache in out])
        return out


def _caches(make: Callable) -> Callable:
    """A cache that was copied, pickled or saved goes on as the one it was made from."""

    def use(model) -> bool:
        cache = make_prompt_cache(model)
        _read(model, cache)
        outs = [_read(model, one, TEXT[:3]) for one in (make(cache), cache)]
        return mx.array_equal(*outs).item()

    return use


def _shallow(model) -> bool:
    right, other = _read(model), copy.copy(model)
    detach(other)
    return mx.array_equal(_read(model), right).item()


def _set(model) -> bool:
    mine = model.make_cache = lambda: [KVCache() for _ in model.layers]
    detach(model)
    return model.make_cache is mine


def _deleted(model) -> bool:
    model.make_cache = list
    del model.make_cache
    detach(model)
    return "make_cache" not in vars(model)


def _after_detach(model) -> bool:
    cache = make_prompt_cache(model)
    _read(model, cache)
    detach(model)
    return _says(lambda: _read(model, cache, TEXT[:1]))


def _in_the_middle(model) -> bool:
    going = generate_step(TEXT, model, max_tokens=4)
    next(going)
    detach(model)
    return _says(lambda: list(going))


def _elsewhere(model) -> bool:
    cache = make_prompt_cache(model)
    _read(model, cache)
    other = _random(next(name for name in FAMILIES if name != model.model_type))
    return _says(lambda: _read(other, cache[:2], TEXT[:1]))


def _bits(model) -> bool:
    plain = [token for token, _ in generate_step(TEXT, model, max_tokens=3)]
    options = {"kv_bits": 4, "quantized_kv_start": 0}
    return plain == [token for token, _ in generate_step(TEXT, model, max_tokens=3, **options)]


def _warned(**options) -> Callable:
    def use(model) -> bool:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            next(generate_step(TEXT, model, **options))
        return any("has no effect" in str(one.message) for one in said)

    return use


def _lru(model) -> bool:
    """mlx-lm's prompt cache cuts back by hundreds of tokens: right, or read afresh."""
    kept, tokens, cache = mlx_cache.LRUPromptCache(), TEXT.tolist(), make_prompt_cache(model)
    _read(model, cache)
    kept.insert_cache("m", tokens, cache)
    for left in (390, 300, 200, 5):
        asked = [*tokens[:left], 0]
        found, rest = kept.fetch_nearest_cache("m", asked)
        if found is None and rest == asked:
            continue
        if {c.offset for c in found} != {len(asked) - len(rest)}:
            return False
    return True


USES = {
    "a deep copy, detached first": _twin(copy.deepcopy, 1),
    "a deep copy, detached last": _twin(copy.deepcopy, 0),
    "a pickle, detached first": _twin(_pickled, 1),
    "a pickle, detached last": _twin(_pickled, 0),
    "a shallow copy, detached": _shallow,
    "caches copied": _caches(lambda cache: [copy.copy(one) for one in cache]),
    "caches deep-copied": _caches(copy.deepcopy),
    "caches pickled": _caches(_pickled),
    "caches saved": _caches(_saved),
    "make_cache set since": _set,
    "make_cache set and deleted since": _deleted,
    "a cache used after detach": _after_detach,
    "detach during generation": _in_the_middle,
    "a cache in another family": _elsewhere,
    "kv_bits change nothing": _bits,
    "kv_bits warn": _warned(kv_bits=4, quantized_kv_start=0),
    "max_kv_size warns": _warned(max_kv_size=64),
    "mlx-lm's prompt cache": _lru,
}
