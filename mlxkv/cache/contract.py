"""The parts of mlx-lm's, mlx-vlm's and Python's cache protocols that do not concern tokens: plain attention, `kv_bits`,
copies, pickles, prefix snapshots."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from inspect import currentframe
from types import MethodType
from typing import Any

import mlx.core as mx

from mlxkv.errors import UserError


def causal_mask(
    first: int | mx.array, new: int, width: int, window_size: int | None = None
) -> mx.array:
    """Return which of `width` columns each of `new` tokens sees, boolean [new, width].

    first: column of the first new token; [B, 1, 1, 1] for several sequences.
    """
    rows, columns = first + mx.arange(new)[:, None], mx.arange(width)
    mask = rows >= columns
    return mask if window_size is None else mask & (rows < columns + window_size)


class BatchMethod:
    """Descriptor of a class method that makes a batch. A cache that is not `batchable` lacks the attribute, which hosts
    test before they serve sequences together."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __get__(self, cache: Any, kind: type) -> MethodType:
        if cache is not None and not cache.batchable:
            raise AttributeError("sequences of this model are read one at a time")
        return MethodType(self._function, kind)


class Contract:
    """A mixin of caches. A subclass defines `__reduce__` by its state, since kernels cannot be pickled."""

    @property
    def bits(self):
        """Raise AttributeError: mlx-lm treats caches with this attribute as its own quantized ones.

        Raises UserError if mlx-lm's plain attention asks for it with one of our views: then the model is not patched,
        and would fail with a TypeError about arrays.
        """
        frame = currentframe()
        caller = frame and frame.f_back
        if (
            caller is not None
            and caller.f_code.co_name == "scaled_dot_product_attention"
            and not isinstance(caller.f_locals.get("keys"), mx.array)
        ):
            raise UserError(
                "[attach] only an attached model reads compressed caches; got one in a model that is "
                "not attached, or not any more; attach the model first, or make another cache"
            )
        raise AttributeError("bits")

    def to_quantized(self, group_size: int = 64, bits: int = 4):
        """Return self: mlx-lm's `kv_bits` quantizes full-precision caches, and this one is compressed."""
        warnings.warn(
            f"[attach] kv_bits has no effect on layers that are compressed already; got {bits}; "
            "choose their bits by attach(model, kv)",
            stacklevel=2,
        )
        return self

    def __deepcopy__(self, memo: dict[int, Any]):
        out = memo[id(self)] = object.__new__(type(self))
        vars(out).update(deepcopy(vars(self), memo))
        return out


class Snapshots:
    """A mixin of the cache of one sequence: mlx-vlm's prefix cache keeps its state, codes and windows
    (`prefix_cache_snapshot`, `prefix_cache_restore`), and its batches are made of it."""

    state: dict[str, Any]
    meta_state: str
    merge: Callable[[list[Any]], Any]

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        """Return a tree of arrays for `prefix_cache_restore`; they may be shared with this cache."""
        return {"state": self.state, "meta_state": self.meta_state}

    def prefix_cache_restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot. Supports objects made by `__new__`, as mlx-vlm makes them."""
        self.state = snapshot["state"]

    def prefix_cache_reserve(self, min_capacity_tokens: int) -> tuple[()]:
        """Return no arrays to evaluate: pages grow by a share, and windows are allocated with slack."""
        return ()

    def prefix_cache_merge(self, rows: list[Any], prefix_lens: list[int]) -> Any:
        """Merge caches of one sequence each into a batch; None unless all are compressed."""
        if not all(isinstance(row, Snapshots) for row in rows):
            return None
        return self.merge(rows)


def from_state(cls: Any, state: dict[str, Any], is_single: bool = False) -> Any:
    """Unpickle a cache of one sequence. is_single: whether it is not batchable."""
    out = cls.from_state(state)
    out.batchable = not is_single
    return out
