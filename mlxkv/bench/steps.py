"""Measure host time and device time of a decode step separately, and which of them waits for the other.

In mlx-lm's loop the host builds and submits a step while the device runs the previous one, then waits for that one's
token. Submission also blocks if more than a few pieces of work are in flight, so the host's share is measured as
processor time of its thread, which excludes waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from mlxkv import console
from mlxkv.bench import options
from mlxkv.patching.mark import steps_of
from mlxkv.patching.steps import Steps

MOST = 16  # steps for each of the two measurements
TOGETHER = 4  # steps in one evaluation
WAITING = 0.1  # share of a token's time above which the host counts as waiting
NUMBERS = ("host_ms", "build_ms", "wait_ms", "device_ms")
COLUMNS = (
    *((name, name, "") for name in ("context", "preset", "step")),
    *((f"{name} ms", f"{name}_ms", ".2f") for name in ("token", "host", "wait", "device")),
    ("waits", "waits", ""),
)
Step = Callable[[mx.array], tuple[mx.array, mx.array]]


def parts(model: nn.Module, cache: list, token: int, count: int) -> dict:
    """Return NUMBERS in ms, "waits" ("host" or "device"), and "step": how steps were made. Decodes after `token`.

    host_ms: processor time to build and submit a step; build_ms: to build it. wait_ms: the rest of a token's time, in
    which the host waits. device_ms: time per step of several built first and evaluated at once; at least the time to
    submit it.
    """
    count, steps = min(count, MOST), steps_of(model)

    def step(last: mx.array) -> tuple[mx.array, mx.array]:
        logits = model(last[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)

    with wired_limit(model), mx.stream(generation_stream):
        replayed_before = steps.replayed if steps else 0
        last, build, host, token_seconds = _in_loop(step, mx.array([token]), count)
        way = made(steps, replayed_before, count + 1)
        device = _together(step, last, -(-count // TOGETHER))
    wait = max(0.0, token_seconds - host)
    numbers = (1e3 * x for x in (host, build, wait, device))
    row = dict(zip(NUMBERS, numbers, strict=True))
    return row | {"waits": "host" if wait > WAITING * token_seconds else "device", "step": way}


def _in_loop(step: Step, last: mx.array, count: int) -> tuple[mx.array, float, float, float]:
    """Return the last token, and the median seconds of a token in mlx-lm's loop: processor time to
    build, processor time to build and submit, and total time."""
    current, times = step(last), []
    mx.async_eval(*current)
    for _ in range(count):
        start, begun = perf_counter(), thread_time()
        following = step(current[0])
        built = thread_time()
        mx.async_eval(*following)
        handed = thread_time()
        current[0].item()
        times.append((built - begun, handed - begun, perf_counter() - start))
        current = following
    build, host, whole = (median(column) for column in zip(*times, strict=True))
    return current[0], build, host, whole


def _together(step: Step, last: mx.array, count: int) -> float:
    """Return the median seconds of a step, with `TOGETHER` steps built first and evaluated at once."""
    times = []
    for _ in range(count):
        mx.eval(last)
        mx.synchronize()
        for _ in range(TOGETHER):
            last, _ = step(last)
        start = perf_counter()
        mx.eval(last)
        mx.synchronize()
        times.append((perf_counter() - start) / TOGETHER)
    return median(times)


def made(steps: Steps | None, replayed_before: int, count: int) -> str:
    """Return how the last `count` steps were made. replayed_before: `steps.replayed` before them."""
    if steps is None:
        return "by Python: not attached"
    if (replayed := steps.replayed - replayed_before) == count:
        return "replayed"
    reason = steps.why_not or steps.waits_for
    if replayed:
        return f"replayed {replayed} of {count}" + (f": {reason}" if reason else "")
    return f"by Python: {reason}"


def show(rows: list[dict]) -> None:
    """Print the table, and how to read it."""
    written = [
        row | {"step": row["step"].partition(":")[0], "waits": f"the {row['waits']}"}
        for row in rows
    ]
    options.print_rows(COLUMNS, written, "one step: the host's part and the device's")
    reasons = dict.fromkeys(f"{row['preset']}: {row['step']}" for row in rows if ":" in row["step"])
    for reason in reasons:
        console.say(reason)
    console.say(
        "step: replayed from a trace, or built by Python, token by token; host ms: processor time for building a "
        "step and handing it over; wait ms: the rest of a token, in which the host waits for the device\n"
        f"device ms: a step of {TOGETHER} that are built before and evaluated at once, no less than handing it "
        f"over; waits: the host, where it waits more than {100 * WAITING:.0f} % of a token, else the device; "
        f"medians of up to {MOST} steps a run, after those above"
    )
