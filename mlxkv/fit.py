"""`mlxkv fit`: what a model and a context need in memory, from config.json alone.

Estimates, stated as such: `mlxkv chat --json` measures. Counted are the weights, the cache and the
transients of the prefill (the working memory of one chunk, and one layer's keys and values in 16 bits
over the whole context: a compressed cache decodes them, a plain one copies them when it grows).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlxkv.config import CacheConfig, parse_kv
from mlxkv.console import human_bytes, parse_size, parse_tokens, print_json, print_table
from mlxkv.errors import UserError
from mlxkv.presets import PRESETS
from mlxkv.shapes import LayerShape, activation_bytes, context_limit, layers_of, weight_bytes

DEFAULT_PRESETS = ("fp16", "int8", "int4", "int3", "int2")
DEFAULT_CONTEXT = "32k"
CHUNK = 2048
# macOS lets the GPU wire about three quarters of the memory; the rest is the system's.
USABLE = 0.75
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Plan:
    """A model as `fit` sees it."""

    name: str
    config: dict
    layers: list[LayerShape]
    weights: int
    weights_source: str

    @property
    def limit(self) -> int:
        return context_limit(self.config) or 0


@dataclass(frozen=True)
class Need:
    """Bytes at one context with one preset. dropped: by token selection, once the prompt is read."""

    weights: int
    cache: int
    transient: int
    values: int
    dropped: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.transient + self.dropped


def layer_bytes(layer: LayerShape, kv: CacheConfig, tokens: int) -> float:
    """Stored bytes of one layer's cache, full-precision windows and bases that follow the text
    included. With token selection: of a prompt, once it is read."""
    compressed = kv.compresses and layer.kind == "full"
    if not compressed or kv.why_not(layer.key_dim, layer.value_dim):
        return 2 * layer.values(tokens)
    pages = max(0, tokens - kv.sink - kv.recent) // kv.page
    packed = layer.values(pages * kv.page) * kv.bits_per_value(layer.key_dim, layer.value_dim) / 8
    bases = kv.basis_bytes(layer.kv_heads, layer.key_dim, layer.value_dim) if pages else 0
    return packed + 2 * layer.values(tokens - pages * kv.page) + bases


def need(plan: Plan, kv: CacheConfig, tokens: int) -> Need:
    """What `tokens` tokens need."""
    cache = sum(layer_bytes(layer, kv, tokens) for layer in plan.layers)
    whole = sum(layer_bytes(layer, replace(kv, keep=1.0), tokens) for layer in plan.layers)
    one_layer = max((2 * layer.values(tokens) for layer in plan.layers), default=0)
    transient = activation_bytes(plan.config, min(CHUNK, tokens)) + one_layer
    values = sum(layer.values(tokens) for layer in plan.layers)
    return Need(plan.weights, int(cache), transient, values, int(whole - cache))


def longest(plan: Plan, kv: CacheConfig, usable: int) -> int:
    """The longest context that fits, at most the model's limit; 0 when nothing does."""
    low, high = 0, plan.limit or MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if need(plan, kv, middle).total <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def read_plan(model: str, config: str | None) -> Plan:
    """Finds config.json and the weights' size: a file, a local folder, the hub's cache or the hub."""
    if config is not None:
        data = _read_config(Path(config).expanduser(), "--config")
        return _plan(str(config), data, None)
    from mlxkv.locate import locate

    place = locate(model)
    data = _read_config(place.config, f"--model {model}")
    return _plan(place.name, data, place.weights)


def _plan(name: str, config: dict, weights: int | None) -> Plan:
    source = "from the files" if weights else "estimated from config.json"
    return Plan(name, config, layers_of(config), weights or weight_bytes(config), source)


def _read_config(path: Path, where: str) -> dict:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"[{where}] no such file; got {str(path)!r}") from None
    except OSError as error:
        raise UserError(f"[{where}] cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"[{where}] {str(path)!r} is not JSON") from None
    if not isinstance(data, dict):
        raise UserError(f"[{where}] {str(path)!r} is not the config of a model")
    return data


def machine_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run(
    model: str,
    config: str | None,
    context: str | None,
    memory: str | None,
    kv: list[str],
    as_json: bool,
) -> None:
    """The command."""
    tokens = parse_tokens(context or DEFAULT_CONTEXT, "--context")
    total = parse_size(memory, "--memory") if memory else machine_memory()
    chosen = {name: parse_kv(name) for name in (kv or DEFAULT_PRESETS)}
    plan = read_plan(model, config)
    if context is None and plan.limit:
        tokens = min(tokens, plan.limit)
    if plan.limit and tokens > plan.limit:
        raise UserError(
            f"[--context] longer than the model's context; got {tokens}; {plan.name} takes {plan.limit}"
        )
    usable = int(USABLE * total)
    rows = [_row(plan, name, cache, tokens, usable) for name, cache in chosen.items()]
    data = {
        "model": plan.name,
        "context": tokens,
        "memory_bytes": total,
        "usable_bytes": usable,
        "weights_bytes": plan.weights,
        "weights_source": plan.weights_source,
        "transient_bytes": rows[0]["transient_bytes"],
        "context_limit": plan.limit or None,
        "layers": _layer_counts(plan),
        "presets": rows,
    }
    _show(plan, data, sys.stderr if as_json else sys.stdout)
    if as_json:
        print_json(data)
        return
    print_table(
        ["preset", "bits/value", "cache", "in all", "fits", "longest context"],
        [
            [
                row["preset"],
                f"{row['bits_per_value']:.2f}",
                human_bytes(row["kv_bytes"]),
                human_bytes(row["total_bytes"]),
                "yes" if row["fits"] else "no",
                row["longest_context"] or "none",
            ]
            for row in rows
        ],
    )


def _row(plan: Plan, name: str, kv: CacheConfig, tokens: int, usable: int) -> dict:
    needed = need(plan, kv, tokens)
    return {
        "preset": name,
        "bits_per_value": round(8 * needed.cache / needed.values, 3) if needed.values else 0.0,
        "kv_bytes": needed.cache,
        "transient_bytes": needed.transient,
        "dropped_bytes": needed.dropped,
        "total_bytes": needed.total,
        "fits": needed.total <= usable,
        "longest_context": longest(plan, kv, usable),
    }


def _layer_counts(plan: Plan) -> list[dict]:
    """Layers of the same shape together, in the order in which they first appear."""
    counts: dict[LayerShape, int] = {}
    for layer in plan.layers:
        counts[layer] = counts.get(layer, 0) + 1
    return [{"count": count, **vars(layer)} for layer, count in counts.items()]


def _show(plan: Plan, data: dict, file) -> None:
    """The lines above the table."""
    texts = {
        "full": "keep the whole context",
        "sliding": "keep the last {window} tokens, never compressed",
        "latent": "keep a latent vector per token (MLA), never compressed",
        "state": "keep a state of fixed size, not counted",
    }
    print(plan.name, file=file)
    for group in data["layers"]:
        heads = f": {group['kv_heads']} kv heads x {group['key_dim']}" if group["kv_heads"] else ""
        text = texts[group["kind"]].format(**group)
        print(f"  {group['count']} layers {text}{heads}", file=file)
    print(
        f"  weights {human_bytes(plan.weights)}, {plan.weights_source}\n"
        f"  prefill transients {human_bytes(data['transient_bytes'])}, estimated\n"
        f"  memory {human_bytes(data['memory_bytes'])}, "
        f"of which {human_bytes(data['usable_bytes'])} counted as usable (75 %)\n"
        f"  context {data['context']} tokens of {plan.limit or 'unknown'}",
        file=file,
    )
    for kv in (row["preset"] for row in data["presets"]):
        reasons = {
            parse_kv(kv).why_not(layer.key_dim, layer.value_dim)
            for layer in plan.layers
            if layer.kind == "full"
        }
        for reason in filter(None, reasons):
            print(f"  {kv}: some layers stay in 16 bits ({reason})", file=file)
        for note in _notes(parse_kv(kv)):
            print(f"  {kv}: {note}", file=file)


def _notes(kv: CacheConfig) -> Iterator[str]:
    if any(side.low and side.low.energy for side in (kv.keys, kv.values)):
        yield "a calibration says how many dims that energy takes; counted are all of them"
    if kv.keep < 1:
        yield 'the cache once the prompt is read; until then all its tokens, which are "in all"'


assert set(DEFAULT_PRESETS) <= set(PRESETS)
