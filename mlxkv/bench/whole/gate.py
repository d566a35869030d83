"""Check that a preset is right on a model on this machine, before its speed is measured."""

from __future__ import annotations

import math

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.bench.reference import BOUNDS, reference, relative_rms
from mlxkv.bench.subject import Subject
from mlxkv.cache import attention
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.codec.codec import Codec
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.models.catalog.reports import LATENT, nothing_compressed
from mlxkv.models.catalog.shapes import text_config

PAGES = 5  # of the checked cache, beside its windows
ODD = 17  # tokens beside whole pages
GREEDY = 8  # decoded tokens whose logits must be finite
PREFILL = 16  # queries that check the prefill path
# Codes of b bits lose at least 2^-b of the rms of Gaussian values. A scalar quantizer with its scales loses
# at most LOSS times as much; wrong codes lose 1.4 of the rms. MOST bounds the loss of low rank.
LOSS, MOST = 4.0, 0.95


def check(it: Subject, preset: str) -> dict:
    """Check caches of every shape in this model, then a short greedy run.

    Returns {"preset", "ok", "reason", "by", "checks"}; `reason` is None if all is right.
    """
    config = parse_kv(preset)
    answer = {"preset": preset, "ok": False, "by": it.decoded_by(preset), "checks": []}
    with it.attached(preset) as reports:
        if message := nothing_compressed(reports):
            return answer | {"reason": message}
        heads = int(text_config(it.config).get("num_attention_heads") or 0)
        # Latents are checked by what the model writes.
        shapes = {
            (r.kv_heads, r.key_dim, r.value_dim)
            for r in reports
            if r.compressed and r.kind != LATENT
        }
        for kv_heads, key_dim, value_dim in sorted(shapes):
            # If the number of query heads is unknown: one per kv head.
            queries = heads if heads and heads % kv_heads == 0 else kv_heads
            cache, pair = filled(config, (kv_heads, key_dim, value_dim), it.dtype)
            answer["checks"].append(judge(cache, pair, queries))
        wrong = next((c["reason"] for c in answer["checks"] if c["reason"]), None)
        reason = wrong or greedy_fault(it, config.window + PAGES * config.page + ODD)
        return answer | {"ok": reason is None, "reason": reason}


def filled(
    config: CacheConfig, shape: tuple[int, int, int], dtype: mx.Dtype
) -> tuple[CompressedKVCache, tuple[mx.array, mx.array]]:
    """Fill a cache as a model does: a prompt in two parts, then single tokens.

    shape: kv heads, key dim, value dim. Returns the cache and its random keys and values, [1, G, T, D].
    """
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


def judge(cache: CompressedKVCache, pair: tuple[mx.array, mx.array], heads: int) -> dict:
    """Compare a cache with `pair`, its keys and values, and attention over it with float32 attention.

    Attention of one query and of a prefill is compared with `reference` over the decoded cache; decoded
    pages with the encoded values; windows must be exact. heads: query heads. Returns {"shape",
    "errors", "bounds", "reason"}: relative rms errors, and why the cache is wrong, or None.
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
        # Pages are decoded into the model's dtype.
        "prefill": (relative_rms(many, expected), 2 * bound),
    }
    config, sink = cache.config, view.sink[0].shape[2] if view.sink else 0
    end = sink + view.pages.tokens
    held = cache.arriving(pair[0].astype(mx.float32)), pair[1].astype(mx.float32)
    for i, (name, side) in enumerate((("keys", config.keys), ("values", config.values))):
        x = held[i]
        pages = view.pages.decode(i, mx.float32)
        code = view.pages.codecs[i]
        bits = side.quantizer.bits_per_value(x.shape[3], config.page)
        # Low rank loses most of Gaussian values: only gross errors show.
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
    """Return how much a map and its inverse enlarge an error: 1 for a rotation."""
    if code.transform is None:
        return 1.0
    down, up = (mx.mean(x**2, axis=(-1, -2)) for x in (code.transform.down, code.transform.up))
    return code.dims * mx.sqrt(mx.max(down * up)).item()


def greedy_fault(it: Subject, length: int) -> str | None:
    """Decode a few greedy tokens after `length` random ones: what is wrong with the logits, or None.
    The preset is attached."""
    mx.random.seed(0)
    prompt = it.random_tokens(length)
    cache = make_prompt_cache(it.model)
    steps = generate_step(prompt, it.model, prompt_cache=cache, max_tokens=GREEDY)
    for count, (_, logprobs) in enumerate(steps, 1):
        # One infinity or NaN in the logits makes all logprobs NaN.
        if mx.isnan(logprobs).any().item() or not mx.isfinite(logprobs.max()).item():
            return f"NaN or infinity in the logits at token {count} after {length}"
    return None
