"""`mlxkv bench batch`: a whole model decoding many sequences at once, per preset and batch.

Full precision is there twice: in mlx-lm's own batches, which make a mask array for sequences of any
lengths, and without a mask, in mlx-lm's caches of one sequence whose first axis is the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import copy
from statistics import median

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import wired_limit
from mlx_lm.models.base import scaled_dot_product_attention
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
from mlxkv.cache.attention import attend
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.view import View
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import parse_kv
from mlxkv.metal.launch import backend
from mlxkv.metal.timing import seconds_to_run
from mlxkv.models.hooks.held import layers_of
from mlxkv.versions import versions

CONTEXT, CONTEXT_CPU = "16k", "1k"
NO_MASK = "fp16-no-mask"
ATTENTIONS = 5  # attentions of all layers that are timed alone
LINE = "{:<16}{:>6}  {:<14}{:<9}{:>9}{:>9}{:>12}{:>8}{:>9}{:>10}{:>9}{:>12}{:>14}"
TITLES = [
    "preset",
    "batch",
    "by",
    "together",
    "tok/s",
    "of fp16",
    "of no mask",
    "spread",
    "step ms",
    "attn ms",
    "of SDPA",
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
    """Measure and print. batches, kv: by commas. Full precision runs first: it is what others are
    compared with."""
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
    room = console.parse_size(memory, "--memory", "g") if memory else None
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
    if presets[0] == BASELINE:
        presets.insert(1, NO_MASK)
    for name in presets:
        for row in _preset(it, name, sizes, length, tokens, rounds):
            plain[name, row["batch"]] = row
            row |= _ratios(row, plain)
            rows.append({"model": model, "dtype": short(it.dtype), "context": length} | row)
            _show(row)
    print(
        f"tok/s: of all sequences, {tokens} steps after {WARM}, sealing pages included; the median of "
        f"{rounds} rounds; spread: between these rounds\n"
        "of fp16: over mlx-lm's own batch, whose mask is an array; of no mask: over the same model and bytes "
        f"without one ({NO_MASK}), which takes sequences of equal lengths\n"
        "attn ms: of one step, alone: a token's keys and values written and attention, in all layers that keep "
        "the whole context, the graph built before; of SDPA: over mx.fast.scaled_dot_product_attention "
        "without a mask on the same tokens\n"
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


def _ratios(row: dict, plain: dict[tuple[str, int], dict]) -> dict:
    """Return how much faster than both baselines of this batch, as far as they ran."""

    def over(name: str, key: str) -> float | None:
        base = plain.get((name, row["batch"]), {}).get(key)
        return row[key] / base if base and row[key] else None

    attention = over(NO_MASK, "attention_ms")
    return {
        "baseline_ratio": over(BASELINE, "tokens_per_second"),
        "no_mask_ratio": over(NO_MASK, "tokens_per_second"),
        "sdpa_ratio": 1 / attention if attention else None,
    }


def _preset(
    it: Subject, name: str, sizes: tuple[int, ...], length: int, tokens: int, rounds: int
) -> Iterator[dict]:
    """Yield a row for each batch when it is measured. All sequences of a batch are copies of one."""
    try:
        with it.attached(BASELINE if name == NO_MASK else name):
            mx.random.seed(0)
            one = make_prompt_cache(it.model)
            fill_directly(one, it, length)
            for batch in sizes:
                mx.clear_cache()
                caches = []
                for layer in one:
                    many = _repeated if name == NO_MASK else _merged
                    caches.append(many(layer, batch))
                    mx.eval(caches[-1].state)  # layer by layer: frees the copies at once
                by = it.decoded_by(BASELINE if name == NO_MASK else name)
                row = {"preset": name, "by": by, "batch": batch}
                yield row | measure(it, caches, batch, tokens, rounds)
                del caches
    finally:
        mx.clear_cache()


def _merged(cache, batch: int):
    if not hasattr(cache, "merge"):
        raise UserError(
            f"[bench] this model reads one sequence at a time under such a preset; got a batch of {batch}; choose one "
            "preset for all layers"
        )
    return cache.merge([cache] * batch)


def _repeated(cache, batch: int):
    """mlx-lm's cache of one sequence with `batch` of them side by side, all as long: it needs no mask."""
    out = copy(cache)
    out.keys, out.values = (mx.repeat(x, batch, axis=0) for x in (cache.keys, cache.values))
    return out


def attention_seconds(it: Subject, caches: list, batch: int) -> float | None:
    """Measure one step, in all layers that keep the whole context: a token's keys and values are written, then
    attention, layer by layer. Building the graph is left out. None where there is no such layer."""
    shapes = layers_of(it.model)  # several to a cache where a layer has several
    pairs = zip(caches, shapes, strict=True) if len(caches) == len(shapes) else ()
    own = [(c, s) for c, s in pairs if s.kind == "full"]
    new = [
        [mx.random.normal((batch, count, 1, dims), it.dtype) for count, dims in sizes]
        for sizes in (
            ((s.queries, s.key_dim), (s.kv_heads, s.key_dim), (s.kv_heads, s.value_dim))
            for _, s in own
        )
    ]

    def step() -> list[mx.array]:
        mask, out = own[0][0].make_mask(1, return_array=False, window_size=None), []
        for (cache, shape), (queries, *pair) in zip(own, new, strict=True):
            if out:  # as in a model: layers do not overlap
                queries = mx.depends(queries, out[-1:])
            keys, values = cache.update_and_fetch(*pair)
            scale = shape.key_dim**-0.5
            if isinstance(keys, View):
                out.append(attend(queries, keys, scale, mask))
            else:
                more = {"cache": cache, "scale": scale, "mask": mask}
                out.append(scaled_dot_product_attention(queries, keys, values, **more))
        return out

    mx.eval(new)
    return seconds_to_run(step, ATTENTIONS) if own else None


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
        peak, attention = mx.get_peak_memory(), attention_seconds(it, caches, batch)
    ours = [cache for cache in caches if isinstance(cache, BatchedKVCache)]
    speed, held = median(speeds), sum(cache.nbytes for cache in caches)
    return {
        "together": all(cache.together for cache in ours) if ours and batch > 1 else None,
        "tokens_per_second": speed,
        "spread": spread(speeds),
        "step_ms": 1e3 * batch / speed,
        "kv_bytes": held,
        "sequence_bytes": held // batch,
        "peak_bytes": peak,
        "attention_ms": attention and 1e3 * attention,
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
        ratio_text(row["no_mask_ratio"]),
        f"{100 * row['spread']:.0f} %",
        f"{row['step_ms']:.2f}",
        f"{row['attention_ms']:.2f}" if row["attention_ms"] else "-",
        ratio_text(row["sdpa_ratio"]),
        console.human_bytes(row["kv_bytes"]),
        console.human_bytes(row["sequence_bytes"]),
    )
    print(line, flush=True)


def _fits(rows: list[dict], room: int) -> dict[str, int]:
    """Sequences that fit into `room` bytes, by preset, from the largest batch."""
    largest = {row["preset"]: row for row in sorted(rows, key=lambda row: row["batch"])}
    return {name: max(0, room // row["sequence_bytes"]) for name, row in largest.items()}
