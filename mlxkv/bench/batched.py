"""`mlxkv bench batch`: a whole model decoding many sequences at once, per preset and batch."""

from __future__ import annotations

import time
from statistics import median

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import console, doctor
from mlxkv.batch import BatchedKVCache
from mlxkv.bench.decode import WARM, decoded_by, fill_directly
from mlxkv.bench.models import DTYPES, Subject, subject
from mlxkv.bench.plan import BASELINE
from mlxkv.bench.timing import default_dtype, print_where, short, where
from mlxkv.config import parse_kv
from mlxkv.errors import MachineError, UserError
from mlxkv.metal.launch import backend
from mlxkv.models import attach, detach
from mlxkv.shapes import text_config

CONTEXT, CONTEXT_CPU = "16k", "1k"
LINE = "{:<16}{:>6}  {:<14}{:<9}{:>9}{:>9}{:>8}{:>9}{:>12}{:>14}"
TITLES = (
    *("preset", "batch", "by", "together", "tok/s", "of fp16", "spread", "step ms"),
    *("cache", "a sequence"),
)


def run(
    model: str = "tiny",
    batches: str = "1,4,16",
    context: str | None = None,
    kv: str = "fp16,int4",
    tokens: int = 64,
    rounds: int = 2,
    memory: str | None = None,
    dtype: str | None = None,
    bits: int | None = None,
    as_json: bool = False,
) -> None:
    """The command. batches, kv: by commas; full precision runs first, as mlx-lm batches it."""
    presets = sorted(dict.fromkeys(name.strip() for name in kv.split(",")), key=_not_plain)
    for name in presets:
        if parse_kv(name).listens:
            raise UserError(
                "[--kv] a cache that hears its queries takes nothing but prompts and replies; got "
                f"{name}; choose presets without oja and +keep"
            )
    sizes = _sizes(batches)
    text = context or (CONTEXT_CPU if backend() == "cpu" else CONTEXT)
    length = console.parse_tokens(text, "--context")
    room = console.parse_size(memory, "--memory") if memory else None
    _check(tokens, rounds, dtype, bits)
    machine, versions = where(), doctor.versions()
    it = subject(model, DTYPES.get(dtype), default_dtype(), bits)
    weights = sum(x.nbytes for _, x in tree_flatten(it.model.parameters()))
    print_where(machine, versions)
    kind = "random weights" if it.weights == "random" else "weights as stored"
    print(
        f"{model}, {kind}, {short(it.dtype)}, {console.human_bytes(weights)}; {length} tokens each"
    )
    print(LINE.format(*TITLES), flush=True)
    rows, plain = [], {}
    for name in presets:
        for row in _preset(it, name, sizes, length, tokens, rounds):
            if name == BASELINE:
                plain[row["batch"]] = row["tokens_per_second"]
            base = plain.get(row["batch"])
            row["baseline_ratio"] = row["tokens_per_second"] / base if base else None
            rows.append({"model": model, "dtype": short(it.dtype), "context": length} | row)
            _show(row)
    print(
        f"tok/s: of all sequences, {tokens} steps after {WARM}, sealed pages included, the median of "
        f"{rounds} rounds; spread: between these\ntogether: one scatter for new keys, one for new "
        "values and one attention for the whole batch\nthe caches hold random keys and values, no "
        "prompt was read; cache: allocated, with room to grow"
    )
    fits = _fits(rows, room - weights) if room else None
    if fits:
        print(
            f"beside the weights in {console.human_bytes(room)}, by arithmetic alone from the bytes "
            "of a sequence above, without what a step needs besides: "
            + ", ".join(f"{name} {count} sequences" for name, count in fits.items())
        )
    if as_json:
        about = {"memory_bytes": room, "weight_bytes": weights, "fits_by_arithmetic": fits}
        console.print_json({"machine": machine, "versions": versions, "rows": rows} | about)


def _not_plain(name: str) -> bool:
    return name != BASELINE


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UserError(
            f"[--batches] not numbers of sequences; got {text!r}; choose such as 1,4,16"
        )
    return list(dict.fromkeys(sizes))


def _check(tokens: int, rounds: int, dtype: str | None, bits: int | None) -> None:
    for name, number in (("--tokens", tokens), ("--rounds", rounds)):
        if number < 1:
            raise UserError(f"[{name}] must be at least 1; got {number}; choose a larger one")
    for name, value, choices in (
        ("--dtype", dtype, (None, *DTYPES)),
        ("--bits", bits, (None, 2, 3, 4, 6, 8)),
    ):
        if value not in choices:
            texts = ", ".join(str(choice) for choice in choices if choice)
            raise UserError(f"[{name}] unknown value; got {value}; choose from {texts}")


def _preset(it: Subject, name: str, sizes: list[int], length: int, tokens: int, rounds: int):
    """One row for each batch, as it is done. All sequences of a batch are copies of one."""
    attach(it.model, name, calibration=it.calibration if parse_kv(name).calibrated else None)
    try:
        mx.random.seed(0)
        one = make_prompt_cache(it.model)
        fill_directly(one, it, length)
        for batch in sizes:
            mx.clear_cache()
            caches = []
            for layer in one:
                caches.append(layer.merge([layer] * batch))
                mx.eval(caches[-1].state)  # layer by layer: what is copied goes at once
            row = {"preset": name, "by": decoded_by(it, name), "batch": batch}
            yield row | measure(it, caches, batch, tokens, rounds)
            del caches
    finally:
        detach(it.model)
        mx.clear_cache()


def measure(it: Subject, caches: list, batch: int, tokens: int, rounds: int) -> dict:
    """`rounds` times `tokens` steps, one after the other on the same caches; greedy, and as mlx-lm's
    batches do, the next step is built while one runs."""
    vocabulary = int(text_config(it.config)["vocab_size"])
    last = mx.random.randint(0, vocabulary, (batch, 1))
    mx.eval(last)
    mx.reset_peak_memory()

    def steps(count: int) -> float:
        nonlocal last
        mx.eval(last)
        start = time.perf_counter()
        for _ in range(count):
            before, logits = last, it.model(last, cache=caches)[:, -1]
            last = mx.argmax(logits, axis=-1, keepdims=True)
            mx.async_eval(last)
            mx.eval(before)
        mx.eval(last)
        seconds = time.perf_counter() - start
        if not mx.isfinite(logits.max()).item():  # one NaN makes all of its row NaN
            raise MachineError("[bench] NaN or infinity in the logits; no times")
        return seconds

    with wired_limit(it.model):  # as mlx-lm generates
        steps(WARM)
        speeds = [batch * tokens / steps(tokens) for _ in range(rounds)]
    ours = [cache for cache in caches if isinstance(cache, BatchedKVCache)]
    speed, held = median(speeds), sum(cache.nbytes for cache in caches)
    return {
        "together": all(cache.together for cache in ours) if ours and batch > 1 else None,
        "tokens_per_second": speed,
        "spread": (max(speeds) - min(speeds)) / speed,
        "step_ms": 1e3 * batch / speed,
        "kv_bytes": held,
        "sequence_bytes": held // batch,
        "peak_bytes": mx.get_peak_memory(),
    }


def _show(row: dict) -> None:
    ratio = f"{row['baseline_ratio']:.2f}" if row["baseline_ratio"] else "-"
    together = {None: "-", True: "yes", False: "no"}[row["together"]]
    by = row["by"].split(" (")[0]  # without the reason
    line = LINE.format(
        *(row["preset"], row["batch"], by, together, f"{row['tokens_per_second']:.1f}", ratio),
        *(f"{100 * row['spread']:.0f} %", f"{row['step_ms']:.2f}"),
        console.human_bytes(row["kv_bytes"]),
        console.human_bytes(row["sequence_bytes"]),
    )
    print(line, flush=True)


def _fits(rows: list[dict], room: int) -> dict[str, int]:
    """Sequences by preset, from the largest batch that was measured."""
    largest = {row["preset"]: row for row in sorted(rows, key=lambda row: row["batch"])}
    return {name: max(0, room // row["sequence_bytes"]) for name, row in largest.items()}


if __name__ == "__main__":
    from mlxkv.bench.commands import main

    main("batch")
