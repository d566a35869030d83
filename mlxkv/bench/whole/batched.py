"""`mlxkv bench batch`: a whole model decoding many sequences at once, per preset and batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import console
from mlxkv.bench.options import (
    BASELINE,
    check_counts,
    check_weights,
    parse_batches,
    parse_presets,
)
from mlxkv.bench.show import print_machine, ratio_text, spread, weights_text
from mlxkv.bench.subject import Subject, load_subject, machine_in_use, short
from mlxkv.bench.whole.decode import WARM, fill_directly
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import parse_kv
from mlxkv.metal.launch import backend
from mlxkv.versions import versions

CONTEXT, CONTEXT_CPU = "16k", "1k"
LINE = "{:<16}{:>6}  {:<14}{:<9}{:>9}{:>9}{:>8}{:>9}{:>12}{:>14}"
TITLES = [
    "preset",
    "batch",
    "by",
    "together",
    "tok/s",
    "of fp16",
    "spread",
    "step ms",
    "cache",
    "a sequence",
]


def run(
    *,
    model: str,
    batches: str,
    context: str | None,
    kv: str,
    tokens: int,
    rounds: int,
    memory: str | None,
    dtype: str | None,
    bits: int | None,
    as_json: bool,
) -> None:
    """Measure and print. batches, kv: by commas. Full precision runs first, in mlx-lm's own batches."""
    presets = sorted(parse_presets(kv), key=lambda name: name != BASELINE)
    for name in presets:
        if parse_kv(name).listens:
            raise UserError(
                f"[--kv] a preset that observes queries needs real prompts; got {name}; choose presets "
                "without oja and +keep"
            )
    sizes = parse_batches(batches)
    text = context or (CONTEXT_CPU if backend() == "cpu" else CONTEXT)
    length = console.parse_tokens(text, "--context")
    room = console.parse_size(memory, "--memory") if memory else None
    check_counts(tokens=tokens, rounds=rounds)
    check_weights(dtype, bits)
    machine, installed = machine_in_use(), versions()
    it = load_subject(model, dtype, bits)
    weights = sum(x.nbytes for _, x in tree_flatten(it.model.parameters()))
    print_machine(machine, installed)
    print(
        f"{model}, {weights_text(it.weights, bits)}, {short(it.dtype)}, {console.human_bytes(weights)}; "
        f"{length} tokens each"
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
        f"tok/s: of all sequences, {tokens} steps after {WARM}, sealing pages included; the median of "
        f"{rounds} rounds; spread: between these rounds\n"
        "together: the whole batch in one scatter of new keys, one of new values, and one attention\n"
        "caches hold random keys and values, without a prefill; cache: allocated, with room to grow"
    )
    fits = _fits(rows, room - weights) if room else None
    if fits:
        print(
            f"beside the weights in {console.human_bytes(room)}, by arithmetic alone from the bytes of a "
            "sequence above, without the working memory of a step: "
            + ", ".join(f"{name} {count} sequences" for name, count in fits.items())
        )
    if as_json:
        about = {"memory_bytes": room, "weight_bytes": weights, "fits_by_arithmetic": fits}
        console.print_json({"machine": machine, "versions": installed, "rows": rows} | about)


def _preset(
    it: Subject, name: str, sizes: tuple[int, ...], length: int, tokens: int, rounds: int
) -> Iterator[dict]:
    """Yield a row for each batch when it is measured. All sequences of a batch are copies of one."""
    try:
        with it.attached(name):
            mx.random.seed(0)
            one = make_prompt_cache(it.model)
            fill_directly(one, it, length)
            for batch in sizes:
                mx.clear_cache()
                caches = []
                for layer in one:
                    caches.append(layer.merge([layer] * batch))
                    mx.eval(caches[-1].state)  # layer by layer: frees the copies at once
                row = {"preset": name, "by": it.decoded_by(name), "batch": batch}
                yield row | measure(it, caches, batch, tokens, rounds)
                del caches
    finally:
        mx.clear_cache()


def measure(it: Subject, caches: list, batch: int, tokens: int, rounds: int) -> dict:
    """Time `rounds` times `tokens` greedy steps, one after the other on the same caches. As in mlx-lm's
    batches, Python builds the next step while one runs."""
    last = it.random_tokens(batch, 1)
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
        "spread": spread(speeds),
        "step_ms": 1e3 * batch / speed,
        "kv_bytes": held,
        "sequence_bytes": held // batch,
        "peak_bytes": mx.get_peak_memory(),
    }


def _show(row: dict) -> None:
    together = {None: "-", True: "yes", False: "no"}[row["together"]]
    by = row["by"].split(" (")[0]  # without the reason
    line = LINE.format(
        row["preset"],
        row["batch"],
        by,
        together,
        f"{row['tokens_per_second']:.1f}",
        ratio_text(row["baseline_ratio"]),
        f"{100 * row['spread']:.0f} %",
        f"{row['step_ms']:.2f}",
        console.human_bytes(row["kv_bytes"]),
        console.human_bytes(row["sequence_bytes"]),
    )
    print(line, flush=True)


def _fits(rows: list[dict], room: int) -> dict[str, int]:
    """Sequences that fit into `room` bytes, by preset, from the largest batch."""
    largest = {row["preset"]: row for row in sorted(rows, key=lambda row: row["batch"])}
    return {name: max(0, room // row["sequence_bytes"]) for name, row in largest.items()}
