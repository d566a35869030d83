"""What chunks of tokens are ranked by, and which are read, by plain ops. Spec: `spec.reading`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import mlx.core as mx

from mlxkv.formats.rules.reading import CODES, PARTS, count, parts

NAME = "summary"  # of the arrays of pages
MOST = 65504.0


@dataclass(frozen=True)
class Reading:
    """Which share of the chunks of pages is read.

    summaries: [B, G, chunks, W] uint32, of `summary`, with spare room behind those in use. share: in `PARTS`. chunk:
    tokens.
    """

    summaries: mx.array
    share: int
    chunk: int

    def between(self, start: int, stop: int) -> Reading:
        """Those of tokens start .. stop - 1, whole chunks."""
        first, last = start // self.chunk, stop // self.chunk
        return replace(self, summaries=self.summaries[:, :, first:last])


def reading(summaries: mx.array | None, share: float, chunk: int) -> Reading | None:
    """The reading of pages with these summaries, None where all is read."""
    return None if summaries is None else Reading(summaries, parts(share), chunk)


def summary(keys: mx.array, chunk: int) -> mx.array:
    """Stored keys [B, G, T, R] -> what their chunks are ranked by, [B, G, T / chunk, W] uint32, W of `rules.reading.
    words`: codes of the means, four to a word, codes of the deviations, and both steps."""
    dims = keys.shape[3]
    codes, steps = _codes(keys.reshape(*keys.shape[:2], -1, chunk, dims))
    if dims % 4:
        codes = mx.pad(codes, [(0, 0)] * 4 + [(0, -dims % 4)])
    codes = codes.reshape(*codes.shape[:3], -1).view(mx.uint32)
    return mx.concatenate([codes, steps[..., 0].view(mx.uint32)], axis=-1)


@mx.compile  # a third of the kernels
def _codes(keys: mx.array) -> tuple[mx.array, mx.array]:
    """Keys [B, G, chunks, tokens, R] -> codes [B, G, chunks, 2, R] uint8 and steps [B, G, chunks, 2, 1] float16."""
    x = keys.astype(mx.float32)
    mean = x.mean(3, keepdims=True)
    both = mx.concatenate([mean, mx.sqrt(mx.square(x - mean).mean(3, keepdims=True))], axis=3)
    most, none = (mx.array(side, mx.float32)[:, None] for side in zip(*CODES, strict=True))
    steps = mx.minimum(mx.abs(both).max(-1, keepdims=True) / most, MOST).astype(mx.float16)
    size = steps.astype(mx.float32)
    code = mx.round(both / mx.where(size > 0, size, 1))
    low = mx.where(none > 0, -most, 0)
    return (mx.clip(code, low, most) + none).astype(mx.uint8), steps


def moments(summaries: mx.array, dims: int) -> tuple[mx.array, mx.array]:
    """Means and deviations of so many stored dims, [B, G, chunks, R] float32 each."""
    codes = mx.contiguous(summaries[..., :-1]).view(mx.uint8).astype(mx.float32)
    steps = mx.contiguous(summaries[..., -1:]).view(mx.float16).astype(mx.float32)
    both = mx.split(codes, 2, axis=-1)
    return tuple(
        (both[i][..., :dims] - none) * steps[..., i : i + 1] for i, (_, none) in enumerate(CODES)
    )


def estimates(q: mx.array, summaries: mx.array, chunk: int) -> mx.array:
    """Scaled queries in the stored domain [B, G, N, R] float32 -> the estimated logarithm of each chunk's mass,
    [B, G, N, chunks]."""
    mean, deviation = moments(summaries, q.shape[3])
    varied = mx.square(q) @ mx.square(deviation).swapaxes(-1, -2)
    return log(chunk) + q @ mean.swapaxes(-1, -2) + varied / 2


def weights(logs: mx.array, beside: mx.array) -> mx.array:
    """[B, G, N, chunks], and the logarithm of the mass of the windows [B, G, N, 1] -> [B, G, chunks]: the sum over the
    rows of the shares of all the mass."""
    both = mx.concatenate([logs, beside], axis=-1)
    return mx.softmax(both, axis=-1, precise=True)[..., :-1].sum(2)


def taken(weight: mx.array, share: int, there: mx.array | None = None) -> mx.array:
    """Which chunks are read, boolean [B, G, chunks]. there: boolean [B, 1, chunks], whether there is such a chunk,
    where arrays have spare room; None: all are."""
    chunks = weight.shape[-1]
    if there is None:
        wanted = count(chunks, share)
    else:
        held = there.sum(-1, keepdims=True)
        wanted = mx.minimum(held, mx.maximum((held * share + PARTS // 2) // PARTS, 1))
        weight = mx.where(there, weight, -1.0)
    order = mx.argsort(mx.argsort(-weight, axis=-1), axis=-1)
    return order < wanted
