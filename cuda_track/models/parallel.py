"""Models that transformers has spread over several processes by kv heads (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from mlxkv.errors import UserError


@dataclass(frozen=True)
class Share:
    """The kv heads of this process: the `rank`-th of `size` equal shares."""

    rank: int = 0
    size: int = 1


def share_of(model: PreTrainedModel) -> Share:
    """Return the share of this process; the whole of a model in one process."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        return Share()
    mesh = model._device_mesh
    assert mesh is not None  # of a model in several processes
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return Share(mesh.get_local_rank(), size)


def insist_on_one(model: PreTrainedModel, command: str, action: str) -> None:
    """Raise UserError for a model in several processes."""
    if (size := share_of(model).size) > 1:
        raise UserError(
            f"[{command}] {action} in one process only; got a model spread over {size}; load it "
            "without tp_size"
        )
