"""Plan the memory of a model from its config.json: its layers and the size of its weights, without reading them, and
the most bits a value that fit."""

from __future__ import annotations

from pathlib import Path

from mlxkv import untrusted
from mlxkv.catalog import folder
from mlxkv.catalog.aliases import CONFIGS, HUB, OUTLINES, QUANTIZATION, resolve
from mlxkv.catalog.folder import SMALL
from mlxkv.catalog.gguf.config import memory
from mlxkv.catalog.gguf.header import is_gguf
from mlxkv.catalog.hub import cached, locate
from mlxkv.catalog.option_checks import fitting_sizes
from mlxkv.catalog.shapes import (
    LAYERS,
    LayerShape,
    check_numbers,
    context_limit,
    estimated_layers,
    estimated_sizes,
)
from mlxkv.catalog.sizes import ModelPlan, need
from mlxkv.console import human_bytes, parse_tokens, user_path
from mlxkv.errors import UserError, brief
from mlxkv.formats import agreement
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.machine import USABLE, machine_memory
from mlxkv.untrusted import Unsound

DEFAULT_CONTEXT = "32k"
Outline = tuple[list[LayerShape], int, int]  # layers, bytes of weights, working bytes per token


def read_plan(model: str) -> ModelPlan:
    """Find config.json and the size of the weights: in that file itself, a local folder, the hub's cache, the known
    shapes of aliases, or the hub."""
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
        if where != "--model":  # a folder was named, and not this file
            raise UserError(
                f"[{where}] config.json is missing; got {str(path.parent)!r}; choose a model folder in the hub's format"
            ) from None
        raise UserError(f"[{where}] no such file; got {str(path)!r}") from None
    except Unsound as error:
        raise UserError(f"[{where}] {str(path)!r} {error}") from None
    return data


def fitting(
    model: str, kv: object, memory: str | int | None, context: str | int | None
) -> tuple[str, str]:
    """Return the preset with the most bits with which a model and a context fit into a memory, and the line about it.

    kv: what is asked for, a share. memory: bytes, or 12GB; this machine's if None. context: tokens, or 64k;
    DEFAULT_CONTEXT or the model's if None. Raises UserError, also if nothing fits."""
    total, asked = fitting_sizes(kv, memory, context)
    total, plan = total or machine_memory(), read_plan(model)
    usual = parse_tokens(DEFAULT_CONTEXT, "--context")
    tokens = asked or min(usual, plan.limit or usual)
    check_context(plan, tokens)
    usable = int(USABLE * total)
    preset, line = most(model, plan, tokens, usable)
    if (least := need(plan, parse_kv(preset), tokens).total) > usable:
        raise UserError(
            f"[--memory] {plan.name} and {tokens:,} tokens do not fit; got {human_bytes(total)}, of which 75 % are "
            f"counted as usable; {preset} needs {human_bytes(least)}: choose a shorter --context or a smaller model"
        )
    return preset, f"{kv}: {line} into {human_bytes(total)} with {tokens:,} tokens"


def check_context(plan: ModelPlan, tokens: int) -> None:
    """Raise UserError for a context that the model was not made for."""
    if plan.limit and tokens > plan.limit:
        raise UserError(
            f"[--context] longer than the model's context; got {tokens}; {plan.name} takes {plan.limit}"
        )


def most(model: str, plan: ModelPlan, tokens: int, usable: int) -> tuple[str, str]:
    """Return the preset with the most bits that fits, or the smallest, and what is known of its share."""
    order = [*agreement.DIAL, "fp16"]
    fits = [x for x in order if need(plan, parse_kv(x), tokens).total <= usable]
    name = fits[-1] if fits else order[0]
    line = f"{name} is the most that fits" if fits else f"nothing fits, {name} is the smallest"
    mark, digest = marks(model)
    if name != "fp16" and mark and (cost := agreement.cost_of(mark, digest, name)) is not None:
        least = "" if cost.preset == name else "at least "
        line += f"; it keeps {least}{agreement.percent(cost.mean)} % of next tokens at {agreement.short(cost.context)}"
    return name, line


def marks(model: str) -> tuple[str | None, str | None]:
    """Return the fingerprint of a model that is here, and the digest of its calibration."""
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
