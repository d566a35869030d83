"""What chunks of tokens are ranked by, and which a decode step reads. Spec: `mlxkv.spec.reading`; the twin of
`mlxkv.cache.reading.summary`."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

from mlxkv.formats.rules.reading import CODES, PARTS, count, parts

MOST = 65504.0


@dataclass(frozen=True)
class Reading:
    """Which share of the chunks of pages is read. summaries: [B, G, chunks, W] uint8, of `summary`. share: in `PARTS`.
    chunk: tokens."""

    summaries: torch.Tensor
    share: int
    chunk: int


def reading(summaries: torch.Tensor, share: float, chunk: int) -> Reading:
    """The reading of pages with these summaries. share: of 1."""
    return Reading(summaries, parts(share), chunk)


def summary(keys: torch.Tensor, chunk: int) -> torch.Tensor:
    """Stored keys [B, G, T, R] -> what their chunks are ranked by, [B, G, T / chunk, 2 R + 4] uint8: codes of the
    means, codes of the deviations, and the bytes of both steps in float16."""
    x, out, steps = keys.float().unflatten(2, (-1, chunk)), [], []
    for numbers, (most, none) in zip((x.mean(3), x.std(3, correction=0)), CODES, strict=True):
        step = (numbers.abs().amax(-1, keepdim=True) / most).clamp(max=MOST).half()
        size = step.float()
        code = (numbers / torch.where(size > 0, size, 1.0)).round()
        out.append((code.clamp(-most if none else 0, most) + none).to(torch.uint8))
        steps.append(step)
    return torch.cat([*out, torch.cat(steps, -1).view(torch.uint8)], -1)


def moments(summaries: torch.Tensor) -> list[torch.Tensor]:
    """Means and deviations, [B, G, chunks, R] float32 each."""
    both = summaries[..., :-4].float().chunk(2, -1)
    steps = summaries[..., -4:].contiguous().view(torch.float16).float()
    return [
        (code - none) * steps[..., i : i + 1]
        for i, (code, (_, none)) in enumerate(zip(both, CODES, strict=True))
    ]


def estimates(q: torch.Tensor, summaries: torch.Tensor, chunk: int) -> torch.Tensor:
    """Scaled queries in the stored domain [B, G, N, R] -> the estimated logarithm of each chunk's mass,
    [B, G, N, chunks]."""
    mean, deviation = moments(summaries)
    return log(chunk) + q @ mean.mT + q.square() @ deviation.square().mT / 2


def weights(logs: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """[B, G, N, chunks], and the logarithm of the mass of the windows [B, G, N, 1] -> [B, G, chunks]: the sum over the
    rows of the shares of all the mass."""
    return torch.cat([logs, beside], -1).softmax(-1)[..., :-1].sum(2)


def taken(weight: torch.Tensor, share: int, there: torch.Tensor | None = None) -> torch.Tensor:
    """Which chunks are read, boolean [B, G, chunks]. there: boolean [B, 1, chunks], whether a row of the batch has such
    a chunk; None: all have."""
    wanted = count(weight.shape[-1], share)
    if there is not None:
        held = there.sum(-1, keepdim=True)
        wanted = ((held * share + PARTS // 2) // PARTS).clamp(min=1).minimum(held)
        weight = weight.masked_fill(~there, -1.0)
    order = weight.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return order < wanted


def read_columns(
    seen: torch.Tensor,
    q: torch.Tensor,
    it: Reading,
    start: int,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """Which tokens a step reads, boolean [B, G, 1, T]. seen: masked scores [B, G, N, T]. q: scaled, in the stored
    domain. start: the first token in a page. visible: boolean [B, T], tokens that may be seen at all (left padding may
    not); None: all."""
    chunks = it.summaries.shape[2]
    stop, there = start + chunks * it.chunk, None
    out = torch.ones(*seen.shape[:2], 1, seen.shape[3], dtype=torch.bool, device=q.device)
    if visible is not None:
        there = visible[:, None, start:stop].unflatten(-1, (chunks, it.chunk)).any(-1)
    elif count(chunks, it.share) == chunks:
        return out
    beside = torch.cat([seen[..., :start], seen[..., stop:]], -1).logsumexp(-1, keepdim=True)
    logs = estimates(q, it.summaries, it.chunk)
    if there is not None:
        logs = logs.masked_fill(~there[:, :, None], torch.finfo(torch.float32).min)
    read = taken(weights(logs, beside), it.share, there)
    out[:, :, 0, start:stop] = read.repeat_interleave(it.chunk, -1)
    return out
