"""`mlxkv fit`: estimate the memory of a model and a context, from config.json alone.

mlx-lm's own model is built from it, without weights, to count its parameters and caches; for an alias, that is stored
(`catalog/known.json`). The sum includes the weights, the bytes that caches have allocated once the context is read,
fixed-size states and the transients of the prefill: working memory of one chunk, the chunk in sliding windows, and one
layer's keys and values in 16 bits over the whole context. A compressed cache decodes these, a plain one copies them
when it grows; from latents, mlx-lm's code also expands the keys and values of every head. `mlxkv chat --json` measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from mlxkv.catalog.aliases import HUB
from mlxkv.catalog.sizes import (
    COMPRESSED,
    MOST_TOKENS,
    ModelPlan,
    longest,
    need,
    stored,
    why_16_bits,
)
from mlxkv.console import (
    human_bytes,
    note,
    parse_size,
    parse_tokens,
    plain,
    print_json,
    print_table,
    say,
    working,
)
from mlxkv.errors import UserError
from mlxkv.formats import agreement
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import PICKS, bound_of, canonical, parse_kv
from mlxkv.loading.plans import DEFAULT_CONTEXT, check_context, marks, most, read_plan
from mlxkv.machine import USABLE, machine_memory


def run_fit(
    *,
    model: str | None,
    context: str | None,
    memory: str | None,
    kv: list[str],
    as_json: bool,
    pack: bool = False,
) -> None:
    """Estimate and print. model: None for every alias. kv: names of presets, possibly
    comma-separated; empty for PICKS. pack: also the size of a pack of so many tokens."""
    tokens = parse_tokens(context or DEFAULT_CONTEXT, "--context")
    total = parse_size(memory, "--memory", "g") if memory else machine_memory()
    names = [canonical(name) for text in kv for name in text.split(",")]
    shares = [name for name in names if bound_of(name) is not None]
    presets = {name: parse_kv(name) for name in (names or PICKS) if name not in shares}
    if model is None:
        if shares:
            raise UserError(
                f"[--kv] a share of next tokens is of one model; got {shares[0]}; add --model NAME"
            )
        for option, given in (("--context", context), ("--pack", "it" if pack else None)):
            if given is not None:
                raise UserError(f"[{option}] is for one model; got {given}; add --model NAME")
        every_alias(presets, total, as_json)
        return
    plan = read_plan(model)
    if context is None and plan.limit:
        tokens = min(tokens, plan.limit)
    check_context(plan, tokens)
    usable, said = int(USABLE * total), []
    for share in shares:
        turned = memory is not None and context is not None
        name, line = most(model, plan, tokens, usable) if turned else _kept(model, share)
        presets[name] = parse_kv(name)
        said.append(f"{share} with --memory and --context: {line}" if turned else line)
    rows = [_row(plan, name, cache, tokens, usable) for name, cache in presets.items()]
    data = {
        "model": plan.name,
        "context": tokens,
        "memory_bytes": total,
        "usable_bytes": usable,
        "weights_bytes": plan.weights,
        "weights_source": plan.weights_source,
        "estimate": plan.estimate or None,
        "state_bytes": plan.state,
        "transient_bytes": rows[0]["transient_bytes"],
        "context_limit": plan.limit or None,
        "layers": _layer_counts(plan),
        "presets": rows,
    } | ({"chosen": said} if shares else {})
    _show(plan, data, note if as_json else say)
    if as_json:
        print_json(data)
        return
    print_table(
        [
            *("preset", "bits/value", *(["pack"] if pack else []), "allocated"),
            *("in all", "fits", "longest context"),
        ],
        [
            [
                row["preset"],
                f"{row['bits_per_value']:.2f}",
                *([human_bytes(row["kv_bytes"])] if pack else []),
                human_bytes(row["kv_bytes_allocated"]),
                human_bytes(row["total_bytes"]),
                "yes" if row["fits"] else "no",
                row["longest_context"] or "none",
            ]
            for row in rows
        ],
    )
    for line in said:
        say(line)


def _kept(model: str, share: str) -> tuple[str, str]:
    """Return the preset that was chosen for a model and a share, and the line about it. Raises UserError."""
    bound = bound_of(share)
    mark, digest = marks(model)
    choice = agreement.find(mark, bound, digest) if mark and bound else None
    if choice is None:
        raise UserError(
            f"[--kv] {share} is chosen when a model is read, and was not yet; got {plain(model)}; "
            f"mlxkv chat -m {plain(model)} --kv {share} does it, or choose a number of bits"
        )
    return choice.preset, choice.line


def every_alias(presets: dict[str, CacheConfig], total: int, as_json: bool) -> None:
    """Print which aliases fit into `total` bytes of memory, the largest first, and the longest context of each."""
    usable = int(USABLE * total)
    with working("sizing models"):
        plans = {alias: read_plan(alias) for alias in HUB}
    plans = dict(sorted(plans.items(), key=lambda item: -item[1].weights))

    def reach(plan: ModelPlan) -> dict[str, int]:
        return {name: longest(plan, cache, usable) for name, cache in presets.items()}

    if as_json:
        models = [
            {
                "model": alias,
                "weights_bytes": plan.weights,
                "context_limit": plan.limit,
                "longest_context": reach(plan),
            }
            for alias, plan in plans.items()
        ]
        print_json({"memory_bytes": total, "usable_bytes": usable, "models": models})
        return
    large, replaced = [], {}

    def fitting() -> Iterator[list]:
        for alias, plan in plans.items():
            contexts = reach(plan).values()
            if any(contexts):
                about = [alias, human_bytes(plan.weights), plan.limit]
                if others := _in_place(plan, presets):
                    replaced.setdefault(tuple(others), []).append(alias)
                yield about + [tokens or "none" for tokens in contexts]
            else:
                large.append(alias)

    sizes = [human_bytes(plan.weights) for plan in plans.values()]
    most = max(plan.limit or MOST_TOKENS for plan in plans.values())
    print_table(
        ["--model", "weights", "made for", *presets],
        fitting(),
        f"longest context in {human_bytes(total)}, of which {human_bytes(usable)} are counted as usable (75 %)",
        widest=[max(plans, key=len), max(sizes, key=len), *[most] * (1 + len(presets))],
    )
    if large:
        say(f"too large: {', '.join(large)}")
    for others, aliases in replaced.items():
        say(f"{', '.join(aliases)}: {'; '.join(others)}")
    say("any other model: mlxkv fit --model OWNER/NAME, or a config.json")


def _row(plan: ModelPlan, name: str, kv: CacheConfig, tokens: int, usable: int) -> dict:
    bytes_needed = need(plan, kv, tokens)
    return {
        "preset": name,
        "bits_per_value": round(8 * bytes_needed.in_use / bytes_needed.values, 3)
        if bytes_needed.values
        else 0.0,
        "kv_bytes": bytes_needed.in_use,
        "kv_bytes_allocated": bytes_needed.cache,
        "transient_bytes": bytes_needed.transient,
        "dropped_bytes": bytes_needed.dropped,
        "total_bytes": bytes_needed.total,
        "fits": bytes_needed.total <= usable,
        "longest_context": longest(plan, kv, usable),
    }


def _layer_counts(plan: ModelPlan) -> list[dict]:
    """Count layers of the same shape, in the order of their first layer."""
    return [
        {"count": count, **{name: x for name, x in vars(layer).items() if name != "index"}}
        for layer, count in Counter(plan.layers).items()
    ]


def _show(plan: ModelPlan, data: dict, write: Callable[[str], None]) -> None:
    """Write the lines above the table."""
    texts = {
        "full": "keep the whole context",
        "sliding": "keep the last {window} tokens, never compressed",
        "latent": "keep a latent of {key_dim} and a rotary key of {value_dim} per token (MLA)",
        "chunked": "keep a chunk of at most {window} tokens, never compressed",
        "index": "keep a key of a sparse index per token, never compressed",
        "own": "keep {key_dim} numbers per token and {size} in all, never compressed",
        "state": "keep a state of fixed size, {size} in all",
    }
    write(plain(plan.name))
    for group in data["layers"]:
        has_heads = group["kind"] not in ("latent", "own", "state")
        heads = f": {group['kv_heads']} kv heads x {group['key_dim']}" if has_heads else ""
        size = human_bytes(group["count"] * group["state"])
        text = texts[group["kind"]].format(**group, size=size)
        write(f"  {group['count']} layers {text}{heads}")
    write(
        f"  weights {human_bytes(plan.weights)}, {plan.weights_source}\n"
        f'  {human_bytes(data["transient_bytes"])} more while reading a prompt (counted in "in all")\n'
        f"  memory {human_bytes(data['memory_bytes'])}, "
        f"of which {human_bytes(data['usable_bytes'])} counted as usable (75 %)\n"
        f"  context {data['context']} tokens of {plan.limit or 'unknown'}"
    )
    if plan.estimate:
        write(
            f"  an estimate: mlx-lm makes no model of this here ({plan.estimate}); every layer is taken to keep "
            "the whole context"
        )
    presets = {row["preset"]: parse_kv(row["preset"]) for row in data["presets"]}
    for line in _in_place(plan, presets):
        write(f"  {line}, where mixed bits cannot be used")
    for kv in presets:
        reasons = {why_16_bits(layer, parse_kv(kv)) for layer in plan.layers}
        for reason in filter(None, reasons):
            write(f"  {kv}: some layers stay in 16 bits ({reason})")
        for remark in _notes(parse_kv(kv)):
            write(f"  {kv}: {remark}")


def _in_place(plan: ModelPlan, presets: dict[str, CacheConfig]) -> list[str]:
    """Return which presets are replaced by others in a model: "fill-4: int4 takes its place"."""
    layers = [layer for layer in plan.layers if layer.kind in COMPRESSED]
    others = {
        name: {stored(x, kv).label for x in layers} - {kv.label} for name, kv in presets.items()
    }
    return [f"{name}: {x} takes its place" for name, of in others.items() for x in sorted(of)]


def _notes(kv: CacheConfig) -> Iterator[str]:
    if any(side.low and side.low.energy for side in (kv.keys, kv.values)):
        yield "counts all dims; a calibration says how many that energy takes"
    if kv.keep < 1:
        yield 'allocated: after the prompt is read; "in all" counts all its tokens, which stay until then'
