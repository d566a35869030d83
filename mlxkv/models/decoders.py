"""Chooses the kernels of each layer: they are built and tried when a model is loaded, not in the middle of a
prompt. Steps down to slower ones when a kernel fails at run time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlxkv import console, faults
from mlxkv.cache import choose, selftest
from mlxkv.cache.choose import Question
from mlxkv.cache.selftest import stand_in
from mlxkv.cache.view import OPS, KernelPlan
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.config import CacheConfig
from mlxkv.metal import launch, tiles
from mlxkv.models.catalog.reports import LayerReport
from mlxkv.models.hooks.probe import Place, Shape

if TYPE_CHECKING:
    from mlxkv.models.loader import Loaded

WHY = "`mlxkv doctor` shows why"


def with_kernels(
    reports: list[LayerReport], questions: dict[Place, Question]
) -> tuple[list[LayerReport], dict[Place, KernelPlan]]:
    """The reports with the kernels that decode their layers here, and the plan of each cache. Builds and
    tries all kernels that the caches of a model need, with a line of progress."""
    answers = {}
    asked = list(dict.fromkeys(questions.values()))
    tried = {one: replace(one, config=stand_in(one.config, one.dims[0])) for one in asked}
    new = {one for one in tried.values() if not one.is_settled}
    with console.counted("building kernels", len(new)) as step:
        for one in asked:
            if tried[one] in new:
                new.remove(tried[one])
                step()
            given = one.config, one.dims, one.dtype, one.case, one.latent, one.picked
            answers[one] = choose.plan(*given)
    plans, out = {place: answers[one] for place, one in questions.items()}, []
    for report in reports:
        kernels = [_label(plan) for place, plan in plans.items() if place[0] == report.index]
        if report.compressed and kernels:  # of several caches, the one that is not decoded well
            kernel = next((k for k in kernels if k.startswith(OPS)), kernels[0])
            report = replace(report, kernel=kernel)
        out.append(report)
    return out, plans


def question(config: CacheConfig, turns: LayerMaps | None, shape: Shape) -> Question:
    """Return which kernels a cache of this config, maps and shape needs."""
    stored = config.folded if turns is not None and turns.folded else config
    case = None
    if shape.queries:
        case = selftest.Case(shape.queries, shape.heads, shape.sinks, shape.softcap)
    dims = shape.key_dim, shape.value_dim
    return Question(stored, dims, shape.dtype, case, shape.latent, shape.selects)


def _label(plan: KernelPlan) -> str:
    return plan.label if plan.body == OPS else f"{launch.backend()} {plan.label}"


def not_used(reports: list[LayerReport]) -> tuple[str, bool] | None:
    """The line to say where a GPU decodes a compressed layer without kernels. The bool says how loudly:
    True where kernels should run there and do not, False where no kernel reads the format. None where
    kernels run, where there is no GPU, or where they are not wanted."""
    if launch.factory() is None and not launch.switched_off(launch.KERNELS):
        return None
    slow = [r.kernel for r in reports if r.compressed and r.kernel.startswith(OPS)]
    whys = [kernel.removeprefix(f"{OPS} (").removesuffix(")") for kernel in slow]
    failed = [why for why in whys if choose.FAILED in why or launch.OFF in why]
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
