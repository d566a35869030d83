"""Build a model of mlx-lm from config.json alone: shapes and sizes, with no weights computed.

MLX is lazy: an unread parameter has a shape but no memory. Dry runs happen inside a trace, where MLX refuses to
compute anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from fnmatch import fnmatch
from io import StringIO
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlxkv.catalog.shapes import LayerShape, check_names, text_config, working_bytes
from mlxkv.errors import brief
from mlxkv.patching import mlx_lm_compat
from mlxkv.patching.cache_shapes import layers_of
from mlxkv.patching.record import PROMPT, record
from mlxkv.patching.trees import flat, own_caches
from mlxkv.untrusted import Unsound

MODULES = 1 << 15  # most modules of a model; the largest models have some thousands
# How mlx-lm reads names of foreign quantisations: bits, group size, mode.
METHODS = {"mxfp4": (4, 32, "mxfp4"), "mxfp8": (8, 32, "mxfp8"), "modelopt": (4, 16, "nvfp4")}
PACKED = {"nvfp4-pack-quantized": (4, 16, "nvfp4"), "mxfp4-pack-quantized": (4, 32, "mxfp4")}
PACKED |= {"pack-quantized": (4, 32, "affine")}
T = TypeVar("T")


class NotBuilt(Exception):
    """The reason why mlx-lm builds no model from a config.json."""


def outline(config: dict) -> tuple[list[LayerShape], int, int]:
    """Return the cache shapes, the bytes of the stored weights and the working bytes per prefill token of the model of
    `config`, built without weights. Raises NotBuilt if mlx-lm cannot build it, Unsound for sizes that no model
    has."""
    try:
        model = build(config)
        dtype = str(text_config(config).get("dtype") or text_config(config).get("torch_dtype"))
        model.set_dtype(mx.float32 if dtype == "float32" else mx.bfloat16)
        layers, widths = _traced(model, lambda: (layers_of(model), _widths(model)))
        quantise(model, config)
        weights = sum(x.nbytes for _, x in flat(model.parameters()))
    except (NotBuilt, Unsound):
        raise
    except Exception as error:  # any kind: keys are missing or inconsistent
        raise NotBuilt(f"{type(error).__name__}: {brief(error)[:80]}") from error
    heads = [2 * x.key_dim * (x.queries + x.kv_heads) for x in layers]
    return layers, weights, working_bytes(widths[0], max(heads, default=0), max(widths))


def classes_of(config: dict) -> tuple[type, type]:
    """Return the classes that mlx-lm chooses for a model and its arguments. Raises NotBuilt."""
    kind = str(config.get("model_type"))[:40]
    try:
        with redirect_stdout(StringIO()):
            return mlx_lm_compat.model_classes(config)
    except ValueError:
        raise NotBuilt(f"mlx-lm knows no model of type {kind!r}") from None
    except (Exception, SystemExit) as error:  # a file whose package is missing exits Python
        raise NotBuilt(f"mlx-lm's {kind} cannot be used here ({type(error).__name__})") from None


def build(config: dict) -> nn.Module:
    """Return the model of `config` with MLX's initial weights, uncomputed. Raises NotBuilt, Unsound, and mlx-lm's
    errors."""
    check_names(text_config(config))
    model_class, args_class = classes_of(config)
    tied = text_config(config).get("tie_word_embeddings", True)
    count = 0

    def made() -> None:
        nonlocal count
        count += 1
        if count > MODULES:
            raise NotBuilt(f"more than {MODULES} modules")

    with mlx_lm_compat.count_modules(made):
        model = model_class(args_class.from_dict(config))
    for module in model.modules():
        # Families without this argument tie weights if a file has no head; transformers ties by default.
        args = getattr(module, "args", None)
        asks = args is not None and not hasattr(args, "tie_word_embeddings")
        if asks and tied and "lm_head" in module and hasattr(module, "sanitize"):
            module.sanitize({})
    model.eval()
    return model


def quantise(model: nn.Module, config: dict) -> None:
    """Quantise `model` as mlx-lm does for this config.json; leave it unchanged if that names no quantisation."""
    values = _quantisation(config)
    if values is None:
        return
    model_predicate = getattr(model, "quant_predicate", None)
    exempt = [
        str(name) for name in values.get("modules_to_not_convert") or values.get("ignore") or ()
    ]

    def predicate(path: str, module: nn.Module) -> bool | dict:
        if path in values:
            return values[path]
        if not hasattr(module, "to_quantized") or module["weight"].shape[-1] % values["group_size"]:
            return False
        if any(name in path or fnmatch(path, f"*{name}*") for name in exempt):
            return False
        return True if model_predicate is None else model_predicate(path, module)

    nn.quantize(
        model, values["group_size"], values["bits"], mode=values["mode"], class_predicate=predicate
    )


def _quantisation(config: dict) -> dict[str, Any] | None:
    """Return the `quantization` that mlx-lm reads from a config.json; None if it decodes the weights to 16 bits."""
    if isinstance(values := config.get("quantization"), dict):
        return {"mode": "affine", **values}
    values = config.get("quantization_config", text_config(config).get("quantization_config"))
    if not isinstance(values, dict):
        return None
    method = values.get("quant_method")
    if method is None and "bits" in values:  # a copy of `quantization`
        return {"mode": "affine", **values}
    if method in ("awq", "gptq"):
        scheme = values.get("bits", 4), values.get("group_size", 128), "affine"
    else:
        scheme = METHODS.get(str(method)) or PACKED.get(str(values.get("format")))
    if scheme is None:
        return None
    bits, group, mode = scheme
    return {**values, "bits": bits, "group_size": group, "mode": mode}


def _traced(model: nn.Module, run: Callable[[], T]) -> T:
    """Call `run` with `model` inside an MLX trace, in which no value that depends on a weight can be computed, and
    return its result."""
    out, faults = [], []

    def body() -> mx.array:
        try:
            out.append(run())
        except Exception as error:  # MLX restores weights only if no error is raised
            faults.append(error)
        return mx.zeros(())

    mx.compile(body, inputs=model.state)()
    if faults:
        raise faults[0]
    return out[0]


def _widths(model: nn.Module) -> list[int]:
    """Return the input width of each linear map, in call order; an estimate if the model's code fails halfway
    (`layers_of` reports that)."""
    calls = record(model, own_caches(model), calls=[]).calls
    return [x.size // PROMPT for _, x, _ in calls] or [0]
