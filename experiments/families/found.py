"""Result of one family, the configurations that it is tried with, and the page and command of a survey of families;
no framework of models."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from experiments.options import Parser, check_out
from mlxkv import console
from mlxkv.catalog.reports import LayerReport, ranges
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Full
from mlxkv.machine import machine, versions

PROMPT, NEW = 45, 20  # tokens; pages are quantized while reading and while writing
WINDOWS = {"sink": 4, "recent": 16, "page": 16}
NEAR = 1e-3  # of the norm of the logits
SECONDS = 120.0  # for one family


class Lossless(CacheConfig):
    """Pages that hold the numbers themselves, and go all the ways of compressed ones."""

    compresses = True
    why_no_latents = None


EXACT = Lossless(Side(Full()), Side(Full()), **WINDOWS)
INT4 = replace(parse_kv("int4"), **WINDOWS)


@dataclass(frozen=True)
class Family:
    """Result of one family.

    built: name of its class. skipped: why nothing was compared. layers: reports. exact: distance of the logits
    to the plain model's with lossless pages. int4: whether it runs. fault: what is wrong.
    """

    name: str
    built: str = ""
    skipped: str = ""
    layers: tuple[LayerReport, ...] = ()
    exact: float | None = None
    int4: bool = False
    fault: str = ""

    @property
    def compressed(self) -> list[int]:
        return [r.index for r in self.layers if r.compressed]

    @property
    def why(self) -> str:
        """Why the other layers are not compressed."""
        groups: dict[str, list[int]] = {}
        for r in self.layers:
            if not r.compressed:
                groups.setdefault(f"{r.kind}: {r.reason}", []).append(r.index)
        return "; ".join(f"{ranges(layers)} ({reason})" for reason, layers in groups.items())


def line(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def examined(
    name: str,
    not_built: Mapping[str, str],
    build: Callable,
    written: Callable,
    attach: Callable,
    detach: Callable,
    shown: CacheConfig,
) -> Family:
    """Build `name` and compare it: plain, on lossless pages, on int4, and plain again after detach. written: a model ->
    greedy tokens and their logits [NEW, V]. shown: the configuration whose reports the table has."""
    warnings.simplefilter("ignore")
    result = Family(name)
    if name in not_built:
        return replace(result, skipped=not_built[name])
    try:
        model = build(name)
        result = replace(result, built=type(model).__name__)
    except Exception as error:
        return replace(result, skipped=f"is not built: {line(error)}")
    try:
        plain, logits = written(model)
    except Exception as error:
        return replace(result, skipped=f"does not run by itself: {line(error)}")
    if not np.isfinite(logits).all():
        return replace(result, skipped="its logits are no numbers with random weights by itself")
    try:
        reports = {EXACT: attach(model, EXACT)}
        tokens, ours = written(model)
        gap = float(np.linalg.norm(ours - logits) / np.linalg.norm(logits))
        result = replace(result, exact=gap)
        if tokens != plain or not gap < NEAR:
            return replace(result, fault=f"lossless pages: logits {gap:.1e} apart")
        reports[INT4] = attach(model, INT4)
        if not np.isfinite(written(model)[1]).all():
            return replace(result, fault="int4: logits are not finite")
        runs = any(report.compressed for report in reports[INT4])
        result = replace(result, layers=tuple(reports[shown]), int4=runs)
        detach(model)
        if not np.array_equal(written(model)[1], logits):
            return replace(result, fault="after detach the model is another")
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1].name
        return replace(result, fault=f"{line(error)} at {at}")
    return result


def apart(
    measure: Callable[[str], Family], names: Sequence[str], seconds: float = SECONDS
) -> Iterator[Family]:
    """Yield each family, measured in a process that may die of one: then the next gets another."""
    make = partial(ProcessPoolExecutor, 1, get_context("spawn"))
    pool = make()
    try:
        for name in names:
            try:
                result = pool.submit(measure, name).result(seconds)
            except (BrokenProcessPool, TimeoutError) as error:
                died = isinstance(error, BrokenProcessPool)
                reason = "the process died" if died else f"more than {seconds:g} s"
                result = Family(name, fault=reason)
                for process in list((pool._processes or {}).values()):
                    process.kill()
                pool.shutdown(wait=False)
                pool = make()
            yield result
    finally:
        pool.shutdown()


HEAD = """# Families of {library}

Which {plural} of {library} run on compressed caches.

{what}, small, with random weights in float32, on compressed caches: {prompt} tokens read and {new} written
greedily. *Equal*: with pages that lose nothing (sink, pages and windows as ever, numbers in place of codes) tokens
are those of the plain model, and logits within {near:g} of their norm. *int4*: the same text runs.
"""


@dataclass(frozen=True)
class Survey:
    """All families of one library.

    name: of the experiment. what: was tried. kind: "family" or "file". plain: clause about those without
    compressed layers. skipped: about those that were not compared. classes: whether names of classes are a column.
    """

    name: str
    library: str
    what: str
    plain: str
    skipped: str
    kind: str = "family"
    classes: bool = False

    def page(self, results: Sequence[Family], command: str) -> str:
        """Return the table, below counts. command: that made it."""
        built = [family for family in results if not family.skipped]
        skipped = [family for family in results if family.skipped]
        compressed = [family for family in built if family.compressed]
        faults = [family for family in built if family.fault]
        classes = ["class"] if self.classes else []
        columns = [self.kind, *classes, "compressed", "the rest", "equal", "int4"]
        plural = "files" if self.kind == "file" else "families"
        head = HEAD.format(plural=plural, **vars(self), prompt=PROMPT, new=NEW, near=NEAR)
        used = ", ".join(f"{name} {number}" for name, number in versions().items())
        return "\n".join(
            [
                head,
                f"{len(results)} {plural}: {len(built)} built and compared, {len(compressed)} of them with "
                f"compressed layers, {len(built) - len(compressed)} {self.plain}; {len(faults)} with a fault. "
                f"{len(skipped)} {self.skipped}\n",
                *_table(columns, map(self._row, sorted(built, key=lambda family: family.name))),
                "\n## Not compared\n",
                *_table([self.kind, "why"], ([family.name, family.skipped] for family in skipped)),
                f"\nMade by `{command}` on {machine()['chip']}; {used}.\n",
            ]
        )

    def _row(self, family: Family) -> list[str]:
        count = f"{ranges(family.compressed)} of {len(family.layers)}" if family.compressed else "-"
        cells = [family.name, *([family.built] if self.classes else []), count, family.why or "-"]
        int4 = "yes" if family.int4 else "-"
        return cells + ([f"**{family.fault}**", ""] if family.fault else ["yes", int4])

    def run(
        self,
        doc: str | None,
        arguments: list[str] | None,
        names: Collection[str],
        measure: Callable[[str], Family],
    ) -> None:
        """Run the command: measure the families named, or all, in a process of their own, and write the page.
        Raises MachineError if one has a fault."""
        parser = Parser(self.name, doc)
        parser.add_argument(
            "names", nargs="*", help="families, by the library's names; default: all"
        )
        parser.add_argument("--out", type=Path, help="write the table here")
        args = parser.parse_args(arguments)
        check_out(args.out)
        if unknown := [name for name in args.names if name not in names]:
            raise UserError(f"[{self.name}] no {self.kind} {unknown[0]!r} in this library")
        chosen = args.names or list(names)
        results, start = [], time.perf_counter()
        for family in apart(measure, chosen):
            results.append(family)
            state = f"{len(family.compressed)} of {len(family.layers)} compressed"
            spent, start = time.perf_counter() - start, time.perf_counter()
            console.note(
                f"{family.name}: {family.fault or family.skipped or state} ({spent:.1f} s)"
            )
        out = f" --out {args.out}" if args.out else ""
        text = self.page(results, f"python -m experiments.{self.name}{out}")
        if args.out:
            args.out.write_text(text, encoding="utf-8")
        else:
            print(text)
        if bad := [family.name for family in results if family.fault]:
            raise MachineError(
                f"[{self.name}] {len(bad)} of {len(results)} have a fault: {', '.join(bad)}"
            )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
