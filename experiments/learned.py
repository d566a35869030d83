"""Learned transforms, and the SRFT paper's claims about them: `python -m experiments.learned`.

Learns each variant from the calibration text, with and without the SRFT base, and judges it by
decoding after a context of another text. `srft` and `none` are the bases alone; `oscar` and
`balanced` are transforms of the same pass without clips. The claims (section 5): a scale alone
gives most of the gain (5.2); a rotation without SRFT has less error on the calibration rows but
worse perplexity (5.3); Householder with D/2 reflectors is lossless at D = 256 (5.4).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from experiments.fixtures import TINY
from experiments.options import Parser, at_least, check_out, made_on, numbers, words, write
from mlxkv import console
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import divergence
from mlxkv.formats.calibration.learned import BASES, STEPS, VARIANTS, Learned
from mlxkv.formats.config import BALANCED, CALIBRATED, LEARNED, CacheConfig, Side
from mlxkv.models import load
from mlxkv.models.calibration.learn import Outcomes, learn, steps
from mlxkv.models.calibration.measure import LEAST, calibrate_with_samples, progress_bar
from mlxkv.texts.sources import calibration_tokens, evaluation_tokens

COLUMNS = ("transform", "gain K", "gain V", "held K", "held V", "KL mean", "KL 99 %", "perplexity")


@dataclass(frozen=True)
class Comparison:
    """bits: of the codes; one table each. variants, bases: every variant runs after every base.
    tokens: to calibrate on. context: tokens of the prompt. decode: tokens decoded after it."""

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
        """Raise UserError for an option that cannot be used."""
        for bits in self.bits:
            for recipe in self.recipes(bits):
                recipe.check()
        for option, got, least in (
            ("--tokens", self.tokens, LEAST),
            ("--context", self.context, 2),
            ("--decode", self.decode, 2),
        ):
            at_least(option, got, least)


def measure(asked: Comparison) -> dict[str, dict]:
    """Return a row per arm, {"TRANSFORM, N bits": row}, full precision first."""
    loaded = load(asked.model, "fp16")
    made, samples = calibrate_with_samples(loaded, calibration_tokens(loaded, asked.tokens))
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


def judged(result: dict) -> dict:
    """Return what tables show of a result of `divergence.measure`, in nats."""
    decode = result["legs"]["decode"]
    return {
        "kl_mean": decode["kl"]["mean"],
        "kl_error": decode["kl"]["error"],
        "kl_p99": decode["kl"]["p99"],
        "ppl": decode["ppl"],
        "ppl_base": decode["ppl_base"],
    }


def _config(recipe: Learned, transform: str) -> CacheConfig:
    side = Side(recipe.spec, transform)
    return CacheConfig(side, side)


def gains(outcomes: Outcomes) -> dict:
    """Return for keys and values the share of random SRFT's error that is removed, mean of the layers:
    "gain" on the rows learned from, "held_gain" on held-out rows, "layers" the errors."""
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
    """Return the paper's claims in numbers, as far as `rows` have them.

    scale: the share of the best variant's gain in KL (after SRFT) that a scale alone has.
    without_srft: per variant, the relative change of the error on the calibration rows, of
    perplexity and of KL, without SRFT against with it. householder: KL divergence and
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


def show(asked: Comparison, rows: dict[str, dict]) -> None:
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
        where = f"{asked.decode} tokens after {asked.context}"
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


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("learned", __doc__)
    add = parser.add_argument
    add("--model", default=TINY, help="an alias, a hub name or a folder")
    add("--bits", default="4,2", help="of the codes, by commas")
    add("--group", type=int, default=64, help="values per scale")
    add("--learn", default=",".join(VARIANTS), help="variants, by commas")
    add("--base", default=",".join(BASES), help="bases before the variants, by commas")
    add("--steps", type=int, default=STEPS, help="steps of Adam")
    add("--tokens", default="4096", help="tokens to calibrate on")
    add("--context", default="1024", help="tokens of the prompt")
    add("--decode", type=int, default=128, help="tokens decoded one by one after the context")
    add("--out", type=Path, help="write the JSON document to this file")
    args = parser.parse_args(arguments)
    asked = Comparison(
        model=args.model,
        bits=numbers(args.bits, "--bits"),
        group=args.group,
        variants=words(args.learn),
        bases=words(args.base),
        steps=args.steps,
        tokens=console.parse_tokens(args.tokens, "--tokens"),
        context=console.parse_tokens(args.context, "--context"),
        decode=args.decode,
    )
    asked.check()
    check_out(args.out)
    start = time.perf_counter()
    rows = measure(asked)
    show(asked, rows)
    data = {
        "asked": vars(asked),
        "rows": rows,
        "claims": {str(bits): claims(rows, bits) for bits in asked.bits},
    }
    write(data | made_on(start), args.out)


if __name__ == "__main__":
    console.run_tool(main)
