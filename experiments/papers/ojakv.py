"""Measure OjaKV (2509.21623) and its baselines on real models. Spec: `mlxkv.spec.oja`.

Variants, each a share of the head dim (static-0.6) or a share of the energy (static-e0.95; A.2):

    static-S         one basis of the calibration (StaticPCA; Eigen-N computes the same, A.3), no exact tokens
    static-S+windows with the first and last 32 tokens exact (StaticPCA-H)
    oja-S            updated by the prompt's salient tokens (Algorithm 1), the step normalised as the product's;
                     +raw: as published; +token: token by token (5.2); +all: no exact tokens. Where an update is not
                     finite, the basis stays as it was
    oracle-S         the best basis of this very context: what following could reach
    ...+int4         4-bit codes of what is stored; without it float16, 12 bits a value at .75

Of each text these are rows, too; --skip leaves some out:

    keep       variants of table 6 with half of the stored tokens dropped (SnapKV): NAME+keep0.5
    subspace   residual-energy ratio and overlap (table 1) on the last half of the context: bases of the calibration, of
               Oja's rule behind the first half, of the last half itself
    update     heads whose update is not finite, tokens until then, what is left of the basis (overlap)
    change     the last 64 tokens of a text of one kind (CHANGES), behind 64, 256, 1,024 tokens of it that are read as
               if decoded, an update every 32; before them half a context of another kind: KL of the 64, and how much
               of their energy a basis leaves (A.6). +stay: old tokens are decoded by the newest basis
    control    the same tokens behind the same text: its own half a context before them

    python -m experiments.papers.ojakv MODEL... --contexts 4k --dtype bfloat16 --over static-0.6+windows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from cuda_track.cache import adaptive
from cuda_track.models.taps import Call, observing
from experiments.evidence.texts import Texts
from experiments.papers import runner
from experiments.papers.oja import (
    NORMAL,
    PAGE,
    PLAIN,
    RAW,
    RULES,
    TOKEN,
    Reading,
    first_basis,
    named,
    step,
    variant,
    variants_of,
)
from experiments.papers.runner import Subject, Variant, pair_of
from mlxkv import console
from mlxkv.corpora import sources
from mlxkv.eval.rows import Row, Rows
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.formats.lowrank import STAY, LowRank
from mlxkv.spec import oja as spec

FIXED, MOVING = "static-0.6+windows", "oja-0.6"
TABLE_6 = ("exact", FIXED, MOVING, f"{FIXED}+int4", f"{MOVING}+int4")
CHANGED = (FIXED, MOVING, "oja-0.6+stay", "oracle-0.6")
READ = 64  # tokens that are measured behind a change
POINTS = (64, 256, 1024)  # tokens of the text itself before them
KEEP = 0.5
EXTRAS = ("keep", "subspace", "update", "change", "control")
# A text of one kind throughout, and one of another kind that is read before it.
CHANGES = {"manual": "records", "records": "manual", "source-1": "licence", "licence": "source-1"}
CHANGES |= {"source-2": "readme", "readme": "source-2"}

# -- More of a text than the runner measures. Each function returns numbers by the name of a row.


def divergence(base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return KL(base || own) [T] in nats of logits [T, vocabulary]."""
    base, own = base.double().log_softmax(-1), own.double().log_softmax(-1)
    return (base.exp() * (base - own)).sum(-1)


def kept(
    reading: Reading, made: Mapping[str, Variant], context: int, tokens: Sequence[int]
) -> dict[str, dict]:
    """Drop half of the stored tokens of each kv head by SnapKV's votes, and measure as the runner (table 6)."""
    subject, names = reading.subject, [name for name in TABLE_6 if name in made]
    cache = subject.prefill(tokens[:context])
    rest, truth = tokens[context:-1], torch.tensor(tokens[context + 1 :])[:, None]
    whole = {i: pair_of(cache, i) for i in subject.growing}
    base = subject.go_on(cache, [whole], rest)[0].double().log_softmax(-1)
    masks = {i: keeping(reading, i, context, PLAIN.stored(context)) for i in subject.growing}

    def drop(call: Call) -> torch.Tensor | None:
        if call.layer not in masks:
            return None
        new, total, groups = call.queries.shape[2], call.keys.shape[2], call.keys.shape[1]
        mask = pad(masks[call.layer], (0, total - context), value=True)[:, None]
        mask = mask & torch.ones(new, total, device=mask.device).tril(total - new).bool()
        every = partial(torch.repeat_interleave, repeats=call.queries.shape[1] // groups)
        k, v, mask = every(call.keys, dim=1), every(call.values, dim=1), every(mask, dim=0)
        out = scaled_dot_product_attention(call.queries, k, v, mask, scale=call.scale)
        return out - call.out

    out = {}
    for name in names:
        stored = subject.reconstruct(cache, made[name])
        with observing(subject.model, drop):
            own = subject.go_on(cache, [stored], rest)[0].double().log_softmax(-1)
        of_truth = (-x.gather(-1, truth.to(x.device)).mean() for x in (own, base))
        numbers = {
            "kl": divergence(base, own).mean(),
            **dict(zip(("nll", "nll_base"), of_truth, strict=True)),
        }
        numbers["top1"] = (own.argmax(-1) == base.argmax(-1)).double().mean()
        bits = KEEP * made[name].bits_of(whole[subject.growing[0]][0].shape[-1])
        own = {key: float(x) for key, x in numbers.items()}
        out[f"{name}+keep{KEEP:g}"] = own | {"bits": bits}
    return out


def keeping(reading: Reading, layer: int, context: int, part: slice) -> torch.Tensor:
    """Return which tokens of a context stay, [G, T]: all but the half of `part` with fewer votes."""
    votes = adaptive.votes(reading.weights(layer, context, PAGE))[0, :, part]
    at = adaptive.kept(votes[None], max(1, round(KEEP * votes.shape[-1])))[0] + part.start
    mask = torch.ones(len(at), context, dtype=torch.bool, device=at.device)
    mask[:, part] = False
    return mask.scatter(1, at, True)


def subspaces(reading: Reading, low: LowRank, context: int) -> dict[str, dict]:
    """Residual-energy ratios and overlaps of bases on the last half of a context (table 1), means over heads."""
    begin, found = context // 2, {}
    for i, layer in reading.subject.layers.items():
        for side in SIDES:
            whole = getattr(reading.calls[i], side)[0].float()
            test = whole[:, begin:].double().cpu().numpy()
            u = first_basis(layer, side, low)
            best = spec.basis(test.swapaxes(-1, -2) @ test, u.shape[-1]).copy()
            bases = {"calibration": u, "oracle": torch.from_numpy(best)}
            at = reading.salient(i, begin, low)
            for rule in RULES:
                bases[f"oja {rule}"] = step(u, whole[:, at], low.prefill_rate, rule)
            for rule in (NORMAL, RAW):
                own = u
                for page in whole[:, :begin].split(PAGE, 1):
                    own = step(own, page, low.decode_rate, rule)
                bases[f"oja {rule} every {PAGE}"] = own
            rows = getattr(layer, side).double().cpu().numpy()
            for name, basis in bases.items():
                own = basis.double().cpu().numpy()
                numbers = found.setdefault(name, {})
                measured = (
                    spec.residual(test, own),
                    spec.overlap(own, best),
                    spec.residual(rows, own),
                )
                for what, x in zip(("rer", "overlap", "rer_calibration"), measured, strict=True):
                    numbers.setdefault(f"{what}_{side}", []).append(x)
    return _means(found)


def updates(reading: Reading, low: LowRank, context: int) -> dict[str, dict]:
    """Measure one update by the prompt's salient tokens in float32: means over heads."""
    found, rate = {}, low.prefill_rate
    for i, side in product(reading.subject.growing, SIDES):
        x = getattr(reading.calls[i], side)[0][:, reading.salient(i, context, low)].float()
        u = first_basis(reading.subject.layers[i], side, low)
        start, rows = u.cpu().numpy(), x.cpu().numpy()
        own, until = start, np.full(len(start), float(x.shape[1]))
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(x.shape[1]):
                own = spec.update_by_token(own, rows[:, t : t + 1], rate)
                until = np.where(np.isfinite(own).all((-2, -1)), until, np.minimum(until, t))
        gone = until < x.shape[1]
        for rule in RULES:
            left = spec.overlap(start, step(u, x, rate, rule).cpu().numpy())
            numbers = {"overlap": left, "rate_energy": rate * np.square(rows).sum(-1).mean(-1)}
            numbers |= {"not_finite": gone, "tokens_until": until} if rule == TOKEN else {}
            for what, value in numbers.items():
                found.setdefault(rule, {}).setdefault(f"{what}_{side}", []).append(value)
    return _means(found)


def _means(found: Mapping[str, Mapping[str, list]]) -> dict[str, dict]:
    return {
        name: {what: float(np.mean(np.concatenate(x))) for what, x in numbers.items()}
        for name, numbers in found.items()
    }


def changed(
    reading: Reading, first: Sequence[int], second: Sequence[int], at: int
) -> dict[str, dict]:
    """Read a prompt `first`, `at` tokens of `second` as if decoded, and compare the READ tokens that follow."""
    subject, known = reading.subject, named()
    moving = known[MOVING]
    known[f"{MOVING}+stay"] = replace(moving, low=replace(moving.low, stored=STAY))
    subject.prefill([*first, *second[: at + READ]])
    left = behind(reading, moving.low, len(first))
    cache = subject.prefill([*first, *second[:at]])
    rest = second[at : at + READ]
    whole = {i: pair_of(cache, i) for i in subject.growing}
    base = subject.go_on(cache, [whole], rest)[0]
    out = {}
    for name in CHANGED:
        own = variant(reading, replace(known[name], prompt=len(first)))
        logits = subject.go_on(cache, [subject.reconstruct(cache, own)], rest)[0]
        out[name] = {"kl_change": float(divergence(base, logits).mean())} | left.get(name, {})
    return out


def behind(reading: Reading, low: LowRank, prompt: int) -> dict[str, dict]:
    """Residual-energy ratios of the last READ tokens, means over heads: of the calibration's basis, and of Oja's when
    they are read."""
    found: dict[str, dict] = {FIXED: {}, MOVING: {}}
    for i, side in product(reading.subject.growing, SIDES):
        rows = getattr(reading.calls[i], side)[0].float()
        still = first_basis(reading.subject.layers[i], side, low)
        own = step(still, rows[:, reading.salient(i, prompt, low)], low.prefill_rate, NORMAL)
        for page in rows[:, prompt : -READ - PAGE].split(PAGE, 1):
            own = step(own, page, low.decode_rate, NORMAL)
        test, *bases = (x.double().cpu().numpy() for x in (rows[:, -READ:], still, own))
        for name, u in zip(found, bases, strict=True):
            found[name].setdefault(f"rer_{side}", []).append(spec.residual(test, u))
    return _means(found)


def more(subject, made, context, text, tokens, rows: Rows, readings, texts: Texts, args) -> None:
    """Add the rows of EXTRAS of one context."""
    reading, low = readings[subject.name], LowRank(0.6, follows=True)
    state = runner.state_of(subject, tokens, args.dtype)

    def add(task: str, text: str, make: Callable[[], dict[str, dict]], at: int = context) -> None:
        done: Row = runner.identity(subject, f"ojakv {task}", "all", "32,32", text, at)
        if task.split()[0] in args.skip or rows.get(done, state) is not None:
            return
        for name, numbers in make().items():
            own = done | {"preset": name}
            rows.add(own, state, numbers | {"dtype": args.dtype, "decode": args.decode})
        rows.add(done, state, {})  # last: what is stopped is made again

    add("keep", text, lambda: kept(reading, made, context, tokens))
    measures = {"subspace": subspaces, "update": updates}
    if measures.keys() - set(args.skip):
        subject.prefill(tokens[:context])
    for task, measure in measures.items():
        add(task, text, partial(measure, reading, low, context))
    if text not in CHANGES:
        return
    half = context // 2 // PAGE * PAGE
    other = texts.tokens(subject.loaded, CHANGES[text], half)
    start = len(sources.start_of(subject.loaded))
    for at in POINTS:
        end = len(tokens) - at - READ
        own = [*tokens[:start], *tokens[end - half + start : end]]
        for task, first in (("control", own), ("change", other)):
            if first is not None and end >= half:
                add(f"{task} {at}", text, partial(changed, reading, first, tokens[end:], at))


def main(arguments: list[str] | None = None) -> None:
    options = runner.parser("ojakv", __doc__)
    options.add_argument("--skip", nargs="*", default=(), choices=EXTRAS)
    args = options.parse_args(arguments)
    readings: dict[str, Reading] = {}

    def variants(subject: Subject) -> Mapping[str, Callable[[], Variant]]:
        readings[subject.name] = Reading(subject)
        return variants_of(subject, readings[subject.name])

    texts = Texts(args.texts or args.out / "texts")
    runner.run("ojakv", args, variants, partial(more, readings=readings, texts=texts, args=args))


if __name__ == "__main__":
    console.run_tool(main)
