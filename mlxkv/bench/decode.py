"""`mlxkv bench decode`: a whole model in mlx-lm's own loop, in this process, per preset and context."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median, mode
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import console
from mlxkv.bench import options, steps
from mlxkv.bench.options import BASELINE, MLX_LM, cache_config
from mlxkv.bench.subject import Subject, load_subject, short
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import canonical
from mlxkv.generate.generation import PREFILL_STEP
from mlxkv.machine import machine, versions
from mlxkv.metal import gpu
from mlxkv.metal.launch import device_type
from mlxkv.metal.timing import interleaved
from mlxkv.patching.cache_shapes import layers_of

WARM = 4  # tokens decoded before the clock starts
DIRECT_ABOVE, DIRECT_ABOVE_CPU = 32768, 1024  # longer contexts are filled without a prefill
CONTEXTS, CONTEXTS_CPU = "4k,32k,128k", "1k,4k"
NUMBERS = (
    "prefill_seconds",
    "prefill_tokens_per_second",
    "first_token_seconds",
    "tokens_per_second",
    "token_ms",
    "peak_bytes",
    "kv_bytes",
    *steps.NUMBERS,
)
COLUMNS = (
    ("context", "context", ""),
    ("preset", "preset", ""),
    ("by", "by", ""),
    ("filled by", "fill", ""),
    ("first token s", "first_token_seconds", ".3f"),
    ("prefill tok/s", "prefill_tokens_per_second", ".0f"),
    ("decode tok/s", "tokens_per_second", ".1f"),
    ("of fp16", "baseline_ratio", ".2f"),
    ("spread", "spread", ""),
    ("token ms", "token_ms", ".2f"),
    ("peak", "peak_bytes", ""),
    ("cache", "kv_bytes", ""),
)


def run_decode(
    model: str,
    contexts: str | None,
    kv: str,
    tokens: int,
    rounds: int,
    bits: int | None,
    as_json: bool,
) -> None:
    """Measure and print. contexts, kv: by commas. rounds: each runs every preset twice, A B B A."""
    presets = _presets(kv)
    contexts = contexts or (CONTEXTS_CPU if device_type() == "cpu" else CONTEXTS)
    lengths = options.parse_contexts(contexts, 2)
    for name, number in (("tokens", tokens), ("rounds", rounds)):
        if number < 1:
            raise UserError(f"[--{name}] must be at least 1; got {number}; choose a larger one")
    if bits is not None and bits not in options.BITS:
        choices = ", ".join(map(str, options.BITS))
        raise UserError(f"[--bits] unknown value; got {bits}; choose from {choices}")
    computer, installed = machine() | gpu.device(), versions()
    subject = load_subject(model, bits)
    options.print_machine(computer, installed)
    rows = []
    runs = len(presets) * (2 * rounds + 1)
    begun = f"{runs} runs at {contexts} tokens"
    with console.progress(f"bench of {model}", runs * sum(lengths), begun) as count:
        for context in lengths:
            rows += _rows(
                subject,
                context,
                presets,
                fill=_fill_of(subject.model, context),
                tokens=tokens,
                rounds=rounds,
                done=partial(count, context),
            )
    about = {
        "model": model,
        "weights": subject.weights,
        "bits": bits,
        "dtype": short(subject.dtype),
    }
    rows = [about | row for row in rows]
    _show(rows, tokens, rounds)
    if as_json:
        console.print_json({"machine": computer, "versions": installed, "rows": rows})


def _presets(text: str) -> list[str]:
    """'fp16, int4' -> ["fp16", "int4"], each once. Raises UserError for an unknown preset."""
    words = (name.strip() for name in text.split(","))
    others = (options.REPLAYED, options.PAGED, *MLX_LM)
    names = list(dict.fromkeys(name if name in others else canonical(name) for name in words))
    for name in names:
        cache_config(name)
    return names


def _fill_of(model: nn.Module, context: int) -> str:
    """Return "direct" for long contexts, where all caches hold keys and values; else "prefill"."""
    if context <= (DIRECT_ABOVE_CPU if device_type() == "cpu" else DIRECT_ABOVE):
        return "prefill"
    shapes = layers_of(model)
    pairs = all(s.kind in ("full", "sliding") for s in shapes)
    return "direct" if pairs and len(shapes) == len(make_prompt_cache(model)) else "prefill"


def _rows(
    subject: Subject,
    context: int,
    presets: list[str],
    *,
    fill: str,
    tokens: int,
    rounds: int,
    done: Callable[[], None],
) -> list[dict]:
    """Return one row per preset: medians over interleaved runs, after a warm-up run of each."""
    for name in presets:  # one token; all if an online basis builds kernels
        measure(subject, name, context, fill, tokens if cache_config(name).is_online else 1, 1)
        done()
    tasks = {
        name: lambda name=name: measure(subject, name, context, fill, tokens, tokens)
        for name in presets
    }
    rows = []
    for name, runs in interleaved(tasks, rounds, done).items():
        row = {"preset": name, "by": subject.decoded_by(name)}
        row |= {"context": context, "fill": fill, "runs": len(runs)} | medians(runs)
        row |= {name: mode(run[name] for run in runs) for name in ("waits", "step")}
        speeds = [run["tokens_per_second"] for run in runs]
        row["spread"] = (max(speeds) - min(speeds)) / median(speeds)
        rows.append(row)
    speeds = {row["preset"]: row["tokens_per_second"] for row in rows}
    for row in rows:
        base = speeds.get(BASELINE)
        row["baseline_ratio"] = row["tokens_per_second"] / base if base else None
    return rows


def medians(runs: list[dict]) -> dict:
    """Return the median of each of NUMBERS, bytes as integers; None if not measured."""
    out = {}
    for key in NUMBERS:
        values = [run[key] for run in runs if run[key] is not None]
        kind = int if key.endswith("bytes") else float
        out[key] = kind(median(values)) if values else None
    return out


def measure(
    subject: Subject, preset: str, context: int, fill: str, tokens: int, steps_apart: int = 0
) -> dict:
    """Fill a fresh cache with `context` tokens, decode WARM tokens, then time `tokens` more.

    preset: one of ours, or a name in MLX_LM: mlx-lm then quantises its own cache from the first token
    on. fill: "prefill" or "direct". steps_apart: further steps, whose parts are timed separately (`steps.parts`) and
    returned too. prefill_seconds: the prompt without its last token. first_token_seconds: until the first token. Both
    are None if the cache was filled directly.
    """
    bits = MLX_LM.get(preset)
    with subject.attached(BASELINE if bits else preset):
        cache = make_prompt_cache(subject.model)
        mx.random.seed(0)
        mx.clear_cache()
        mx.reset_peak_memory()
        prompt = subject.random_tokens(1 if fill == "direct" else context)
        mx.eval(prompt)
        if fill == "direct":
            fill_directly(cache, subject, context - 1)
            mx.clear_cache()
            mx.reset_peak_memory()
        settings: dict[str, Any] = {"max_tokens": WARM + tokens, "prefill_step_size": PREFILL_STEP}
        if bits:
            settings |= {"kv_bits": bits, "kv_group_size": options.MLX_LM_GROUP}
            settings["quantized_kv_start"] = 0
        read = []

        def progress(done: int, total: int) -> None:
            if 0 < done < total:
                read[:] = [time.perf_counter()]

        settings["prompt_progress_callback"] = progress
        with wired_limit(subject.model):  # as mlx-lm generates
            times = [time.perf_counter()]
            for pair in generate_step(prompt, subject.model, prompt_cache=cache, **settings):
                times.append(time.perf_counter())
                token, last = pair
        if not mx.isfinite(last.max()).item():  # one NaN in the logits makes all of them NaN
            raise MachineError(f"[bench] NaN or infinity in the logits with {preset}; no times")
        prefill = read[0] - times[0] if fill == "prefill" else None
        timed = times[WARM:]
        gaps = [b - a for a, b in zip(timed, timed[1:], strict=False)]
        row = {
            "prefill_seconds": prefill,
            "prefill_tokens_per_second": prefill and (context - 1) / prefill,
            "first_token_seconds": prefill and times[1] - times[0],
            "tokens_per_second": tokens / (timed[-1] - timed[0]),
            "token_ms": 1e3 * median(gaps),
            "peak_bytes": mx.get_peak_memory(),
            "kv_bytes": sum(layer.nbytes for layer in cache),
        }
        if not steps_apart:
            return row
        last_token = cast(int, token)  # which mlx-lm annotates as an array
        return row | steps.parts(subject.model, cache, last_token, steps_apart)


def fill_directly(cache: list, subject: Subject, tokens: int) -> None:
    """Put random keys and values of `tokens` tokens into every layer's cache, in chunks, as a prefill does."""
    for layer, shape in zip(cache, layers_of(subject.model), strict=True):
        for start in range(0, tokens, PREFILL_STEP):
            count = min(PREFILL_STEP, tokens - start)
            keys, values = (
                mx.random.normal((1, shape.kv_heads, count, dims), subject.dtype)
                for dims in (shape.key_dim, shape.value_dim)
            )
            layer.update_and_fetch(keys, values)
            mx.eval(layer.state)


def _show(rows: list[dict], tokens: int, rounds: int) -> None:
    first = rows[0]
    written = [
        row
        | {"spread": f"{100 * row['spread']:.0f} %"}
        | {name: console.human_bytes(row[name]) for name in ("peak_bytes", "kv_bytes")}
        for row in rows
    ]
    weights = "random weights" if first["weights"] == "random" else "weights as stored"
    weights += f" in {first['bits']} bits" if first["bits"] else ""
    options.print_rows(COLUMNS, written, f"{first['model']}, {weights}, {first['dtype']}")
    console.say(
        f"decode: {tokens} tokens after {WARM}, quantizing pages included; token ms: the median token; "
        f"both are medians of {2 * rounds} interleaved runs; spread: between these runs\n"
        f"first token: the prefill in chunks of {PREFILL_STEP}, and one token; direct: the cache is "
        "filled with random keys and values without a prefill, and the peak is of decoding alone\n"
        "peak: weights included; cache: allocated, rotating windows included"
    )
    steps.show(rows)
