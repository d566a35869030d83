"""Build what decoding needs before the first token, say where kernels are not used, and step down to slower ones when a
kernel fails at run time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import console, errors
from mlxkv.cache import selftest
from mlxkv.cache.backends import PLAIN_OPS, PortableBackend, TileBackend
from mlxkv.cache.choose import KernelPlan
from mlxkv.catalog.reports import LayerReport
from mlxkv.generate.generation import prefill_step
from mlxkv.machine import out_of_range
from mlxkv.metal import launch, tiles
from mlxkv.metal.launch import backend
from mlxkv.patching.mark import steps_of

if TYPE_CHECKING:
    from mlxkv.loading.load import Loaded

WHY = "`mlxkv doctor` shows why"


def not_used(reports: list[LayerReport]) -> tuple[str, bool] | None:
    """Return the line to say where a GPU decodes a compressed layer without kernels. The bool says how loudly:
    True where kernels should run there and do not, False where no kernel reads the format. None where
    kernels run, where there is no GPU, or where they are not wanted."""
    if launch.factory() is None and not launch.switched_off(launch.KERNELS):
        return None
    slow = [r.plan for r in reports if r.plan is not None and not r.plan.by_kernels]
    if failed := [plan.reason for plan in slow if plan.failed]:
        return f"! kernels are not used on this GPU: {failed[0]}; decoding is slow. {WHY}", True
    if slow:
        why = slow[0].reason
        return f"  no kernel reads this format ({why}): decoding is by plain ops, slower", False
    return None


def print_reports(lines: list[str], reports: list[LayerReport], quiet: bool) -> None:
    """Print the lines of a report on stderr, and warnings about versions and kernels that are not used. quiet: the
    warnings alone."""
    for line in [] if quiet else lines:
        console.note(f"  {line}")
    for line in out_of_range():
        console.warn(f"! outside the range that mlxkv was tested with: {line}")
    advice, loud = not_used(reports) or ("", False)
    if loud:
        console.warn(advice)
    elif advice and not quiet:
        console.note(advice)


def step_down(loaded: Loaded, error: Exception) -> str | None:
    """After an error while `loaded` ran: switch off what it may come from, first tiles, then all kernels,
    for this process. Returns a line that says why and what runs instead, or None where no kernel ran, or
    another one would not help. Caches that were made before have to go: they hold on to their kernels."""
    tiles.forget_counters()
    # MLX raises no other kind; Python's own subclasses are no fault of a GPU.
    if type(error) is not RuntimeError:
        return None
    selftest.drain(generation_stream)
    plans = [r.plan for r in loaded.layers if r.plan is not None and r.plan.by_kernels]
    if not plans or launch.factory() is None or errors.is_of_memory(error):
        return None
    reason, tiled = (
        errors.reason(error),
        any(plan.backend.name == TileBackend.name for plan in plans),
    )
    first = launch.TILES if tiled else launch.KERNELS
    launch.switch_off(first, reason)
    # What was drawn from may be lost with the step.
    mx.random.seed(time.time_ns())
    mx.clear_cache()
    slower = (
        PortableBackend() if tiled else PLAIN_OPS
    )  # the portable body is tried as the caches are made
    plan = KernelPlan(slower, launch.switched_off(first), failed=True, device=backend())
    loaded.layers[:] = [replace(r, plan=plan) if r.plan in plans else r for r in loaded.layers]
    name = "portable kernels" if tiled else "plain ops, slowly,"
    return f"! a kernel failed on this GPU: {reason}; from here on {name} decode. {WHY}"


TOKENS = 3  # decoded: the first trace, a replay, and what is not used before the third


def warm_up(loaded: Loaded) -> None:
    """Decode a few tokens on a GPU, after a prompt that quantizes a page, with caches that are thrown away; shows
    progress. For the thread that decodes later: traces belong to a thread. Does nothing where no step is
    traced, nor on a CPU, which would take a second or two at every start.

    A fault of the GPU is told, and slower kernels run instead, as in the middle of a reply.
    """
    steps = steps_of(loaded.model)
    if backend() == "cpu" or steps is None or steps.off:
        return
    with console.counted("building decode steps", 1) as step:
        step()
        try:
            _decode(loaded)
        except RuntimeError as error:
            if line := step_down(loaded, error):
                console.warn(line)
        # Without a line the first reply meets the same fault, and ends with it.
    mx.clear_cache()
    loaded.tell_steps()


def _decode(loaded: Loaded) -> None:
    prompt = mx.zeros((loaded.kv.window + loaded.kv.page + 1,), mx.int32)
    cache, size = make_prompt_cache(loaded.model), prefill_step()
    for _ in generate_step(
        prompt, loaded.model, max_tokens=TOKENS, prefill_step_size=size, prompt_cache=cache
    ):
        pass
