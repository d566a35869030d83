"""Count how often intervals hold the truth on made-up texts: `python -m experiments.evidence.coverage`.

Texts are log-normal, as KL is over texts; two presets share most of what makes a text hard. Prints the
share of intervals that hold the true mean, and the true ratio, at 95 %.
"""

from __future__ import annotations

import numpy as np

from experiments.options import Parser, at_least, numbers
from mlxkv import console
from mlxkv.eval import intervals

SPREADS = (0.5, 1.0, 1.5)  # of the logarithm; 1.5 puts a factor of 350 between the ends of 95 %
SHARED = 0.8  # correlation of two presets' logarithms
COLUMNS = ("texts", "spread", "mean", "percentiles of the mean", "ratio")


def counts(texts: int, spread: float, rounds: int, seed: int = 0) -> tuple[float, float, float]:
    """Return the shares of intervals that hold the truth: of the mean, of the mean by plain percentiles
    for comparison, of the ratio of two means on the same texts."""
    rng, held = np.random.default_rng(seed), np.zeros(3)
    truth = float(np.exp(spread**2 / 2))
    for _ in range(rounds):
        a = rng.standard_normal(texts)
        b = SHARED * a + np.sqrt(1 - SHARED**2) * rng.standard_normal(texts)
        ours, theirs = np.exp(spread * a), np.exp(spread * b)
        drawn = ours[rng.integers(0, texts, (1000, texts))].mean(axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        held += [
            intervals.mean(ours).holds(truth),
            low <= truth <= high,
            intervals.ratio(ours, theirs).holds(1.0),
        ]
    return tuple(held / rounds)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("evidence.coverage", __doc__)
    parser.add_argument("--texts", default="8,16", help="by commas")
    parser.add_argument("--rounds", type=int, default=500, help="of made-up texts")
    args = parser.parse_args(arguments)
    at_least("--rounds", args.rounds, 1)
    rows = [
        [texts, f"{spread:g}", *(f"{100 * x:.1f}" for x in counts(texts, spread, args.rounds))]
        for texts in numbers(args.texts, "--texts")
        for spread in SPREADS
    ]
    console.print_table(
        COLUMNS, rows, f"intervals of 95 % that hold the truth, in percent of {args.rounds}"
    )


if __name__ == "__main__":
    console.run_tool(main)
