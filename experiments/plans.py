"""Compare plans with uniform presets at equal bytes: `python -m experiments.plans`.

A plan is found as `mlxkv calibrate --budget` finds it, on calibration text. It is judged on evaluation texts,
which are others, beside the presets of its menu in all layers and beside an even mix of the two presets
next to the budget, which needs no measurement: mean KL a text, and paired ratios with intervals over texts.

    python -m experiments.plans --models tiny,tiny-qwen --out plans.json
    python -m experiments.plans --show plans.json --page docs/results/plans.md
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from experiments.fixtures import QWEN, TINY
from experiments.options import Parser, check_out, made_on, words, write
from mlxkv import console
from mlxkv.calibrate import budget
from mlxkv.eval import intervals
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence
from mlxkv.formats.names import parse_preset
from mlxkv.formats.plans import greedy
from mlxkv.formats.plans.plan import Part
from mlxkv.models import load
from mlxkv.texts.sources import calibration_tokens, evaluation_texts

BUDGETS = "2.5,3,3.5,4"
MARK = "<!-- figures -->"


def measure(name: str, args) -> dict:
    """Find plans for all budgets on one model and judge them on texts."""
    loaded = load(name, "fp16", dtype=args.dtype)
    text = calibration_tokens(loaded, args.tokens)
    presets = budget.of_menu(args.menu)
    made = budget.calibration_for(loaded, text, presets)
    windows = budget.split(loaded, text)
    exact, start = parse_preset("fp16"), time.perf_counter()
    arms = {name: one for name, one in presets.items() if one.compresses}
    about: dict[str, dict] = {}
    for limit in args.budgets:
        found = budget.find(loaded, made, presets, limit, windows)
        plan = f"plan {limit:g}"
        arms[plan] = found.plan
        about[plan] = {"bits": found.bits["plan"], "predicted": found.predicted}
        about[plan] |= {"plan": found.plan.spec, "apart": float(found.kl["plan"].mean())}
        mix = greedy.evenly(found.menu, limit)
        if mix is not None and len(set(mix.values())) > 1:
            parts = {i: Part(one, presets[one]) for i, one in mix.items()}
            arms[f"even {limit:g}"] = budget.as_plan(parts, exact)
            about[f"even {limit:g}"] = {"bits": greedy.mean_bits(found.menu, mix)}
        about |= {n: {"bits": b} for n, b in found.bits.items() if n in presets}
        alone = {i: {n: o.kl for n, o in own.items()} for i, own in found.menu.items()}
    searched = time.perf_counter() - start
    read = Arms(loaded, arms, calibrations=dict.fromkeys(arms, made))
    texts = evaluation_texts(loaded, args.context + args.decode + 1, args.texts)
    kl: dict[str, list[float]] = {arm: [] for arm in arms}
    for at, one in enumerate(texts):
        found = divergence.measure(read, list(arms), one.tokens, args.context, lambda n: None)
        for arm, result in found.items():
            scored = [result["legs"][leg]["kl"]["mean"] for leg in divergence.LEGS]
            counts = [args.context - args.context // 2, len(one.tokens) - 1 - args.context]
            kl[arm].append(float(np.average(scored, weights=counts)))
        console.note(f"{name}: {one.name}, {at + 1} of {len(texts)}")
    return {
        "model": loaded.name if len(Path(loaded.name).parts) == 1 else Path(loaded.name).name,
        "layers": len(alone),
        "texts": [one.name for one in texts],
        "search": [len(part) for part in windows],
        "searched_seconds": round(searched, 1),
        "alone": alone,
        "arms": {arm: {**about[arm], "kl": kl[arm]} for arm in arms},
    }


def rows(found: dict) -> list[list[str]]:
    """A row for each cache, by bits, with the ratio of plans to what takes no more bytes."""
    out = []
    arms = found["arms"]
    for name, arm in sorted(arms.items(), key=lambda pair: (pair[1]["bits"], pair[0])):
        said, rival = "", None
        if name.startswith("plan"):
            fits = [
                other
                for other, one in arms.items()
                if not other.startswith("plan") and one["bits"] <= arm["bits"] + 0.01
            ]
            rival = min(fits, key=lambda other: np.mean(arms[other]["kl"]), default=None)
        if rival is not None:
            ratio = intervals.ratio(arm["kl"], arms[rival]["kl"])
            told = "" if not ratio.known else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
            lower = sum(a < b for a, b in zip(arm["kl"], arms[rival]["kl"], strict=True))
            said = f"{ratio.value:.2f}{told} of `{rival}`, lower on {lower} of {len(arm['kl'])}"
        mean = intervals.mean(arm["kl"])
        limits = f" [{mean.low:.3g}, {mean.high:.3g}]" if mean.known else ""
        layers = arm.get("plan", {}).get("layers", {})
        default = arm.get("plan", {}).get("default", "")
        spelled = ", ".join([*(f"{i}: {p}" for i, p in layers.items()), f"others {default}"])
        predicted = f"{arm['predicted']:.3g}" if "predicted" in arm else ""
        out.append(
            [
                f"`{name}`",
                f"{arm['bits']:.2f}",
                predicted,
                f"{mean.value:.3g}{limits}",
                said,
                spelled if "plan" in arm else "",
            ]
        )
    return out


COLUMNS = [
    "cache",
    "bits",
    "predicted",
    "mean KL [95 %]",
    "against the best of no more bits",
    "layers",
]


def markdown(data: dict) -> str:
    """The tables of a page."""
    out = []
    for found in data["models"]:
        texts, (search, _) = len(found["texts"]), found["search"]
        out += [
            f"## {found['model']}: {found['layers']} layers, {texts} texts of {data['context']} tokens, "
            f"{data['decode']} decoded\n",
            f"Searched on {search} windows of {budget.WINDOW} tokens of calibration text.\n",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + " --- |" * len(COLUMNS),
            *("| " + " | ".join(row) + " |" for row in rows(found)),
            "",
        ]
    return "\n".join(out)


def main(argv: list[str] | None = None) -> None:
    parser = Parser("plans", __doc__)
    parser.add_argument("--models", type=words, default=(TINY, QWEN))
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--menu", default=budget.MENU)
    parser.add_argument("--tokens", type=int, default=8900, help="of calibration text")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, default=None, help="write the numbers to this file")
    parser.add_argument("--show", nargs="*", type=Path, help="files of earlier runs")
    parser.add_argument("--page", type=Path, help="with --show: the page whose tables to replace")
    args = parser.parse_args(argv)
    args.budgets = [float(text) for text in args.budgets.split(",")]
    if args.show:
        runs = [json.loads(path.read_text()) for path in args.show]
        data = runs[0] | {"models": [found for run in runs for found in run["models"]]}
        if args.page:
            head = args.page.read_text(encoding="utf-8").split(MARK)[0]
            args.page.write_text(f"{head}{MARK}\n\n{markdown(data)}", encoding="utf-8")
        else:
            print(markdown(data))
        return
    check_out(args.out)
    start = time.perf_counter()
    data = {
        "context": args.context,
        "decode": args.decode,
        "menu": args.menu,
        "tokens": args.tokens,
        "models": [measure(name, args) for name in args.models],
    }
    print(markdown(data))
    write(data | made_on(start), args.out)


if __name__ == "__main__":
    console.run_tool(main)
