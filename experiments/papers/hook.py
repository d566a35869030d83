"""Read a model with its keys and values changed as they leave k_proj and v_proj: before RoPE, in every layer, no token
exact (SRFT, arXiv 2605.05699, sections 3.3 and 4.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from experiments.papers.ratios import cells, markdown
from experiments.papers.runner import Subject
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval.rows import Row
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.formats.calibration.sums import WINDOW, windows

TRANSFORMS = ("none", "hadamard", "srft")
NUMBERS = ("kurtosis", "energy", "entropy", "largest")  # of a probe
PER_TEXT = 2  # texts of the hook of one of ours
Key = tuple[int, str]  # layer and side
See = Callable[[Key, torch.Tensor], torch.Tensor | None]


@contextmanager
def projections(subject: Subject, see: See) -> Iterator[None]:
    """Show what k_proj and v_proj of every layer return, [B, G, T, D]; what `see` returns replaces it."""
    found = []
    for name, module in subject.model.named_modules():
        if match := re.search(r"layers\.(\d+)\.self_attn$", name):
            for side, linear in zip(SIDES, ("k_proj", "v_proj"), strict=True):
                found.append(
                    ((int(match[1]), side), getattr(module, linear, None), module.head_dim)
                )
    if not found or any(linear is None for _, linear, _ in found):
        raise UserError(
            f"[models] no k_proj and v_proj; got {subject.name}; choose Llama, Qwen, Gemma"
        )

    def hook(key: Key, dims: int, linear, args, out: torch.Tensor) -> torch.Tensor | None:
        made = see(key, out.unflatten(-1, (-1, dims)).transpose(1, 2).float())
        return None if made is None else made.to(out.dtype).transpose(1, 2).flatten(-2)

    handles = [linear.register_forward_hook(partial(hook, k, dims)) for k, linear, dims in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def calibration_rows(subject: Subject) -> dict[Key, torch.Tensor]:
    """Return calibration rows [G, T, D] of every layer's k_proj and v_proj."""
    parts: dict[Key, list[torch.Tensor]] = {}
    tokens = sources.calibration_tokens(subject.loaded, subject.budget).tokens
    start = sources.start_of(subject.loaded)
    with projections(subject, lambda key, x: parts.setdefault(key, []).append(x[0])):
        for part in windows(tokens, min(WINDOW, subject.positions)):
            ids = torch.tensor([[*start, *part]], device=subject.model.device)
            subject.model(ids, use_cache=False, logits_to_keep=1)
    return {key: torch.cat(xs, 1) for key, xs in parts.items()}


def pieces(tokens: Sequence[int], size: int, start: int) -> list[list[int]]:
    """Return PER_TEXT texts of `size` tokens and one more, or fewer: pieces of a text, one after the other, each behind
    its first `start` tokens."""
    begin, rest, own = list(tokens[:start]), list(tokens[start:]), size - start
    places = range(0, min(PER_TEXT * own, len(rest) - own), own)
    return [begin + rest[i : i + own + 1] for i in places]


@torch.no_grad()
def likelihood(subject: Subject, ids: torch.Tensor, see: See) -> float:
    """Return nats a token of texts ids [B, T + 1], with `see` in place of what k_proj and v_proj return."""
    with projections(subject, see):
        logits = subject.model(ids[:, :-1], use_cache=False).logits
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    )


def probe(x: torch.Tensor) -> dict[str, float]:
    """Return statistics of rows x [G, T, D]: excess kurtosis, mean over heads and dims of whole heads; the share of
    energy in the largest hundredth of values; entropy of the largest channel in bits, and how often it is the
    commonest one (3.1, 5.6)."""
    flat = x.double().flatten(1)
    centred = flat - flat.mean(-1, keepdim=True)
    kurtosis = centred.pow(4).mean(-1) / centred.square().mean(-1).square() - 3
    energy = flat.square().sort(-1, descending=True).values
    top = energy[:, : max(1, energy.shape[1] // 100)].sum(-1) / energy.sum(-1)
    counts = torch.bincount(x.abs().argmax(-1).flatten(), minlength=x.shape[-1]).double()
    share = counts / counts.sum()
    entropy = -(share * share.clamp(min=1e-300).log2()).sum()
    numbers = {"kurtosis": kurtosis.mean(), "energy": top.mean(), "entropy": entropy}
    return {name: float(n) for name, n in (numbers | {"largest": share.max()}).items()}


def probes(rows: Iterable[Row], task: str, model: str) -> str:
    """Return a table of the probe: means over layers, and the layer whose commonest largest channel is commonest."""
    found = cells(rows, task, model)
    lines = [["side", "layer", *(f"{number} {how}" for number in NUMBERS for how in TRANSFORMS)]]
    for (_, side), layers in sorted(found.items()):
        worst = max(layers, key=lambda name: layers[name]["largest none"])
        for label, some in (("all", list(layers.values())), (worst, [layers[worst]])):
            names = [f"{number} {how}" for number in NUMBERS for how in TRANSFORMS]
            means = [sum(row[name] for row in some) / len(some) for name in names]
            lines.append([side, label, *(f"{mean:.3g}" for mean in means)])
    return markdown(lines)
