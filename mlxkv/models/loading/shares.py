"""Give each of several processes its share of a model's weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from mlxkv.errors import UserError
from mlxkv.models.catalog.folder import Folder
from mlxkv.models.catalog.hub import first_line
from mlxkv.models.catalog.shapes import text_config


def check(model: nn.Module, folder: Folder, size: int) -> None:
    """Raises UserError for a model that cannot be spread over `size` processes."""
    kind, text = folder.config["model_type"], text_config(folder.config)
    if not hasattr(model, "shard"):
        raise UserError(
            f"[load] mlx-lm cannot spread this kind of model over processes; got a {kind} for {size} "
            "processes; choose a llama, qwen2, qwen3 or another that has `shard`, or one process"
        )
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or size
    if heads % size:
        raise UserError(
            f"[load] kv heads cannot be shared evenly; got {heads} of them in {folder.path} for {size} "
            "processes; choose a number that divides them"
        )


def take(model: nn.Module, folder: Folder, group: mx.distributed.Group) -> None:
    """Keep this process's share of the weights, and read them. Raises UserError."""
    try:
        model.shard(group)
    except ValueError as error:  # widths that do not divide, or groups of quantised weights
        raise UserError(
            f"[load] weights cannot be shared evenly ({first_line(error)}); got {folder.path} for "
            f"{group.size()} processes; choose another number of them"
        ) from None
    without_gradients(model)
    mx.eval(model.parameters())


class _Single:
    """A group of one process, for layers that sum nothing but gradients."""

    def size(self) -> int:
        return 1


def without_gradients(model: nn.Module) -> None:
    """Let layers that MLX spread over processes leave out what only their gradients need: a Python function
    for each of them in each step, five a layer of a llama, of 20 us on the host each."""
    for module in model.modules():
        if isinstance(module, (AllToShardedLinear, QuantizedAllToShardedLinear)):
            module.group = _Single()
