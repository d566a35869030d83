"""Find what `fit` has to know of a model: its config.json, what mlx-lm makes of it, and the size of its weights."""

from __future__ import annotations

from pathlib import Path

from mlxkv import untrusted
from mlxkv.console import user_path
from mlxkv.errors import UserError
from mlxkv.models.catalog import folder, known, numbers
from mlxkv.models.catalog.aliases import HUB, resolve
from mlxkv.models.catalog.folder import SMALL
from mlxkv.models.catalog.gguf.config import memory
from mlxkv.models.catalog.gguf.header import is_gguf
from mlxkv.models.catalog.shapes import context_limit, estimated_layers, estimated_sizes
from mlxkv.models.catalog.sizes import ModelPlan
from mlxkv.untrusted import Unsound


def read_plan(model: str) -> ModelPlan:
    """Finds config.json and the weights' size: that file itself, a local folder, the hub's cache, for an alias that
    is not there its known shape, or the hub."""
    from mlxkv.models.catalog.locate import cached, locate

    alias = model.strip()
    if alias.endswith(".json"):
        return plan_of(_read_config(user_path(alias, "--model"), "--model"), alias)
    weights_here = alias in HUB and (resolve(alias).folder or cached(HUB[alias]))
    if alias in HUB and alias in known.CONFIGS and not weights_here:
        data = {"quantization": known.QUANTIZATION} | known.CONFIGS[alias]
        return plan_of(data, HUB[alias], more="as published: it is not downloaded")
    place = locate(model)
    if is_gguf(place.config):
        file = folder.check(place.config)
        return plan_of(file.config, place.name, memory(file.headers[0]))
    data = _read_config(place.config, f"--model {model}")
    return plan_of(data, place.name, place.weights)


def plan_of(config: dict, name: str = "", weights: int | None = None, more: str = "") -> ModelPlan:
    """The plan of a config.json. weights: bytes of the files, None where there are none. more: what is said of where
    a computed size comes from. Raises UserError for sizes that no model has."""
    from mlxkv.models.loading.outline import NotBuilt, outline

    estimate, source = "", f"computed from config.json {more}".strip()
    try:
        made = outline(config)
        layers, size, working = made.layers, made.weights, made.working
    except Unsound as error:
        raise UserError(f"[config.json] {error}; got {name}") from None
    except NotBuilt as error:
        estimate, source = str(error), "estimated from config.json"
        layers, size, working = _estimate(config, name)
    if weights:
        size, source = weights, "from the files"
    return ModelPlan(name, layers, size, source, context_limit(config) or 0, working, estimate)


def _estimate(config: dict, name: str) -> tuple[list, int, int]:
    """Layers, bytes of weights in 16 bits or as quantised, and working bytes. Raises UserError."""
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
            f"[config.json] sizes that do not fit together ({error}); got {name}"
        ) from None


def _read_config(path: Path, where: str) -> dict:
    try:
        data = untrusted.read_json(path, SMALL, infinity=True)
        if not isinstance(data, dict):
            raise Unsound("is not the config of a model")
        numbers.check(data, numbers.LAYERS)
    except FileNotFoundError:
        raise UserError(f"[{where}] no such file; got {str(path)!r}") from None
    except Unsound as error:
        raise UserError(f"[{where}] {str(path)!r} {error}") from None
    return data
