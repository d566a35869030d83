"""Build the kernels of `mlxkv doctor`, compare them with plain ops and time them. The most needed are first."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from mlxkv.cache import selftest
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PortableBackend, RowsBackend, TileBackend
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import View
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.formats.records import record_layout
from mlxkv.metal import launch, predict, tiles, trust, whiten
from mlxkv.metal.timing import chain

Step = Callable[[str], None]  # called with the name of the next computation
RIGHT, WRONG, NOT_BUILT, DID_NOT_RUN = "right", "wrong", "not built", "did not run"
NOT_TRIED, NONE = "not tried", "none"
FAILED = (WRONG, NOT_BUILT, DID_NOT_RUN)
# One width of mixed bits represents all: the kernels are the same (`selftest.representative_config`).
NEEDED, DIMS = ("int4", "int8", "fill-2.25", "int2", "int3"), (128, 64, 256)
# With --all: other forms of these, then a preset of every other method, at one head dim.
MORE = ("srft-int4+g64", "oscar-int2")
METHOD_DIMS = 128
METHODS = (
    *("turbo-int3", "polar-tree+online", "kivi-int2", "srft-scaled-int4", "polar", "static-0.75"),
    "oja-0.75+int4",  # two bases in one pass
)
FOLLOWING, WHITEN = ("oja-0.75+int4", 128, 96), "whiten"  # preset, head dim, rank; its extra kernel
BODIES = {"portable": PortableBackend, "tiles": TileBackend}
BUDGET = 20.0  # seconds; without --all, no kernel is started later
HEADS, KV_HEADS, TOKENS, CALLS = 16, 4, 8192, 16  # of the timed step
TIMES = ("attend_us", "plain_us", "speedup", "predicted_us")


def cases(every: bool = True) -> list[tuple[str, int]]:
    """Return (preset, head dim), the most needed first."""
    pairs = [(preset, dims) for dims in DIMS for preset in NEEDED]
    if every:
        pairs += [(preset, dims) for preset in MORE for dims in DIMS]
        pairs += [(preset, METHOD_DIMS) for preset in METHODS]
    return pairs


def rows(step: Step, every: bool = False) -> list[dict]:
    """Return a row for each kernel with its `state`: RIGHT, WRONG, NOT_BUILT, DID_NOT_RUN, NOT_TRIED (out
    of time, or only tried with `every`), NONE (no such kernel for this format, or on this machine).

    should_run: whether any state except RIGHT is a failure. reason: None if right, else one line; detail: the whole
    message. built, right: None if unknown. seconds: to build and run once; spent: on the whole row. attend_us,
    plain_us: one call over TOKENS tokens, by kernels and by plain ops. predicted_us: on a known Apple GPU.
    """
    builder = launch.kernel_builder()
    if builder is None:
        return [_row(p, d, "", NONE, launch.absent()) for p, d in cases()]
    table, chosen_cases = [], set(cases(every))
    for preset, dims in cases():
        config = selftest.representative_config(parse_kv(preset), dims)
        for body in BODIES:
            table.append(_designed(config, preset, dims, body, builder))
            if (preset, dims) not in chosen_cases and table[-1]["should_run"]:
                table[-1] |= {"reason": NOT_TRIED}
    table.append(_row(*FOLLOWING[:2], WHITEN, NOT_TRIED, None if every else NOT_TRIED, True))
    todo = [row for row in table if row["should_run"] and row["reason"] is None]
    begun = time.monotonic()
    for i, row in enumerate(todo):
        if not every and time.monotonic() - begun > BUDGET:
            row["reason"] = NOT_TRIED
            continue
        step(f"kernels {i + 1}/{len(todo)}: {name(row)}")
        start = time.monotonic()
        if row["body"] == WHITEN:
            _try_whiten(row, builder)
        else:
            _try(row, builder, every)
        row["spent"] = time.monotonic() - start
    if builder is mx.fast.metal_kernel:
        _trust_both(table)
    return table


def _trust_both(table: list[dict]) -> None:
    """Note that `RowsBackend` may be tried again where both of its bodies are right."""
    good = [(row["preset"], row["head_dim"]) for row in table if row["state"] == RIGHT]
    for preset, dims in set(good):
        if good.count((preset, dims)) == len(BODIES):
            config = selftest.representative_config(parse_kv(preset), dims)
            trust.note(_noted_as(config, dims, RowsBackend.name), None)


def _noted_as(config: CacheConfig, dims: int, name: str) -> trust.Kernels:
    return record_layout(config, *config.dims(dims, dims)), dims, mx.float16, name


def _row(
    preset: str, dims: int, body: str, state: str, reason: str | None, should_run: bool = False
) -> dict:
    unknown = ("built", "right", "seconds", "spent", *TIMES)
    row = {"preset": preset, "head_dim": dims, "body": body, "reason": reason, "state": state}
    return row | {"should_run": should_run, **dict.fromkeys(unknown), "detail": ""}


def _designed(
    config: CacheConfig, preset: str, dims: int, body: str, builder: launch.KernelBuilder
) -> dict:
    """Return a row to try, or a row with the reason why this kernel does not exist here."""
    stored = config.dims(dims, dims)
    reason = config.keys.quantizer.why_no_record(stored[0], config.page)
    if reason is None and body == "tiles":
        layout = record_layout(config, *stored)
        reason = tiles.why_not(layout, dims, mx.float16, builder)
        if builder is mx.fast.metal_kernel and reason is None and _is_virtual():
            reason = "the GPU of a virtual machine has no simdgroup matrices"
    if reason is not None:
        return _row(preset, dims, body, NONE, reason)
    return _row(preset, dims, body, NOT_TRIED, None, True)


def _is_virtual() -> bool:
    return "paravirtual" in str(mx.device_info().get("device_name", "")).lower()


def _try(row: dict, builder: launch.KernelBuilder, every: bool) -> None:
    dims, backend = row["head_dim"], BODIES[row["body"]](builder)
    config = selftest.representative_config(parse_kv(row["preset"]), dims)
    if builder is mx.fast.metal_kernel and not every:
        kernels = _noted_as(config, dims, backend.name)
        if trust.ended_processes(kernels):
            row |= {"state": DID_NOT_RUN, "reason": trust.why_not(kernels), "right": False}
            return
    result = selftest.test(config, dims, mx.float16, backend)
    right = result.reason is None
    state = (
        RIGHT if right else WRONG if result.errors else DID_NOT_RUN if result.built else NOT_BUILT
    )
    row |= {**vars(result), "state": state, "right": right}
    if right and builder in (mx.fast.metal_kernel, mx.fast.cuda_kernel):
        row |= speed(config, dims, backend)
        place = row["preset"], dims, KV_HEADS, HEADS // KV_HEADS, TOKENS
        row["predicted_us"] = predict.attend_us(*place, by_tiles=row["body"] == "tiles")


def _try_whiten(row: dict, builder: launch.KernelBuilder) -> None:
    start = time.perf_counter()
    reason = whiten.why_not(*FOLLOWING[1:], builder)
    wrong = reason is not None and reason.startswith("columns")
    row["state"] = WRONG if wrong else RIGHT if reason is None else DID_NOT_RUN
    row |= {"reason": reason, "right": reason is None, "seconds": time.perf_counter() - start}
    row["built"] = True if wrong or reason is None else None


def speed(config: CacheConfig, dims: int, backend: PortableBackend) -> dict:
    """attend_us, plain_us and speedup of one decode step: the best of three chains of dependent calls. Empty if
    this GPU cannot run it."""
    try:
        x = mx.random.normal((3, 1, KV_HEADS, TOKENS, dims), mx.float16, key=mx.random.key(0))
        q = mx.random.normal((1, HEADS, 1, dims), mx.float16, key=mx.random.key(1))
        layer_maps = None
        if config.calibrated:
            layer_maps = sample(KV_HEADS, (dims, dims), config.fitted)
        count, first = TOKENS // config.page, mx.contiguous(x[2, :, :, :64])
        recent = first, mx.contiguous(x[2, :, :, 64:128])
        ours = Records(config, (dims, dims), backend, layer_maps)
        ours.append((x[0], x[1]), count)
        plain = Codes(config, (dims, dims), layer_maps)
        with mx.stream(mx.cpu):
            plain.restore(ours.state, count)
            mx.eval(plain.arrays(), ours.arrays(), q)
        best = []
        for store, steps in ((ours, CALLS), (plain, CALLS // 4)):
            view = View(recent, None, store.read(0, count))
            call = partial(attend, scale=dims**-0.5)
            times = [sum(chain(call, q, [view], n)) for n in (1, steps, steps, steps)][1:]
            best.append(1e6 * min(times))
    except (RuntimeError, ValueError):  # out of memory, or an operation that MLX lacks on this GPU
        return {}
    return {"attend_us": best[0], "plain_us": best[1], "speedup": best[1] / best[0]}


# -- counts of rows


def name(row: dict) -> str:
    return f"{row['preset']} at head dim {row['head_dim']}, {row['body']}"


def tried(rows: list[dict]) -> list[dict]:
    """Return the rows that should run here and were tried."""
    return [row for row in rows if row["should_run"] and row["state"] != NOT_TRIED]


def right(rows: list[dict]) -> int:
    """Return how many rows are right."""
    return sum(row["state"] == RIGHT for row in rows)


def failed(rows: list[dict]) -> list[dict]:
    """Return the rows that should run here and failed."""
    return [row for row in rows if row["should_run"] and row["state"] in FAILED]


def left(rows: list[dict], needed: tuple[str, ...]) -> dict | None:
    """Summarise the untried rows: number, names (only of the presets `needed`) and estimated seconds. None if all
    were tried."""
    untried = [row for row in rows if row["should_run"] and row["state"] == NOT_TRIED]
    spent = [row["spent"] for row in rows if row["spent"] is not None]
    if not untried:
        return None
    return {
        "rows": len(untried),
        "names": [name(row) for row in untried if row["preset"] in needed],
        "seconds": sum(spent) / len(spent) * len(untried) if spent else None,
    }
