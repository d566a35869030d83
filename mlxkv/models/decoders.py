"""What decodes each layer: kernels are built and tried when a model is loaded, not in the middle of a prompt.
And what is left when one of them fails under way."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlxkv import console, faults, sealed, selftest, tiles
from mlxkv.calibrated import Rotations
from mlxkv.config import CacheConfig
from mlxkv.metal import launch
from mlxkv.models.layers import OPS, LayerReport
from mlxkv.models.probe import Place, Shape

if TYPE_CHECKING:
    from mlxkv.models.loader import Loaded

Used = dict[Place, tuple[tuple[CacheConfig, Rotations | None], Shape]]
WHY = "`mlxkv doctor` shows why"
_Question = tuple[CacheConfig, tuple[int, int], mx.Dtype, selftest.Case | None]


def with_kernels(reports: list[LayerReport], used: Used) -> list[LayerReport]:
    """The reports with what decodes their layers here. Builds and tries all kernels that the caches of a
    model need, with a line of progress. used: what the cache at each place stores, and for whom."""
    asked = {place: _question(*found, shape) for place, (found, shape) in used.items()}
    make, answers = launch.factory(), {}
    questions = list(dict.fromkeys(asked.values()))
    new = [one for one in questions if make is not None and not _is_known(one, make)]
    with console.counted("building kernels", len(new)) as step:
        for question in questions:
            if question in new:
                step()
            answers[question] = _named(sealed.decoder(*question))
    out = []
    for report in reports:
        kernels = [answers[q] for place, q in asked.items() if place[0] == report.index]
        if report.compressed and kernels:  # of several caches, the one that is not decoded well
            kernel = next((k for k in kernels if k.startswith(OPS)), kernels[0])
            report = replace(report, kernel=kernel)
        out.append(report)
    return out


def _question(config: CacheConfig, turns: Rotations | None, shape: Shape) -> _Question:
    stored = config.folded if turns is not None and turns.folded else config
    case = selftest.Case(shape.queries, shape.heads, shape.sinks) if shape.queries else None
    return stored, (shape.key_dim, shape.value_dim), shape.dtype, case


def _is_known(question: _Question, make: launch.Factory) -> bool:
    config, dims, dtype, case = question
    if sealed.why_none(config, dims) is not None:
        return True  # there is nothing to build
    return selftest.is_known(config, dims[0], dtype, make, case)


def _named(decoder: str) -> str:
    return decoder if decoder.startswith(OPS) else f"{launch.backend()} {decoder}"


def not_used(reports: list[LayerReport]) -> tuple[str, bool] | None:
    """The line to say where a GPU decodes a compressed layer without kernels. The bool says how loudly:
    True where kernels should run there and do not, False where no kernel reads the format. None where
    kernels run, where there is no GPU, or where they are not wanted."""
    if launch.factory() is None and not launch.switched_off(launch.KERNELS):
        return None
    slow = [r.kernel for r in reports if r.compressed and r.kernel.startswith(OPS)]
    whys = [kernel.removeprefix(f"{OPS} (").removesuffix(")") for kernel in slow]
    failed = [why for why in whys if sealed.FAILED in why or launch.OFF in why]
    if failed:
        return f"! kernels are not used on this GPU: {failed[0]}; decoding is slow. {WHY}", True
    if whys:
        return f"  no kernel reads this format ({whys[0]}): decoding is by plain ops, slower", False
    return None


def step_down(loaded: Loaded, error: Exception) -> str | None:
    """After an error while `loaded` ran: switch off what it may come from, first tiles, then all kernels,
    for this process. Returns a line that says why and what runs instead, or None where no kernel ran, or
    another one would not help. Caches that were made before have to go: they hold on to their kernels."""
    tiles.forget_counters()
    # MLX raises no other kind; Python's own subclasses are no fault of a GPU.
    if type(error) is not RuntimeError:
        return None
    selftest.drain(generation_stream)
    kernels = [r.kernel for r in loaded.layers if r.compressed and not r.kernel.startswith(OPS)]
    if not kernels or launch.factory() is None or faults.is_of_memory(error):
        return None
    reason, tiled = faults.reason(error), any("tile" in kernel for kernel in kernels)
    first = launch.TILES if tiled else launch.KERNELS
    launch.switch_off(first, reason)
    # What was drawn from may be lost with the step.
    mx.random.seed(time.time_ns())
    mx.clear_cache()
    instead = f"{OPS} ({launch.switched_off(first)})"
    if tiled:  # the portable body is tried as the caches are made
        instead = f"{launch.backend()} kernels"
    loaded.layers[:] = [
        replace(r, kernel=instead) if r.compressed and not r.kernel.startswith(OPS) else r
        for r in loaded.layers
    ]
    then = "portable kernels" if tiled else "plain ops, slowly,"
    return f"! a kernel failed on this GPU: {reason}; from here on {then} decode. {WHY}"
