"""Task `divergence`: perplexity and KL divergence with the cache in the loop.

`measure` has two legs. prompt: a text is read in chunks, as a chat reads a prompt, and its second half is scored.
decode: the text goes on token by token, and attention reads the stored cache. All arms read the same tokens with the
same weights, in step with full precision. Each of several texts is a part of its own.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxkv.catalog.shapes import text_config
from mlxkv.corpora import sources
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.engine import Part, Results, TaskOptions
from mlxkv.generate.generation import prefill_step

LOGITS = 1 << 27  # most numbers in the logits of one chunk
LOWEST = -1e30
LEGS = ("prompt", "decode")


@dataclass
class Tokens:
    """Measurements at each scored token, arrays [N] float64.

    nll, nll_base: negative log likelihood of the true token, nats. kl: KL(base || arm) of the whole
    distribution, nats. same: 1 if both have the same likeliest token.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kl: np.ndarray
    same: np.ndarray

    def __len__(self) -> int:
        return len(self.nll)

    def packed(self) -> dict[str, str]:
        """Return the arrays as float32 in base64, for JSON."""
        return {k: b64encode(x.astype("<f4").tobytes()).decode() for k, x in vars(self).items()}

    @staticmethod
    def unpacked(data: dict[str, str]) -> Tokens:
        """Return the inverse of `packed`, in float32 precision."""
        arrays = {k: np.frombuffer(b64decode(x), "<f4") for k, x in data.items()}
        return Tokens(**{k: x.astype(np.float64) for k, x in arrays.items()})

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(*(x[part] for x in vars(self).values()))


def joined(parts: list[Tokens]) -> Tokens:
    """Concatenate."""
    return Tokens(
        *(np.concatenate(xs) for xs in zip(*(vars(p).values() for p in parts), strict=True))
    )


def summary(tokens: Tokens) -> dict:
    """Return perplexities, KL divergence and the share of tokens with the same likeliest one, as plain data.
    Percentiles interpolate."""
    return {
        "tokens": len(tokens),
        "ppl": float(np.exp(tokens.nll.mean())),
        "ppl_base": float(np.exp(tokens.nll_base.mean())),
        "ppl_log_ratio": float((tokens.nll - tokens.nll_base).mean()),
        "kl": {
            "mean": float(tokens.kl.mean()),
            "max": float(tokens.kl.max()),
            "p99": float(np.percentile(tokens.kl, 99)),
        },
        "same_top": float(tokens.same.mean()),
    }


def parts(arms: Arms, options: TaskOptions) -> list[Part]:
    """Return one part per context and text; `pooled` joins their results. The texts are disjoint."""
    out = []
    for context in options.contexts:
        count = context + options.decode + 1
        texts = sources.evaluation_texts(arms.loaded, count, options.samples, options.texts)
        for at, text in enumerate(texts):

            def run(arms: Arms, names: list[str], progress, text=text, context=context):
                for name, result in measure(arms, names, text.tokens, context, progress).items():
                    yield name, {"name": text.name, **result}

            asks = {"text": text.name, "tokens": text.tokens, "chunk": _chunk(arms)}
            steps = context + options.decode
            out.append(Part("divergence", str(at + 1), context, run, steps, asks))
    return out


def pooled(texts: list[dict]) -> dict:
    """Return the results of one arm on several texts as one: `summary` of both legs over all tokens, and "texts":
    name and means of each, in one order for all arms."""
    scored = [{leg: Tokens.unpacked(text["scored"][leg]) for leg in LEGS} for text in texts]
    return {
        "legs": {leg: summary(joined([text[leg] for text in scored])) for leg in LEGS},
        "kv_bytes": max(text["kv_bytes"] for text in texts),
        "texts": [
            {
                "name": text["name"],
                "kl": text["legs"]["decode"]["kl"]["mean"],
                "top1": text["legs"]["decode"]["same_top"],
                "ppl_log_ratio": text["legs"]["decode"]["ppl_log_ratio"],
                "prompt_kl": text["legs"]["prompt"]["kl"]["mean"],
            }
            for text in texts
        ],
    }


def measure(
    arms: Arms, names: list[str], tokens: list[int], context: int, progress: Callable[[int], None]
) -> Results:
    """Run both legs over tokens[:-1]; each token predicts the next. The prompt is tokens[:context].

    Returns per arm {"legs": {leg: `summary`}, "scored": the tokens behind the legs, "kv_bytes":
    allocated after the prompt}.
    """
    everyone = list(dict.fromkeys((BASELINE, *names)))
    scored: dict[str, dict[str, list[Tokens]]] = {n: {leg: [] for leg in LEGS} for n in names}
    stored = {}
    with arms.caches(everyone) as caches:
        for leg, start, stop in _steps(context, len(tokens) - 1, _chunk(arms)):
            if start == context:
                stored = {name: arms.stored(name, caches[name]) for name in names}
            new, targets = (
                mx.array(tokens[start:stop])[None],
                mx.array(tokens[start + 1 : stop + 1]),
            )
            base = _logits(arms, new, caches[BASELINE])
            for name in names:
                logits = base if name == BASELINE else _logits(arms, new, caches[name])
                scored[name][leg].append(compare(base, logits, targets))
                progress(stop - start)
    out = {}
    for name in names:
        prompt, decode = (joined(scored[name][leg]) for leg in LEGS)
        prompt = prompt[context // 2 :]
        out[name] = {
            "legs": {"prompt": summary(prompt), "decode": summary(decode)},
            "scored": {"prompt": prompt.packed(), "decode": decode.packed()},
            "kv_bytes": stored[name],
        }
    return out


def compare(base: mx.array, logits: mx.array, targets: mx.array) -> Tokens:
    """Score logits [N, vocabulary] against the base's logits; targets: true next tokens, [N]."""
    # A masked token (-inf) has probability 0 in both and must not become NaN.
    base, logits = (mx.maximum(x.astype(mx.float32), LOWEST) for x in (base, logits))
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (base, logits))
    true_p, true_q = (
        mx.take_along_axis(x, targets[:, None], axis=-1)[:, 0] for x in (log_p, log_q)
    )
    same = mx.argmax(base, axis=-1) == mx.argmax(logits, axis=-1)
    arrays = (
        -true_q,
        -true_p,
        divergence(base, logits),
        same.astype(mx.float32),
    )
    mx.eval(*arrays)
    return Tokens(*(np.array(x, dtype=np.float64) for x in arrays))


def divergence(scores: mx.array, others: mx.array) -> mx.array:
    """Return KL(softmax(scores) || softmax(others)) over the last axis, in nats: [..., T] -> [...].

    Sums q - p - p log(q / p): no term is negative, so a small divergence is not a difference of
    large sums.
    """
    log_p = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    log_q = others - mx.logsumexp(others, axis=-1, keepdims=True)
    p, q, gap = mx.exp(log_p), mx.exp(log_q), log_q - log_p
    near = p * (mx.expm1(mx.minimum(gap, 1)) - gap)
    terms = mx.where(gap < 1, near, q - p - p * gap)
    # For tokens of probability 0 (logits of minus infinity) the gap is NaN.
    return mx.where(p > 0, terms, q).sum(axis=-1)


def _logits(arms: Arms, new: mx.array, cache: list) -> mx.array:
    logits = arms.loaded.model(new, cache=cache)[0]
    mx.eval(logits, [] if new.shape[1] == 1 else [c.state for c in cache])
    return logits


def _chunk(arms: Arms) -> int:
    """Return the tokens of a prompt to read at once: as in a chat, or fewer so that logits fit."""
    vocabulary = int(text_config(arms.loaded.config)["vocab_size"])
    return max(16, min(prefill_step(), LOGITS // vocabulary))


def _steps(context: int, end: int, chunk: int) -> list[tuple[str, int, int]]:
    """Return (leg, first, last + 1) of each chunk."""
    prompt = [("prompt", i, min(i + chunk, context)) for i in range(0, context, chunk)]
    return prompt + [("decode", i, i + 1) for i in range(context, end)]
