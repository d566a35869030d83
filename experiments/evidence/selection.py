"""Choose the free settings of every method on the selection texts: `python -m experiments.evidence.selection`.

Each method has TRIES settings of its clip, group, page and of how it splits EXACT exact tokens into first
and last ones, within the bits of its class. The least mean KL over HELD/selection is chosen, per model;
nothing of HELD/test is read. All tries stay in OUT/rows.jsonl, the choice in OUT/chosen.json, and
`natural --chosen OUT/chosen.json` reports the chosen settings on the test texts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from experiments.evidence import corpus, rows
from experiments.evidence.command import ROWS, execute, options
from experiments.evidence.measure import KL
from experiments.options import words
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE
from mlxkv.formats.names import parse_kv

TRIES = 12
EXACT = 128  # tokens in full precision: first ones and last ones
LIMITS = {2: 2.55, 3: 3.55, 4: 4.5}  # bits per value at head dim 128, by the digit of a method
CHOSEN = "chosen.json"


def _splits(*sinks: int) -> list[str]:
    return [f"+sink{sink}+recent{EXACT - sink}" for sink in sinks]


TWO, THREE, SIX = _splits(64, 4), _splits(64, 32, 4), _splits(64, 32, 16, 4, 96, 0)


def tries(bases: Sequence[str], *settings: Sequence[str]) -> tuple[str, ...]:
    """Return every base with one of each of the settings."""
    return tuple("".join(parts) for parts in product(bases, *settings))


def _shared(*rates: tuple[str, str]) -> tuple[str, ...]:
    """Return bits by direction with budgets of keys and values; windows are those of the keys."""
    return tuple(
        f"fill-{k}{split}" + (f"/fill-{v}" if k != v else "") for k, v in rates for split in THREE
    )


def _plain(bits: int) -> dict[str, tuple[str, ...]]:
    """Return the tries of the methods that exist at every width."""
    lower = {2: (".92", ".96"), 3: (".96", ".98"), 4: (".96", ".98")}[bits]
    clips = ["", *(f"+clip{x}" for x in lower)]
    pairs = [f"+kclip{k}+vclip{v}" for k, v in ((lower[1], lower[0]), (lower[1],) * 2, ("1", "1"))]
    return {
        f"oscar-int{bits}": tries([f"oscar-int{bits}"], ("", "+g64"), pairs, TWO),
        f"kvarn-int{bits}": tries(
            (f"kvarn-int{bits}", f"kvarn-int{bits}+fixed"), ("", "+page256"), THREE
        ),
        f"hadamard-int{bits}": tries([f"hadamard-int{bits}"], ("", "+g128"), clips, TWO),
        f"naive-int{bits}": tries([f"naive-int{bits}"], ("", "+g128"), clips, TWO),
        **{
            f"{name}-int{bits}": tries(
                [f"{name}-int{bits}"], ("", "+g64", "+g128"), ("", f"+clip{lower[1]}"), TWO
            )
            for name in ("srft", "srft-scaled")
        },
    }


CANDIDATES: dict[str, tuple[str, ...]] = {
    "int4": tries(["int4"], ("", "+kg128+page128", "+g128+page128"), ("", "+vclip.98"), TWO),
    "int3": tries(["int3"], ("+kclip1", "+kclip.98"), ("", "+vclip.92", "+vclip.96"), TWO),
    "int2": tries(["int2"], ("", "+vg64"), ("", "+vclip.92", "+vclip.96"), TWO),
    "centred-int3": tries(["centred-int3"], ("", "+kclip1"), ("", "+vclip.94", "+vclip.96"), TWO),
    "centred-int2": tries(["centred-int2"], ("", "+kclip.96"), ("", "+vclip.92", "+vclip.96"), TWO),
    "fill-2.25": _shared(("2.25", "2.25"), ("2.5", "2"), ("2", "2.5"), ("2.35", "2.15")),
    "fill-3": _shared(("3", "3"), ("3.25", "2.75"), ("2.75", "3.25"), ("3.1", "2.9")),
    "fill-4": _shared(("4", "4"), ("4.25", "3.75"), ("3.75", "4.25"), ("4.1", "3.9")),
    "kitty-int2": tries(("kitty-int2", "kitty-int2+pro"), ("", "+vclip.92", "+vclip.96"), TWO),
    "saw-int4": tries(("saw-int4", "saw-int4+values", "saw-int4+b16"), ("", "+clip.98"), TWO),
    **_plain(2),
    **_plain(3),
    **_plain(4),
    "kivi-int2": tries(
        ["kivi-int2"], ("+g64", "+g64+page128", "+g128+page128"), ("", "+vclip.96"), TWO
    ),
    "kivi-int4": tries(
        ["kivi-int4"], ("+g64", "+g64+page128", "+g128+page128"), ("", "+vclip.98"), TWO
    ),
    "turbo-int2": tries(("turbo-int2", "turbo-2.5"), SIX),
    "turbo-int3": tries(("turbo-int3", "turbo-int3+qjl"), SIX),
    "turbo-int4": tries(("turbo-int4", "turbo-int4+qjl"), SIX),
    "polar-int2": tries(["polar-int2"], ("+vg64", "+vg128"), ("", "+vclip.92", "+vclip.96"), TWO),
    "polar-int3": tries(["polar-int3"], ("", "+vg128"), ("", "+vclip.96", "+vclip.98"), TWO),
    "polar": tries(["polar"], ("", "+vg64"), ("", "+vclip.96", "+vclip.98"), TWO),
    "polar-tree": tries(("polar-tree", "polar-tree+online"), SIX),
}


def width(method: str) -> int:
    """Return the class of a method: the digit in its name, 4 without one."""
    return next((int(x) for x in method if x in "234"), 4)


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = options("evidence.selection", __doc__)
    parser.set_defaults(documents=0, decode=256)
    parser.add_argument("--methods", type=words, default=tuple(CANDIDATES), help="by commas")
    args = parser.parse_args(given)
    if unknown := [name for name in args.methods if name not in CANDIDATES]:
        raise UserError(
            f"[--methods] unknown; got {unknown[0]!r}; choose from {', '.join(CANDIDATES)}"
        )
    names = [BASELINE, *(name for method in args.methods for name in CANDIDATES[method])]
    presets = {model: list(dict.fromkeys(names)) for model in args.models}
    execute(args, given, "selection", presets, (corpus.SELECTION,))
    if args.shares == "1/1":
        found = chosen(rows.current(rows.read([args.out / ROWS])), args.methods)
        (args.out / CHOSEN).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        for model in args.models:
            known = found.get(Path(model).name, {})
            if left := [name for name in args.methods if name not in known]:
                console.note(f"{Path(model).name}: not chosen yet: {', '.join(left)}")
        console.note(str(args.out / CHOSEN))


def chosen(found: Sequence[rows.Row], methods: Sequence[str]) -> dict[str, dict[str, dict]]:
    """Return for each model and method the try with the least mean KL over the selection texts:
    {"preset", "kl", "tries", "failed"}. A try that failed on a text does not count. A method is left out
    until all its tries were measured on all texts."""
    out: dict[str, dict[str, dict]] = {}
    ours = [row for row in found if row["task"] == KL and row["split"] == corpus.SELECTION]
    for model in dict.fromkeys(row["model"] for row in ours):
        by_name: dict[str, dict[tuple, float | None]] = {}
        for row in ours:
            if row["model"] == model:
                where = row["text"], row["context"], row["windows"]
                by_name.setdefault(row["preset"], {})[where] = row.get("kl")
        texts = set().union(*by_name.values())
        out[model] = {}
        for method in methods:
            tried = {name: by_name.get(name, {}) for name in CANDIDATES[method]}
            if any(set(numbers) != texts for numbers in tried.values()):
                continue
            whole = {name: x.values() for name, x in tried.items() if None not in x.values()}
            means = {name: float(np.mean(list(numbers))) for name, numbers in whole.items()}
            if means:
                best = min(means, key=means.get)
                failed = [name for name in tried if name not in means]
                out[model][method] = {
                    "preset": best,
                    "kl": means[best],
                    "tries": means,
                    "failed": failed,
                }
    return out


def chosen_names(file: Path, model: str) -> list[str]:
    """Return the settings that were chosen for a model. Raises UserError."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        names = [one["preset"] for one in data.get(model, {}).values()]
    except OSError as error:
        raise UserError(f"[--chosen] cannot read; got {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"[--chosen] not a file of evidence.selection; got {file}") from None
    for name in names:
        parse_kv(name)
    return names


if __name__ == "__main__":
    console.run_tool(main)
