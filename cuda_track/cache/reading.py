"""What chunks of tokens are ranked by, and which a decode step reads. Spec: `mlxkv.spec.reading`; the twin of
`mlxkv.cache.reading.summary`."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

from mlxkv.formats.rules.reading import count, parts

MOST = 65504.0


@dataclass(frozen=True)
class Reading:
    """Which share of the chunks of pages is read. summaries: [B, G, chunks, 2 R] float16, mean and deviation of each
    stored dim of a chunk's keys. share: in `PARTS`. chunk: tokens."""

    summaries: torch.Tensor
    share: int
    chunk: int


def reading(summaries: torch.Tensor, share: float, chunk: int) -> Reading:
    """The reading of pages with these summaries. share: of 1."""
    return Reading(summaries, parts(share), chunk)


def summary(keys: torch.Tensor, chunk: int) -> torch.Tensor:
    """Stored keys [B, G, T, R] -> [B, G, T / chunk, 2 R] float16."""
    x = keys.float().unflatten(2, (-1, chunk))
    both = torch.cat([x.mean(3), x.std(3, correction=0)], -1)
    return both.clamp(-MOST, MOST).half()


def estimates(q: torch.Tensor, summaries: torch.Tensor, chunk: int) -> torch.Tensor:
    """Scaled queries in the stored domain [B, G, N, R] -> the estimated logarithm of each chunk's mass,
    [B, G, N, chunks]."""
    mean, deviation = summaries.float().chunk(2, -1)
    return log(chunk) + q @ mean.mT + q.square() @ deviation.square().mT / 2


def weights(logs: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """[B, G, N, chunks], and the logarithm of the mass of the windows [B, G, N, 1] -> [B, G, chunks]: the sum over the
    rows of the shares of all the mass."""
    return torch.cat([logs, beside], -1).softmax(-1)[..., :-1].sum(2)


def taken(weight: torch.Tensor, share: int) -> torch.Tensor:
    """Which chunks are read, boolean [B, G, chunks]."""
    order = weight.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return order < count(weight.shape[-1], share)


def without_unread(
    scores: torch.Tensor, seen: torch.Tensor, q: torch.Tensor, it: Reading, start: int
) -> torch.Tensor:
    """Scores [B, G, N, T] with -inf for the tokens of chunks that are left out. seen: the same, masked. q: in the
    stored domain. start: the first token in a page."""
    chunks = it.summaries.shape[2]
    stop = start + chunks * it.chunk
    if count(chunks, it.share) == chunks:
        return scores
    beside = torch.cat([seen[..., :start], seen[..., stop:]], -1).logsumexp(-1, keepdim=True)
    read = taken(weights(estimates(q, it.summaries, it.chunk), beside), it.share)
    out = torch.ones(*scores.shape[:2], 1, scores.shape[3], dtype=torch.bool, device=q.device)
    out[:, :, 0, start:stop] = read.repeat_interleave(it.chunk, -1)
    return scores.masked_fill(~out, -torch.inf)
