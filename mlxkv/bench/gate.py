"""Is a preset right on this model, here? Asked before its speed is measured."""

from __future__ import annotations

import math

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import attention
from mlxkv.bench.case import BOUNDS, reference, relative_rms
from mlxkv.bench.decode import decoded_by
from mlxkv.bench.models import Subject
from mlxkv.cache import CompressedKVCache
from mlxkv.calibrated import sample
from mlxkv.codec import Codec
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.models import attach, detach
from mlxkv.models.layers import nothing_compressed
from mlxkv.shapes import text_config

PAGES = 5  # behind the windows of the cache that is checked
ODD = 17  # tokens in no whole page
GREEDY = 8  # tokens of the run whose logits have to be finite
PREFILL = 16  # queries of the check of the prefill path
# Gaussian values cannot be coded in b bits with less than 2^-b of their rms lost; a scalar
# quantizer with its scales stays within so many times of that. Wrong codes lose 1.4 of it.
LOSS, MOST = 4.0, 0.95
Side = mx.array


def check(it: Subject, preset: str) -> dict:
    """Attention over caches of every shape in this model, then a short greedy run through it.

    Returns {"preset", "ok", "reason", "by", "checks"}; `reason` is None where all is right.
    """
    config = parse_kv(preset)
    answer = {"preset": preset, "ok": False, "by": decoded_by(it, preset), "checks": []}
    calibration = it.calibration if config.calibrated else None
    reports = attach(it.model, preset, calibration=calibration)
    try:
        if message := nothing_compressed(reports):
            return answer | {"reason": message}
        heads = int(text_config(it.config).get("num_attention_heads") or 0)
        shapes = {(r.kv_heads, r.key_dim, r.value_dim) for r in reports if r.compressed}
        for kv_heads, key_dim, value_dim in sorted(shapes):
            # A layer whose heads we do not know is checked with one query head per kv head.
            queries = heads if heads and heads % kv_heads == 0 else kv_heads
            cache, pair = filled(config, (kv_heads, key_dim, value_dim), it.dtype)
            answer["checks"].append(judge(cache, pair, queries))
        wrong = next((c["reason"] for c in answer["checks"] if c["reason"]), None)
        reason = wrong or greedy_fault(it, config.window + PAGES * config.page + ODD)
        return answer | {"ok": reason is None, "reason": reason}
    finally:
        detach(it.model)


def filled(
    config: CacheConfig, shape: tuple[int, int, int], dtype: mx.Dtype
) -> tuple[CompressedKVCache, tuple[Side, Side]]:
    """A cache filled as a model does it (a prompt in two parts, then single tokens), and the random
    keys and values [1, G, T, D] that it took. shape: kv heads, key dim, value dim."""
    kv_heads, *dims = shape
    mx.random.seed(0)
    total = config.window + PAGES * config.page + ODD
    pair = tuple(mx.random.normal((1, kv_heads, total, d)).astype(dtype) for d in dims)
    rotations = sample(kv_heads, tuple(dims), config.fitted) if config.calibrated else None
    cache = CompressedKVCache(config, rotations)
    parts = [0, total // 2, *range(total - 3, total + 1)]
    for start, stop in zip(parts, parts[1:], strict=False):
        view = cache.update_and_fetch(*(x[:, :, start:stop] for x in pair))[0]
        mx.eval(view.sealed, view.live)
        del view
    return cache, pair


def judge(cache: CompressedKVCache, pair: tuple[Side, Side], heads: int) -> dict:
    """What `cache` holds and what attention makes of it, for the keys and values that it took.

    Compared are: attention of one query and of a prefill with float32 attention over the decoded
    cache; the decoded pages with what was encoded; the windows, which have to be exact. heads: query
    heads. Returns rms errors beside their bounds, and the reason why it is wrong, or None.
    """
    view, dtype = cache.keys_and_values()[0], pair[0].dtype
    kv_heads, dims = pair[0].shape[1], pair[0].shape[3]
    queries = mx.random.normal((1, heads, PREFILL, dims)).astype(dtype)
    expected = reference(queries[:, :, :1], view, dims**-0.5)
    one = attention.attend(queries[:, :, :1], view, dims**-0.5)
    many = attention.attend(queries, view, dims**-0.5)[:, :, :1]
    bound = BOUNDS[dtype]
    errors = {
        "attention": (relative_rms(one, expected), bound),
        # The pages pass through the model's dtype on their way.
        "prefill": (relative_rms(many, expected), 2 * bound),
    }
    config, sink = cache.config, view.sink[0].shape[2] if view.sink else 0
    end = sink + view.pages.tokens
    for i, (name, side) in enumerate((("keys", config.keys), ("values", config.values))):
        x = pair[i].astype(mx.float32)
        pages = view.pages.decode(i, mx.float32)
        code = view.pages.codecs[i]
        bits = side.quantizer.bits_per_value(x.shape[3], config.page)
        # The signs of a residual stage are for products: they bring vectors no closer.
        bits -= getattr(side.quantizer, "residual", False)
        # Low rank drops what it must of Gaussian values: only nonsense shows there.
        loss = min(MOST, stretch(code) * LOSS * 2**-bits) if code.turn is code.transform else MOST
        errors[name] = (relative_rms(pages, x[:, :, sink:end]), max(loss, bound))
        kept = [view.live[i]] if view.sink is None else [view.sink[i], view.live[i]]
        exact = mx.concatenate([x[:, :, :sink], x[:, :, end:]], axis=2)
        errors[f"{name} in windows"] = (relative_rms(mx.concatenate(kept, axis=2), exact), 0.0)
    off = [(n, e, most) for n, (e, most) in errors.items() if not e <= most]  # a NaN is off
    return {
        "shape": f"H{heads}.G{kv_heads}.D{dims}",
        "errors": {n: e if math.isfinite(e) else None for n, (e, _) in errors.items()},
        "bounds": {n: most for n, (_, most) in errors.items()},
        "reason": f"{off[0][0]} off by {off[0][1]:.2g}, bound {off[0][2]:.2g}" if off else None,
    }


def stretch(code: Codec) -> float:
    """How much an error grows on the way through a map and its inverse: 1 for a rotation."""
    if code.transform is None:
        return 1.0
    down, up = (mx.mean(x**2, axis=(-1, -2)) for x in (code.transform.down, code.transform.up))
    return code.dims * mx.sqrt(mx.max(down * up)).item()


def greedy_fault(it: Subject, length: int) -> str | None:
    """What is wrong with the logits of a few greedy tokens behind `length` random ones, or None.
    The preset is attached."""
    mx.random.seed(0)
    prompt = mx.random.randint(0, int(text_config(it.config)["vocab_size"]), (length,))
    cache = make_prompt_cache(it.model)
    steps = generate_step(prompt, it.model, prompt_cache=cache, max_tokens=GREEDY)
    for count, (_, logprobs) in enumerate(steps, 1):
        # One infinity or NaN among the logits makes NaN of all that follows from their sum.
        if mx.isnan(logprobs).any().item() or not mx.isfinite(logprobs.max()).item():
            return f"NaN or infinity in the logits at token {count} behind {length}"
    return None
