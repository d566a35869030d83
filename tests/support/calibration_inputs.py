"""Calibrations, their files, texts and random numbers; and what a random llama of 64 dims computes at position 0, and
its moments over positions, by the spec."""

import json

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from safetensors import safe_open
from safetensors.numpy import save

from mlxkv.formats import matrices
from mlxkv.formats.calibration.artifact import Basis
from mlxkv.formats.calibration.balance import Balance
from mlxkv.spec import balanced, positions


def basis(heads: int, dims: int, seed: int, clips=None, keys: bool = True) -> Basis:
    """Return random rotations of a side, and maps that change nothing."""
    values = np.sort(np.random.default_rng(seed).random((heads, dims)) + 0.1).astype(np.float32)
    vectors = matrices.random_basis(heads, dims, seed).astype(np.float32)
    ones = np.ones((heads, dims), np.float32)
    return Basis(
        values, vectors, Balance(vectors, ones), ones, seed, clips or {}, ones if keys else None
    )


def rewritten(path, header=None, drop=(), **tensors):
    """Replace header entries or tensors of a file."""
    with safe_open(path, "numpy") as file:
        old = json.loads(file.metadata()["mlxkv"])
        stored = {n: file.get_tensor(n) for n in file.keys() if n not in drop}  # noqa: SIM118
    path.write_bytes(save(stored | tensors, {"mlxkv": json.dumps({**old, **(header or {})})}))


TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()
DIMS, CONTEXT = 64, 1 << 15  # the context of a model that does not say
PAIRS, FREQUENCIES = positions.rotary_pairs(DIMS), 1e4 ** (-np.arange(0, DIMS, 2) / DIMS)
ROTARY = PAIRS, FREQUENCIES
# How a config.json stretches them.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rms(x, exact):
    return np.sqrt(np.mean((np.array(x) - exact) ** 2) / np.mean(np.array(exact) ** 2))


def logits(model, cache=None, prompt=90, end=100):
    """[T, vocabulary] of a prefill of `prompt` tokens of TEXT behind what `cache` holds, and of the rest one by one."""
    cache = cache or make_prompt_cache(model)
    text = mx.array(TEXT[:end])[None]
    parts = [model(text[:, :prompt], cache=cache)]
    parts += [model(text[:, i : i + 1], cache=cache) for i in range(prompt, end)]
    return np.array(mx.concatenate(parts, axis=1)[0])


def seen_by(model, text, window, before=()):
    """Per layer and window of `text`, behind the tokens `before`: the model's own (q, k, v) [1, H or G, T, D]."""
    seen, original = [], llama.scaled_dot_product_attention

    def spy(q, k, v, **rest):
        seen.append([np.array(x, np.float64) for x in (q, k, v)])
        return original(q, k, v, **rest)

    llama.scaled_dot_product_attention = spy
    try:
        for start in range(0, len(text), window):
            mx.eval(model(mx.array([*before, *text[start : start + window]])[None]))
    finally:
        llama.scaled_dot_product_attention = original
    return [seen[i :: len(model.layers)] for i in range(len(model.layers))]


def at_zero(x):
    """x [..., N, D] of positions 0 to N - 1, rotated back."""
    return positions.rotate(x, -np.arange(x.shape[-2]), *ROTARY)


def moments_over(moments, longest=CONTEXT):
    """[G, D, D] at position 0, over the sessions of a model of `longest` positions."""
    spans = positions.contexts(longest)
    return np.stack(
        [np.mean([positions.moment_over(one, s, *ROTARY) for s in spans], 0) for one in moments]
    )


def stored(windows, sink=64):
    """(moments [G, D, D], means [G, D]) at position 0 of the keys that caches would compress, of the windows
    (`seen_by`) of one layer, half by the attention that they get."""
    windows = [(q[0], k[0]) for q, k, _ in windows]
    rows = [np.broadcast_to(np.arange(k.shape[1]) >= sink, k.shape[:2]) for _, k in windows]
    heard = [balanced.received(q, k, DIMS**-0.5, sink) for q, k in windows]
    keys = np.concatenate([at_zero(k) for _, k in windows], 1)
    return balanced.halves(keys, np.concatenate(heard, 1), np.concatenate(rows, 1))


def means_over(means, longest=CONTEXT):
    spans = positions.contexts(longest)
    return np.stack(
        [np.mean([positions.mean_over(one, s, *ROTARY) for s in spans], 0) for one in means]
    )
