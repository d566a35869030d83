"""`mlxkv fit`: estimate the memory of a model and a context, from config.json alone.

mlx-lm's own model is built from it, without weights, to count its parameters and caches; for an alias, that is stored
(`catalog/known.json`). The sum includes the weights, the bytes that caches have allocated once the context is read,
fixed-size states and the transients of the prefill: working memory of one chunk, the chunk in sliding windows, and one
layer's keys and values in 16 bits over the whole context. A compressed cache decodes these, a plain one copies them
when it grows; from latents, mlx-lm's code also expands the keys and values of every head. `mlxkv chat --json` measures.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mlxkv import untrusted
from mlxkv.catalog import folder
from mlxkv.catalog.aliases import CONFIGS, HUB, OUTLINES, QUANTIZATION, resolve
from mlxkv.catalog.folder import SMALL
from mlxkv.catalog.gguf.config import memory
from mlxkv.catalog.gguf.header import is_gguf
from mlxkv.catalog.shapes import (
    LAYERS,
    LayerShape,
    check_numbers,
    context_limit,
    estimated_layers,
    estimated_sizes,
)
from mlxkv.catalog.sizes import MOST_TOKENS, ModelPlan, longest, need, why_16_bits
from mlxkv.console import (
    human_bytes,
    parse_size,
    parse_tokens,
    plain,
    print_json,
    print_table,
    user_path,
    working,
)
from mlxkv.errors import UserError, brief
from mlxkv.formats import agreement
from mlxkv.formats.calibration import artifact
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import PICKS, bound_of, canonical, parse_kv
from mlxkv.machine import USABLE, machine_memory
from mlxkv.untrusted import Unsound

DEFAULT_CONTEXT = "32k"
Outline = tuple[list[LayerShape], int, int]  # layers, bytes of weights, working bytes per token


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
    if plan.limit and tokens > plan.limit:
        raise UserError(
            f"[--context] longer than the model's context; got {tokens}; {plan.name} takes {plan.limit}"
        )
    usable, said = int(USABLE * total), []
    for share in shares:
        turned = memory is not None and context is not None
        name, line = _most(model, plan, tokens, usable) if turned else _kept(model, share)
        presets[name] = parse_kv(name)
        said.append(f"{share}: {line}" if turned else line)
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
    _show(plan, data, sys.stderr if as_json else sys.stdout)
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
        print(line)


def _kept(model: str, share: str) -> tuple[str, str]:
    """Return the preset that was chosen for a model and a share, and the line about it. Raises UserError."""
    bound = bound_of(share)
    mark, digest = _known(model)
    choice = agreement.find(mark, bound, digest) if mark and bound else None
    if choice is None:
        raise UserError(
            f"[--kv] {share} is chosen when a model is read, and was not yet; got {plain(model)}; "
            f"mlxkv chat -m {plain(model)} --kv {share} does it, or choose a number of bits"
        )
    return choice.preset, choice.line


def _most(model: str, plan: ModelPlan, tokens: int, usable: int) -> tuple[str, str]:
    """Return the preset with the most bits that fits, or the smallest, and what is known of its share."""
    order = [*agreement.DIAL, "fp16"]
    fitting = [x for x in order if need(plan, parse_kv(x), tokens).total <= usable]
    name = fitting[-1] if fitting else order[0]
    line = f"{name} is the most that fits" if fitting else f"nothing fits, {name} is the smallest"
    mark, digest = _known(model)
    if name != "fp16" and mark and (cost := agreement.cost_of(mark, digest, name)) is not None:
        least = "" if cost.preset == name else "at least "
        line += f"; it keeps {least}{100 * cost.mean:.1f} % of next tokens"
    return name, line


def _known(model: str) -> tuple[str | None, str | None]:
    """Return the fingerprint of a model that is here, and the digest of its calibration."""
    from mlxkv.catalog.hub import cached

    try:
        source = resolve(model)
        place = cached(source.repo) if source.folder is None else None
        at = place.config.parent if place else source.folder
        found = folder.check_folder(at) if at and at.exists() else None
    except UserError:
        found = None
    if found is None:
        return None, None
    mark = folder.fingerprint(found)
    calibration = artifact.find(mark, found.path)
    return mark, calibration and calibration.digest


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
    large = []

    def fitting() -> Iterator[list]:
        for alias, plan in plans.items():
            contexts = reach(plan).values()
            if any(contexts):
                about = [alias, human_bytes(plan.weights), plan.limit]
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
        print(f"too large: {', '.join(large)}")
    print("any other model: mlxkv fit --model OWNER/NAME, or a config.json")


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


def _show(plan: ModelPlan, data: dict, file) -> None:
    """Print the lines above the table."""
    texts = {
        "full": "keep the whole context",
        "sliding": "keep the last {window} tokens, never compressed",
        "latent": "keep a latent of {key_dim} and a rotary key of {value_dim} per token (MLA)",
        "chunked": "keep a chunk of at most {window} tokens, never compressed",
        "index": "keep a key of a sparse index per token, never compressed",
        "own": "keep {key_dim} numbers per token and {size} in all, never compressed",
        "state": "keep a state of fixed size, {size} in all",
    }
    print(plain(plan.name), file=file)
    for group in data["layers"]:
        has_heads = group["kind"] not in ("latent", "own", "state")
        heads = f": {group['kv_heads']} kv heads x {group['key_dim']}" if has_heads else ""
        size = human_bytes(group["count"] * group["state"])
        text = texts[group["kind"]].format(**group, size=size)
        print(f"  {group['count']} layers {text}{heads}", file=file)
    print(
        f"  weights {human_bytes(plan.weights)}, {plan.weights_source}\n"
        f'  about {human_bytes(data["transient_bytes"])} more while a prompt is read (counted in "in all")\n'
        f"  memory {human_bytes(data['memory_bytes'])}, "
        f"of which {human_bytes(data['usable_bytes'])} counted as usable (75 %)\n"
        f"  context {data['context']} tokens of {plan.limit or 'unknown'}",
        file=file,
    )
    if plan.estimate:
        print(
            f"  an estimate: mlx-lm makes no model of this here ({plan.estimate}); every layer is taken to keep "
            "the whole context",
            file=file,
        )
    for kv in (row["preset"] for row in data["presets"]):
        reasons = {why_16_bits(layer, parse_kv(kv)) for layer in plan.layers}
        for reason in filter(None, reasons):
            print(f"  {kv}: some layers stay in 16 bits ({reason})", file=file)
        for note in _notes(parse_kv(kv)):
            print(f"  {kv}: {note}", file=file)


def _notes(kv: CacheConfig) -> Iterator[str]:
    if any(side.low and side.low.energy for side in (kv.keys, kv.values)):
        yield "counts all dims; a calibration says how many that energy takes"
    if kv.keep < 1:
        yield 'allocated: after the prompt is read; "in all" counts all its tokens, which stay until then'


# -- facts of a model: its config.json, mlx-lm's model of it, and the size of its weights


def read_plan(model: str) -> ModelPlan:
    """Find config.json and the size of the weights: in that file itself, a local folder, the hub's cache, the known
    shapes of aliases, or the hub."""
    from mlxkv.catalog.hub import cached, locate

    alias = model.strip()
    if alias.endswith(".json"):
        return plan_of(_read_config(user_path(alias, "--model"), "--model"), alias)
    weights_here = alias in HUB and (resolve(alias).folder or cached(HUB[alias]))
    if alias in HUB and not weights_here:
        data = {"quantization": QUANTIZATION} | CONFIGS[alias]
        more = "as published (not downloaded)"
        return plan_of(data, HUB[alias], more=more, known=known_outline(alias, data))
    place = locate(model)
    if is_gguf(place.config):
        file = folder.check_folder(place.config)
        size, data = memory(file.headers[0]), file.config
    else:
        size, data = place.weights, _read_config(place.config, f"--model {model}")
    return plan_of(data, place.name, size, known=known_outline(alias, data) if size else None)


def known_outline(alias: str, config: dict) -> Outline | None:
    """Return the outline that is stored for an alias, or None: no alias, or a config of other sizes."""
    if alias not in HUB or any(config.get(key) != x for key, x in CONFIGS[alias].items()):
        return None
    kept = OUTLINES[alias]
    layers = (
        LayerShape(**{key: x for key, x in group.items() if key != "count"})
        for group in kept["layers"]
        for _ in range(group["count"])
    )
    return list(layers), kept["weights"], kept["working"]


def plan_of(
    config: dict,
    name: str = "",
    weights: int | None = None,
    more: str = "",
    known: Outline | None = None,
) -> ModelPlan:
    """Return the plan of a config.json. weights: bytes of the files, None if there are none. more: text on the source
    of a computed size. known: the outline, built if None. Raises UserError for sizes that no model has."""
    from mlxkv.metal import launch

    (layers, size, working), estimate = (known, "") if known else _outline(config, name)
    source = f"computed from config.json {more}".strip()
    if estimate:
        source = "estimated from config.json"
    if weights:
        size, source = weights, "from the files"
    limit, has_kernels = context_limit(config) or 0, launch.kernel_builder() is not None
    return ModelPlan(name, layers, size, source, limit, working, estimate, has_kernels)


def _outline(config: dict, name: str) -> tuple[Outline, str]:
    """Return the outline by mlx-lm's model and "", or an estimate and why."""
    from mlxkv.loading.outline import NotBuilt, outline

    try:
        return outline(config), ""
    except Unsound as error:
        raise UserError(f"[config.json] {error}; got {name}") from None
    except NotBuilt as error:
        return _estimate(config, name), str(error)


def _estimate(config: dict, name: str) -> Outline:
    """Return an outline with weights of 16 bits, or as quantised. Raises UserError."""
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    try:
        bits = quantization.get("bits")
        stored_bits = bits + 32 / (quantization.get("group_size") or 64) if bits else 16
        count, working = estimated_sizes(config)
        return estimated_layers(config), int(count * stored_bits / 8), working
    except UserError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(
            f"[config.json] sizes that do not fit together ({brief(error)}); got {name}"
        ) from None


def _read_config(path: Path, where: str) -> dict:
    try:
        data = untrusted.read_json(path, SMALL, infinity=True)
        if not isinstance(data, dict):
            raise Unsound("is not the config of a model")
        check_numbers(data, LAYERS)
    except FileNotFoundError:
        raise UserError(f"[{where}] no such file; got {str(path)!r}") from None
    except Unsound as error:
        raise UserError(f"[{where}] {str(path)!r} {error}") from None
    return data
