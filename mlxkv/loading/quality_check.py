"""Compare a model's compressed cache with its full one once, on a few hundred tokens, and warn if they disagree.

Some methods collapse on some families: on keys with a bias (Qwen2.5), or behind a norm with a few large weights
(Gemma 3). A thousand tokens of any text are enough to show it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import __version__, console, files, startup
from mlxkv.calibration.fitting import find_calibration
from mlxkv.corpora import corpus, sources
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.patching.trees import own_caches

TOKENS, LAST = 1024, 64  # tokens read; tokens compared, at their end
STEP = 256  # tokens per chunk: attention reads the stored tokens of earlier chunks
LIMIT = 0.1  # nats
# Presets that did not fail on any measured model: not checked.
TRUSTED = ("fp16", "int8", "int4")


def warn(loaded) -> None:
    """Print one line on stderr if `loaded` (a `mlxkv.Loaded`) predicts differently with its compressed cache.

    The result is kept in the user's cache folder, by model, format and calibration.
    """
    compressed = any(layer.compressed for layer in loaded.layers)
    if not compressed or loaded.chosen or loaded.kv in map(parse_kv, TRUSTED):
        return
    file = console.cache_dir() / "quality" / f"{_key(loaded)}.json"
    try:
        kl = float(json.loads(file.read_text())["kl"])
    except (OSError, ValueError, KeyError, TypeError):
        what, steps = f"comparing {loaded.kv_name} with the full cache", 2 * TOKENS
        with startup.one_thread(), console.progress(what, steps, "once for a model") as count:
            kl = divergence(loaded, count)
        with suppress(OSError, UserError):
            files.make_folder(file.parent)
            with files.written(file) as out:
                out.write(
                    json.dumps({"kl": kl, "model": loaded.name, "kv": loaded.kv_name}).encode()
                )
    if not kl <= LIMIT:
        console.warn(
            f"! {loaded.kv_name} changes what {loaded.name} says: KL {kl:.2g} nats a token after {TOKENS} tokens of "
            "ordinary text; --kv int4 is safe"
        )


def divergence(loaded, count: Callable[[int], None] = lambda n: None) -> float:
    """Return the mean KL of next tokens, nats, from the full cache to the compressed one, over LAST tokens of the
    calibration corpus after TOKENS - LAST others; over less text if the model's context is shorter. count: gets the
    tokens that were read."""
    text = "\n\n".join(corpus.interleaved("calibration"))[: 16 * TOKENS]
    tokens = sources.start_of(loaded) + loaded.tokenizer.encode(text, add_special_tokens=False)
    tokens = tokens[: min(loaded.context or TOKENS, TOKENS)]
    full = _log_probabilities(loaded.model, own_caches(loaded.model), tokens, count)
    compressed = _log_probabilities(loaded.model, make_prompt_cache(loaded.model), tokens, count)
    return float((mx.exp(full) * (full - compressed)).sum(-1).mean())


def _log_probabilities(
    model, cache: list, tokens: list[int], count: Callable[[int], None]
) -> mx.array:
    """Return log probabilities after each of the last tokens, [T, vocabulary] float32."""
    ids = mx.array(tokens)[None]
    for start in range(0, max(0, len(tokens) - LAST), STEP):
        part = ids[:, start : min(start + STEP, len(tokens) - LAST)]
        model(part, cache=cache)
        mx.eval([layer.state for layer in cache])
        count(part.size)
    logits = model(ids[:, -LAST:], cache=cache)[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _key(loaded) -> str:
    """Return the cache key of a result: model, format, calibration and how texts begin."""
    calibration = find_calibration(loaded.model, loaded.kv)
    parts = [loaded.fingerprint, str(loaded.dtype), __version__, loaded.kv.as_dict()]
    parts += [calibration and calibration.digest, sources.start_of(loaded)]
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
