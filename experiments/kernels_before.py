"""Time kernels of an older commit and of this one in one process, in turns.

    git worktree add ../older COMMIT
    python -m experiments.kernels_before ../older --kv int4,polar --shape 1,16,4,256 --tokens 128k

Of each preset: microseconds a call of decode attention (chains of 64 calls), or with --seal of quantizing all tokens,
and the quartiles of new over old. `again` is this commit once more: what differs by chance. MLXKV_TILES=0: the portable
body.
"""

import importlib
import re
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import ModuleType

from experiments.options import Parser, words
from mlxkv import console
from mlxkv.bench.kernels.case import KernelShape
from mlxkv.errors import UserError
from mlxkv.metal.timing import Chain, interleaved

OLDER, NEWER = "mlxkv_older", "mlxkv"
CALLS, QUANTIZES = 64, 16
IMPORT = re.compile(r"^(\s*(?:from|import) )mlxkv\b", re.M)
NAME = re.compile(r'((?:import_module|files)\(")mlxkv\b')


def copy_package(folder: Path, place: Path) -> None:
    """Copy the package of an older commit to `place` as OLDER, to import beside this one. Raises UserError."""
    if not (folder / NEWER).is_dir():
        raise UserError(
            f"[kernels_before] no {NEWER} in this folder; got {folder}; choose a checkout"
        )
    shutil.copytree(folder / NEWER, place / OLDER)
    for file in (place / OLDER).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(NAME.sub(rf"\1{OLDER}", IMPORT.sub(rf"\1{OLDER}", text)), encoding="utf-8")
    sys.path.insert(0, str(place))


def attention_task(part: partial, name: str, shape: KernelShape, tokens: int):
    """Return a chain of decode attention by one package, over copies of a filled cache."""
    import mlx.core as mx

    attend, case = part("bench.kernels.attend"), part("bench.kernels.case")
    config = config_of(part, name, shape)
    step = attend.DecodeStep(shape, tokens, mx.bfloat16, CALLS)
    views = [case.filled(config, shape, tokens, mx.bfloat16)]
    count = attend.copies_of(case.stored_bytes(config, shape, views[0]), CALLS)
    views += [case.filled(config, shape, tokens, mx.bfloat16) for _ in range(count - 1)]
    call = partial(part("cache.attention").attend, scale=step.scale)
    return partial(step.chain, call, views)


def quantizing_task(part: partial, name: str, shape: KernelShape, tokens: int):
    """Quantizing all tokens by one package, one time after the other."""
    import mlx.core as mx

    config, choose = config_of(part, name, shape), part("cache.choose")
    plan = choose.plan(config, (shape.dims, shape.dims), mx.bfloat16)
    maps, pair = (
        part("bench.kernels.case").rotations(config, shape),
        shape.pair(tokens, mx.bfloat16),
    )
    mx.eval(pair)

    def run() -> Chain:
        start, out = time.perf_counter(), []
        for _ in range(QUANTIZES):
            store = choose.store(plan, maps)
            store.append(tuple(mx.depends(list(pair), out) if out else pair), tokens // config.page)
            out = store.arrays()
        mx.eval(out)
        return Chain(0.0, (time.perf_counter() - start) / QUANTIZES)

    return run


def config_of(part: partial, name: str, shape: KernelShape):
    return part("bench.spread").allotted(part("formats.names").parse_kv(name), shape.dims)


def module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"{package}.{name}")


def parse_options(argv: Sequence[str] | None) -> Namespace:
    parser = Parser("kernels_before", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kv", type=words, default=("int4",))
    parser.add_argument("--shape", default="1,16,4,256")
    parser.add_argument("--tokens", default="128k")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seal", action="store_true")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    import mlx.core as mx

    options = parse_options(argv)
    shape = KernelShape(*map(int, options.shape.split(",")))
    tokens = console.parse_tokens(options.tokens, "--tokens")
    make, rows = quantizing_task if options.seal else attention_task, []
    with tempfile.TemporaryDirectory() as place:
        copy_package(options.folder, Path(place))
        for name in options.kv:
            tasks = {}
            for package in (OLDER, NEWER):
                mx.random.seed(0)
                tasks[package] = make(partial(module, package), name, shape, tokens)
                tasks[package]()
            tasks["again"] = tasks[NEWER]
            times = {k: [x.run for x in v] for k, v in interleaved(tasks, options.rounds).items()}
            ratios = [a / b for a, b in zip(times[NEWER], times[OLDER], strict=True)]
            row = [f"{1e6 * median(v):.1f}" for v in times.values()]
            rows.append([name, *row, *(f"{x:.3f}" for x in quantiles(ratios, n=4))])
    console.print_table(
        ["preset", OLDER, NEWER, "again", "quartile", "new / old", "quartile"], rows
    )


if __name__ == "__main__":
    console.run_tool(main)
