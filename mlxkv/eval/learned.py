"""Learned transforms, and what the SRFT paper says of them in section 5: `python -m mlxkv.eval.learned`.

Each variant is learned from the calibration text, with and without the SRFT base, and judged by
decoding behind a context on another text. `srft` and `none` are the bases alone, `oscar` and
`balanced` transforms of the same pass without clips. Claims: a scale takes
most of the gain (5.2); a rotation without SRFT has less error on the calibration rows and yet worse
perplexity (5.3); Householder of D/2 reflectors is lossless at D = 256 (5.4).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NoReturn

from mlxkv import console, doctor
from mlxkv.calibrate import LEAST, progress_bar
from mlxkv.config import BALANCED, CALIBRATED, LEARNED, CacheConfig, Side
from mlxkv.errors import UserError
from mlxkv.eval import divergence
from mlxkv.eval.ablation.asked import numbers
from mlxkv.eval.ablation.parts import judged
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.texts import calibration_tokens, evaluation_tokens
from mlxkv.learn import Outcomes, learn, steps
from mlxkv.learned import BASES, STEPS, VARIANTS, Learned
from mlxkv.learning import read
from mlxkv.models import load

COLUMNS = ("transform", "gain K", "gain V", "held K", "held V", "KL mean", "KL 99 %", "perplexity")


@dataclass(frozen=True)
class Asked:
    """bits: of the codes, a table each. variants: of VARIANTS, each behind every one of bases. tokens:
    to calibrate on. context, decode: tokens; decode of them one by one behind the context."""

    model: str
    bits: tuple[int, ...]
    group: int
    variants: tuple[str, ...]
    bases: tuple[str, ...]
    steps: int
    tokens: int
    context: int
    decode: int

    def recipes(self, bits: int) -> Iterator[Learned]:
        for variant in self.variants:
            for base in self.bases:
                yield Learned(variant, base, bits, self.group, self.steps)

    def check(self) -> None:
        """Raises UserError before anything heavy."""
        for bits in self.bits:
            for recipe in self.recipes(bits):
                recipe.check()
        for option, got, least in (
            ("--tokens", self.tokens, LEAST),
            ("--context", self.context, 2),
            ("--decode", self.decode, 2),
        ):
            if got < least:
                raise UserError(f"[{option}] got {got}; choose {least} or more")


def measure(asked: Asked) -> dict[str, dict]:
    """A row per arm, by "TRANSFORM, N bits"; full precision first."""
    loaded = load(asked.model)
    made, samples = read(loaded, calibration_tokens(loaded, asked.tokens))
    configs, calibrations, learned = {}, {}, {}
    for bits in asked.bits:
        for kind in (*BASES, CALIBRATED, BALANCED):
            configs[f"{kind}, {bits} bits"] = _config(Learned(bits=bits, group=asked.group), kind)
            calibrations[f"{kind}, {bits} bits"] = made
    recipes = [recipe for bits in asked.bits for recipe in asked.recipes(bits)]
    with progress_bar(len(recipes) * steps(made, Learned(steps=asked.steps)), "learning") as done:
        for recipe in recipes:
            name = f"{recipe.label}, {recipe.bits} bits"
            configs[name] = _config(recipe, LEARNED)
            calibrations[name], learned[name] = learn(made, samples, recipe, done)
    arms = Arms(loaded, configs, calibrations=calibrations)
    names = [BASELINE, *configs]
    text = evaluation_tokens(loaded, asked.context + asked.decode + 1)
    with progress_bar(len(names) * (asked.context + asked.decode), "decoding") as done:
        found = divergence.measure(arms, names, text.tokens, asked.context, done)
    rows = {name: judged(result) for name, result in found.items()}
    for name, outcomes in learned.items():
        rows[name]["gains"] = gains(outcomes)
    rows[BASELINE]["dims"] = next(iter(made.layers.values())).keys.values.shape[1]
    return rows


def _config(recipe: Learned, transform: str) -> CacheConfig:
    side = Side(recipe.spec, transform)
    return CacheConfig(side, side)


def gains(outcomes: Outcomes) -> dict:
    """Of keys and values: the share of the error of random SRFT that is gone, mean of the layers; on the
    rows that were learned from, and on those held back. layers: the errors themselves."""
    out = {}
    for side in ("keys", "values"):
        layers = [sides[side] for sides in outcomes.values()]
        out[side] = {
            "gain": mean(one.gain for one in layers),
            "held_gain": mean(one.held_gain for one in layers),
            "layers": [vars(one) for one in layers],
        }
    return out


def claims(rows: dict[str, dict], bits: int) -> dict[str, dict]:
    """The paper's claims in numbers of this run, as far as its rows have them.

    scale: share of what the best variant behind SRFT takes off the KL divergence of random SRFT that a
    scale alone takes off. without_srft: per variant, by how much more (or less than 0) error on the
    calibration rows, perplexity and KL divergence it has without SRFT than behind it. householder: KL divergence and
    perplexity against full precision, and the head dim.
    """

    def row(variant: str, base: str) -> dict | None:
        return rows.get(f"{Learned(variant, base).label}, {bits} bits")

    def error(one: dict) -> float:
        return mean(
            layer["error"] for s in ("keys", "values") for layer in one["gains"][s]["layers"]
        )

    out: dict[str, dict] = {}
    random = rows[f"srft, {bits} bits"]["kl_mean"]
    behind = {v: one for v in VARIANTS if (one := row(v, "srft"))}
    if "scale" in behind and len(behind) > 1:
        best = min(behind, key=lambda v: behind[v]["kl_mean"])
        whole = random - behind[best]["kl_mean"]
        own = random - behind["scale"]["kl_mean"]
        out["scale"] = {"best": best, "share": own / whole if whole > 0 else None}
    for variant, one in behind.items():
        if other := row(variant, "none"):
            out.setdefault("without_srft", {})[variant] = {
                "error": error(other) / error(one) - 1,
                "ppl": other["ppl"] / one["ppl"] - 1,
                "kl_mean": other["kl_mean"] / max(one["kl_mean"], 1e-12) - 1,
            }
    if one := behind.get("householder"):
        more = one["ppl"] / one["ppl_base"] - 1
        out["householder"] = {
            "dims": rows[BASELINE]["dims"],
            "kl_mean": one["kl_mean"],
            "ppl_more": more,
        }
    return out


def show(asked: Asked, rows: dict[str, dict]) -> None:
    """A table per width, and what it says of the claims."""
    for bits in asked.bits:
        cells = []
        for name, row in rows.items():
            label, _, codes = name.partition(", ")
            if codes not in ("", f"{bits} bits"):
                continue
            shares = [""] * 4
            if found := row.get("gains"):
                kinds = ("gain", "held_gain")
                shares = [f"{found[s][k]:.1%}" for k in kinds for s in ("keys", "values")]
            line = [label, *shares]
            kl = f"{row['kl_mean']:.6f} ± {row['kl_error']:.6f}"
            cells.append([*line, kl, f"{row['kl_p99']:.5f}", f"{row['ppl']:.4f}"])
        where = f"{asked.decode} tokens behind {asked.context}"
        console.print_table(COLUMNS, cells, f"{asked.model}, {where}, {bits} bits")
        for line in said(claims(rows, bits)):
            print(line)
    print("gain: share of the error of random SRFT that is gone; held: on rows not learned from")


def said(found: dict[str, dict]) -> Iterator[str]:
    """`claims` in words."""
    if one := found.get("scale"):
        share = "none was to be had" if one["share"] is None else f"{one['share']:.0%}"
        yield f"scale alone, of the KL that the best ({one['best']}) takes off: {share}"
    for variant, one in found.get("without_srft", {}).items():
        yield (
            f"{variant} without SRFT, against behind it: error {one['error']:+.1%}, perplexity "
            f"{one['ppl']:+.2%}, KL {one['kl_mean']:+.1%}"
        )
    if one := found.get("householder"):
        yield (
            f"householder at D = {one['dims']}: KL {one['kl_mean']:.6f}, perplexity "
            f"{one['ppl_more']:+.2%} (the claim is about D = 256)"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"[learned] {message}; --help lists the options")


def main(arguments: list[str] | None = None) -> None:
    parser = _Parser(
        prog="python -m mlxkv.eval.learned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="tiny-qwen", help="an alias, a hub name or a folder")
    add("--bits", default="4,2", help="of the codes, by commas")
    add("--group", type=int, default=64, help="values per scale")
    add("--learn", default=",".join(VARIANTS), help="variants, by commas")
    add("--base", default=",".join(BASES), help="before them, by commas")
    add("--steps", type=int, default=STEPS, help="of Adam")
    add("--tokens", default="4096", help="to calibrate on")
    add("--context", default="1024", help="tokens")
    add("--decode", type=int, default=128, help="tokens decoded one by one behind the context")
    add("--out", type=Path, help="a file for the JSON document, in place of the last line")
    args = parser.parse_args(arguments)
    asked = Asked(
        model=args.model,
        bits=numbers(args.bits, "--bits"),
        group=args.group,
        variants=_words(args.learn),
        bases=_words(args.base),
        steps=args.steps,
        tokens=console.parse_tokens(args.tokens, "--tokens"),
        context=console.parse_tokens(args.context, "--context"),
        decode=args.decode,
    )
    asked.check()
    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"[--out] no such folder; got {args.out.parent}; make it first")
    start = time.perf_counter()
    rows = measure(asked)
    show(asked, rows)
    used = next(row for row in doctor.backends() if row["used"])
    data = {
        "asked": vars(asked),
        "rows": rows,
        "claims": {str(bits): claims(rows, bits) for bits in asked.bits},
        "machine": doctor.machine() | {"backend": used["name"], "device": used["device"]},
        "versions": doctor.versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if args.out is None:
        console.print_json(data)
    else:
        args.out.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


if __name__ == "__main__":
    console.run_tool(main)
