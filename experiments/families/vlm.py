"""Try the language model of every family of mlx-vlm on compressed caches: `python -m experiments.families.vlm`.

Each is built small, with random weights: which layers are compressed, whether the text is that of mlx-vlm's own
caches while nothing is sealed, how far int4 is behind it. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from experiments.families.found import ending, row
from experiments.families.vlm_building import VOCABULARY, NotBuilt, build, families
from experiments.options import Parser, check_out
from mlxkv import console
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach
from mlxkv.models.catalog.reports import LayerReport, ranges
from mlxkv.models.hooks.mark import own_make_cache

PROMPT, NEW = 45, 20  # tokens
INT4 = parse_kv("int4")  # whose window holds all of them
SEALED = replace(
    INT4, sink=4, recent=16, page=16
)  # pages are sealed while reading and while writing
NEAR = 1e-4  # of the norm of the logits, while nothing is sealed
SECONDS = 120.0  # for one family
KL = 0.1  # mean over the tokens, in nats: more is a fault
HEAD = """# Families of mlx-vlm

Which families of mlx-vlm run on compressed caches.

The language model of every family in mlx-vlm that can be built small, with random weights in float32:
{prompt} tokens read and {new} written greedily, on mlx-vlm's own caches and on compressed ones. *Equal*: while
nothing is sealed (int4 as it is, whose window holds {all} tokens) the tokens are those of the plain caches and the
logits within {near:g} of their norm. *KL*: with windows so small that 4 pages of 16 tokens are sealed, the mean
divergence of int4's predictions from the plain ones, in nats, over the same text; more than {kl:g} would be a
fault. Random weights say that the right numbers arrive, not how good 4 bits are.

"""


@dataclass(frozen=True)
class Found:
    """skipped: why nothing was compared. layers: reports. kl: of the sealed caches, or None where nothing is
    compressed. fault: what is wrong."""

    name: str
    skipped: str = ""
    layers: tuple[LayerReport, ...] = ()
    kl: float | None = None
    fault: str = ""

    @property
    def compressed(self) -> list[int]:
        return [one.index for one in self.layers if one.compressed]

    @property
    def why(self) -> str:
        """Why the other layers are not compressed."""
        groups: dict[str, list[int]] = {}
        for one in self.layers:
            if not one.compressed:
                groups.setdefault(f"{one.kind}: {one.reason}", []).append(one.index)
        return "; ".join(f"{ranges(found)} ({why})" for why, found in groups.items())


def logits_of(model: nn.Module, caches: list, tokens: mx.array) -> mx.array:
    """[T, vocabulary] float32 of the last token of `tokens` [1, T]."""
    out = model(tokens, cache=caches)
    out = getattr(out, "logits", out)[:, -1].astype(mx.float32)
    mx.eval(out)
    return out


def written(model: nn.Module, text: list[int] | None = None) -> tuple[list[int], mx.array]:
    """The tokens that a model writes behind the prompt, and their logits [NEW, vocabulary]. text: what to write
    instead of the likeliest tokens."""
    prompt = mx.random.randint(0, VOCABULARY, (1, PROMPT), key=mx.random.key(1))
    caches, tokens, rows = own_make_cache(model)(), [], []
    if "make_cache" in vars(model):  # attached
        caches = model.make_cache()
    step = prompt
    for i in range(NEW):
        rows.append(logits_of(model, caches, step))
        tokens.append(text[i] if text is not None else mx.argmax(rows[-1], axis=-1).item())
        step = mx.array([tokens[-1:]])
    return tokens, mx.concatenate(rows)


def divergence(plain: mx.array, ours: mx.array) -> float:
    """The mean Kullback-Leibler divergence of the rows of logits, in nats."""
    p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (plain, ours))
    return (mx.exp(p) * (p - q)).sum(-1).mean().item()


def compared(name: str, model: nn.Module) -> Found:
    """What one family does."""
    try:
        tokens, plain = written(model)
        if not mx.isfinite(plain).all().item():
            raise ValueError("NaN or infinity in the logits")
    except Exception as error:  # without a cache of ours in it
        said = " ".join(str(error).split())[:100]
        return Found(
            name, f"with its own caches it fails on these values: {type(error).__name__}: {said}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attach, where nothing is compressed: the table says so
        layers = tuple(attach(model, INT4))
        found = Found(name, layers=layers)
        again, ours = written(model, None)
        off = (mx.linalg.norm(ours - plain) / mx.linalg.norm(plain)).item()
        if again != tokens or not off <= NEAR:
            return replace(found, fault=f"other text before anything is sealed ({off:.1e})")
        if found.compressed:
            attach(model, SEALED)
            found = replace(found, kl=divergence(plain, written(model, tokens)[1]))
            if not found.kl <= KL:
                found = replace(found, fault=f"KL {found.kl:.2g}")
        detach(model)
    if written(model)[0] != tokens:
        return replace(found, fault="other text after detach")
    return found


def family(name: str) -> Found:
    """Build and compare one; whatever is raised is a fault."""
    try:
        return compared(name, build(name))
    except NotBuilt as error:
        return Found(name, str(error))
    except Exception as error:
        console.note(traceback.format_exc())
        return Found(name, fault=f"{type(error).__name__}: {' '.join(str(error).split())[:100]}")


def apart(names: list[str]) -> Iterator[tuple[Found, float]]:
    """Each family and the seconds it took, in a process that may die of one: then the next gets another."""
    make = partial(ProcessPoolExecutor, 1, get_context("spawn"))
    pool = make()
    try:
        for name in names:
            start = time.perf_counter()
            try:
                found = pool.submit(family, name).result(SECONDS)
            except (BrokenProcessPool, TimeoutError) as error:
                died = isinstance(error, BrokenProcessPool)
                why = "the process died" if died else f"more than {SECONDS:g} s"
                found = Found(name, fault=why)
                for process in list((pool._processes or {}).values()):
                    process.kill()
                pool.shutdown(wait=False)
                pool = make()
            yield found, time.perf_counter() - start
    finally:
        pool.shutdown()


def page(found: list[Found], command: str) -> str:
    """The table, below counts."""
    built = [one for one in found if not one.skipped]
    some = [one for one in built if one.compressed]
    faults = [one for one in built if one.fault]
    skipped = [one for one in found if one.skipped]
    out = [
        HEAD.format(prompt=PROMPT, new=NEW, near=NEAR, kl=KL, all=INT4.room(False)),
        f"{len(found)} families: {len(built)} built and compared, {len(some)} of them with compressed layers, "
        f"{len(built) - len(some)} run as they are, with a reason; {len(faults)} with a fault. {len(skipped)} "
        "were not compared.\n",
        "| family | compressed | the rest | equal | KL |",
        "|---|---|---|---|---|",
    ]
    for one in built:
        out.append(row(one, "-" if one.kl is None else f"{one.kl:.1e}"))
    return "\n".join([*out, *ending(skipped, command)])


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("families.vlm", __doc__)
    add = parser.add_argument
    add("names", nargs="*", help="families, by mlx-vlm's names; default: all")
    add("--out", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    check_out(args.out)
    there = families()
    for name in args.names:
        if name not in there:
            raise UserError(f"[families.vlm] mlx-vlm has no family {name!r}; see its folder models")
    found = []
    for one, spent in apart(args.names or there):
        found.append(one)
        said = one.fault or one.skipped or f"{len(one.compressed)} of {len(one.layers)} compressed"
        console.note(f"{one.name}: {said} ({spent:.1f} s)")
    command = "python -m experiments.families.vlm" + (f" --out {args.out}" if args.out else "")
    text = page(found, command)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    if bad := [one.name for one in found if one.fault]:
        raise MachineError(
            f"[families.vlm] {len(bad)} of {len(found)} have a fault: {', '.join(bad)}"
        )


if __name__ == "__main__":
    console.run_tool(main)
