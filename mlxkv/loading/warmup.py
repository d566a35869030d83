"""Build kernels and traces before the first token, report unused kernels, and fall back to slower ones when a kernel
fails at run time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import console, errors
from mlxkv.cache import selftest
from mlxkv.cache.backends import PLAIN_OPS, LatentBackend, PortableBackend, TileBackend
from mlxkv.cache.choose import KernelPlan
from mlxkv.catalog.reports import LayerReport
from mlxkv.generate.generation import prefill_step
from mlxkv.machine import out_of_range
from mlxkv.metal import launch, tiles
from mlxkv.metal.launch import device_type
from mlxkv.patching.mark import steps_of

if TYPE_CHECKING:
    from mlxkv.loading.load import Loaded

WHY = "`mlxkv doctor` shows why"


def not_used(reports: list[LayerReport]) -> tuple[str, bool] | None:
    """Return a line about compressed layers that a GPU decodes without kernels, and whether it is a warning: True if
    kernels should run there but do not, False if no kernel reads the format. None if kernels run, if there is no
    GPU, or if they are switched off."""
    if launch.kernel_builder() is None and not launch.switched_off(launch.KERNELS):
        return None
    slow = [r.plan for r in reports if r.plan is not None and not r.plan.by_kernels]
    if failed := [plan.reason for plan in slow if plan.failed]:
        return f"! kernels are not used on this GPU: {failed[0]}; decoding is slow. {WHY}", True
    if slow:
        why = slow[0].reason
        return f"  no kernel reads this format ({why}): decoding is by plain ops, slower", False
    return None


def print_reports(lines: list[str], reports: list[LayerReport], quiet: bool) -> None:
    """Print the lines of a report on stderr, and warnings about versions and unused kernels. quiet: print only
    the warnings."""
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
    """Switch off kernels in this process after `error` of `loaded`: first tiles, then all.

    Returns a line with the reason and the replacement, or None if no kernel ran or another one would not help. Drop
    caches made before: they keep their kernels."""
    tiles.forget_counters()
    # MLX raises only this class; Python's own subclasses do not come from a GPU.
    if type(error) is not RuntimeError:
        return None
    selftest.drain(generation_stream)
    plans = [r.plan for r in loaded.layers if r.plan is not None and r.plan.by_kernels]
    if not plans or launch.kernel_builder() is None or errors.is_of_memory(error):
        return None
    reason, tiled = (
        errors.reason(error),
        any(isinstance(plan.backend, TileBackend | LatentBackend) for plan in plans),
    )
    first = launch.TILES if tiled else launch.KERNELS
    launch.switch_off(first, reason)
    # The random state may be lost with the failed step.
    mx.random.seed(time.time_ns())
    mx.clear_cache()
    slower = (
        PortableBackend() if tiled else PLAIN_OPS
    )  # making the caches tries the portable kernel
    plan = KernelPlan(slower, launch.switched_off(first), failed=True, device=device_type())
    loaded.layers[:] = [replace(r, plan=plan) if r.plan in plans else r for r in loaded.layers]
    name = "portable kernels" if tiled else "plain ops, slowly,"
    return f"! a kernel failed on this GPU: {reason}; from here on {name} decode. {WHY}"


TOKENS = 3  # decoded: the first trace, a replay, and kernels first used by the third


def warm_up(loaded: Loaded) -> None:
    """Decode a few tokens on a GPU, after a prompt that quantizes a page, with temporary caches; show progress. Call
    it in the thread that decodes later: traces belong to a thread. Skipped if no step is traced, and on a CPU, where
    it would cost a second or two at every start.

    A GPU fault is reported, and slower kernels run instead, as during a reply.
    """
    steps = steps_of(loaded.model)
    if device_type() == "cpu" or steps is None or steps.off:
        return
    with console.progress("building decode steps", 1, "1 to go, once") as step:
        step()
        try:
            _decode(loaded)
        except RuntimeError as error:
            if line := step_down(loaded, error):
                console.warn(line)
        # Without a line there is no fallback: the first reply fails with the same fault.
    mx.clear_cache()
    loaded.tell_steps()


def _decode(loaded: Loaded) -> None:
    prompt = mx.zeros((loaded.kv.window + loaded.kv.page + 1,), mx.int32)
    cache, size = make_prompt_cache(loaded.model), prefill_step()
    for _ in generate_step(
        prompt, loaded.model, max_tokens=TOKENS, prefill_step_size=size, prompt_cache=cache
    ):
        pass
