"""Rebind the attention function in mlx-lm's model files, and count users to undo it exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_cache

from mlxkv.cache.attention import attend
from mlxkv.cache.view import View
from mlxkv.errors import UserError
from mlxkv.models.hooks.probe import Handle, files_of
from mlxkv.models.hooks.taps import LatentObserver, ObservedView

NAME = "scaled_dot_product_attention"
CALL = "__call__"
MARK = "_mlxkv_attachment"  # the attribute of an attached model

Slot = tuple[str, str]  # module name, attribute, of a class in it where there is a dot


@dataclass
class _Bound:
    before: Callable  # what the attribute was
    now: Callable
    users: int


_bound: dict[Slot, _Bound] = {}


def bind(model: nn.Module) -> list[Slot]:
    """Route attention over our views to `attend` in every file of `model`; other calls are unchanged.

    Returns the slots to `release` later.
    """
    files = files_of(model)
    slots = [(file.__name__, NAME) for file in files if callable(getattr(file, NAME, None))]
    own = [(f"mlx_lm.models.{family}", name) for family, name in OWN_CODE]
    there = {file.__name__ for file in files}
    slots += [slot for slot in own if slot[0] in there and slot not in slots]
    return take([*slots, *_call_of(model)])


def _call_of(model: nn.Module) -> list[Slot]:
    """The slot of the model's own call; none for a class that its module does not name."""
    cls = next(cls for cls in type(model).__mro__ if CALL in vars(cls))
    named = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return [(cls.__module__, f"{cls.__name__}.{CALL}")] if named and cls is not nn.Module else []


def call_before(model: nn.Module) -> Callable | None:
    """The call of the model's class as it was before `bind`; None where `bind` leaves it as it is."""
    return next((_bound[slot].before for slot in _call_of(model)), None)


def take(slots: list[Slot]) -> list[Slot]:
    """Count one more user of each slot; the first one rebinds it. Returns the slots."""
    for slot in slots:
        if slot in _bound:
            _bound[slot].users += 1
            continue
        owner, name = _place(slot)
        before = getattr(owner, name)
        _bound[slot] = _Bound(before, _wrap(slot)(before), 1)
        setattr(owner, name, _bound[slot].now)
    return slots


def _wrap(slot: Slot) -> Callable:
    """Return what the attribute is wrapped by."""
    package, _, family = slot[0].rpartition(".")
    if package == "mlx_lm.models" and (family, slot[1]) in OWN_CODE:
        return OWN_CODE[family, slot[1]]
    return through if slot[1] == NAME else stepped


def release(slots: list[Slot]) -> None:
    """Undo one `bind`. The last user of a slot restores it."""
    for slot in slots:
        bound = _bound[slot]
        bound.users -= 1
        if bound.users:
            continue
        del _bound[slot]
        owner, name = _place(slot)
        if getattr(owner, name, None) is bound.now:  # else patched by somebody since: theirs stays
            setattr(owner, name, bound.before)


def _place(slot: Slot) -> tuple[ModuleType | type, str]:
    """The module or class, and the attribute."""
    inside, _, name = slot[1].rpartition(".")
    file = sys.modules[slot[0]]
    return (getattr(file, inside) if inside else file), name


def stepped(original):
    """Wrap `original`, the call of a class of models: a decode step of a model that is attached is replayed
    where it can be (`models.compiled`)."""

    @wraps(original)
    def __call__(self, *args, **kwargs):
        attachment = vars(self).get(MARK)
        if attachment is None:
            return original(self, *args, **kwargs)
        with attachment.steps.lock:  # while one thread traces, the weights are its placeholders
            if (step := _step_of(*args, **kwargs)) is not None:
                out = attachment.steps(self, original, *step)
                if out is not None:
                    return out
            return original(self, *args, **kwargs)

    return __call__


def _step_of(
    inputs=None, cache=None, *others, inputs_embeds=None, logits_to_keep=None, **more
) -> tuple | None:
    """Tokens and caches of a call that gives nothing else; None for other calls. mlx-vlm says that there are
    no embeddings, and that it wants the logits of one token, of which there is one."""
    if inputs is None or cache is None or others or more or inputs_embeds is not None:
        return None
    if logits_to_keep and inputs.shape[-1] != 1:
        return None
    return inputs, cache


def through(original):
    """Wrap `original`: calls over our views and handles go to our attention."""

    @wraps(original)
    def scaled_dot_product_attention(queries, keys, values, *args, **kwargs):
        if isinstance(keys, ObservedView):
            return keys.attended(queries, values, *args, **kwargs)
        if isinstance(keys, View):
            return _attend(queries, keys, *args, **kwargs)
        if type(keys) is Handle:
            return keys.attended(queries, values, _has_sinks(*args, **kwargs))
        if isinstance(cache := _first(kwargs.get("cache")), LatentObserver):
            cache.on_queries(queries, kwargs["scale"])
        return original(queries, keys, values, *args, **kwargs)

    return scaled_dot_product_attention


def _first(cache):
    """The cache, or the first one in a list of caches."""
    return cache.caches[0] if isinstance(cache, mlx_cache.CacheList) else cache


def _has_sinks(cache=None, scale: float = 1.0, mask=None, sinks=None) -> bool:
    """Return whether a call has attention sinks; the parameters are the rest of mlx-lm's signature."""
    return sinks is not None


def _attend(queries, view, cache=None, scale: float = 1.0, mask=None, sinks=None) -> mx.array:
    """Attention with mlx-lm's signature without values; `cache` is not used, the view holds all."""
    return attend(queries, view, scale, mask, sinks)


# -- Families whose files compute attention by code of their own: what is rebound in them, so that the code meets our
# views.
#
# A view in which nothing is sealed gives its arrays to the family's own code: results stay equal, bit for bit.

Wrap = Callable[[Callable], Callable]


def is_plain(view: View) -> bool:
    """Return whether nothing is sealed, so that its arrays are those of a plain cache, and nobody observes it."""
    return isinstance(view, View) and view.plain and not isinstance(view, ObservedView)


# -- mx functions of a file (plamo, plamo2)


@dataclass(frozen=True)
class Tiled:
    """What `mx.tile(keys, [1, count, 1, 1])` returns for a view or a handle: query head h reads kv head
    h % G, where a view's query heads of one kv head stand side by side."""

    held: View | Handle
    count: int

    def attended(
        self,
        attention: Callable,
        queries,
        values: Tiled,
        cache=None,
        scale=1.0,
        mask=None,
        sinks=None,
    ) -> mx.array:
        """queries: [B, H, L, D] -> [B, H, L, Dv]. attention: over views."""
        view, rest = self.held, {"scale": scale, "mask": mask, "sinks": sinks}
        if type(view) is not Handle and is_plain(view):
            arrays = (mx.tile(x, (1, self.count, 1, 1)) for x in view.live)
            return mx.fast.scaled_dot_product_attention(queries, *arrays, **rest)
        out = attention(_regrouped(queries, self.count), view, values.held, **rest)
        return _regrouped(out, out.shape[1] // self.count)


def _regrouped(x: mx.array, count: int) -> mx.array:
    """[B, count * n, L, D]: head i n + j goes to j count + i."""
    batch, heads, new, dims = x.shape
    return x.reshape(batch, count, heads // count, new, dims).swapaxes(1, 2).reshape(x.shape)


class _Functions(ModuleType):
    """`mlx.core`, or `mlx.core.fast`, with some functions in place of its own."""

    def __init__(self, of: ModuleType, **own):
        super().__init__(of.__name__, of.__doc__)
        vars(self).update(own, _of=of)

    def __getattr__(self, name: str):
        return getattr(vars(self)["_of"], name)


def functions(through: Wrap) -> Wrap:
    """Wrap a file's `mx`: attention over our views goes `through`, and views can be tiled."""

    def wrap(original: ModuleType) -> ModuleType:
        attention = through(original.fast.scaled_dot_product_attention)

        def scaled_dot_product_attention(queries, keys, values, **rest):
            if isinstance(keys, Tiled):
                return keys.attended(attention, queries, values, **rest)
            return attention(queries, keys, values, **rest)

        def tile(x, reps, **rest):
            if not isinstance(x, (View, Handle)):
                return original.tile(x, reps, **rest)
            if len(reps) != 4 or [*reps[:1], *reps[2:]] != [1, 1, 1]:
                raise UserError(f"[attach] compressed keys are tiled along heads alone; got {reps}")
            return Tiled(x, reps[1])

        fast = _Functions(original.fast, scaled_dot_product_attention=scaled_dot_product_attention)
        return _Functions(original, fast=fast, tile=tile)

    return wrap


def tiled(through: Wrap) -> Wrap:
    """Wrap a file's `scaled_dot_product_attention`, which is also given what `tile` returned."""

    def wrap(original: Callable) -> Callable:
        attention = through(original)

        @wraps(original)
        def scaled_dot_product_attention(queries, keys, values, *args, **kwargs):
            if isinstance(keys, Tiled):
                return keys.attended(attention, queries, values, *args, **kwargs)
            return attention(queries, keys, values, *args, **kwargs)

        return scaled_dot_product_attention

    return wrap


# -- capped scores (gear, gemma2)


def capped(original: Callable) -> Callable:
    """Wrap gear's attention with capped scores."""

    @wraps(original)
    def _softcap_attention(queries, keys, values, scale, softcap, mask):
        if not isinstance(keys, (View, Handle)):
            return original(queries, keys, values, scale, softcap, mask)
        if is_plain(keys):
            return original(queries, *keys.live, scale, softcap, mask)
        return _capped(queries, keys, scale, mask, softcap)

    return _softcap_attention


def gemma2(original: Callable) -> Callable:
    """Wrap gemma2's attention, which is one method: over our caches it goes on here behind the projections
    and the positions."""

    @wraps(original)
    def __call__(self, x, mask=None, cache=None):
        if not type(cache).__module__.startswith("mlxkv."):
            return original(self, x, mask, cache)
        offset = cache.offset
        q, k, v = (
            linear(x).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
            for linear, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        q, k = (self.rope(one, offset=offset) for one in (q, k))
        view, values = cache.update_and_fetch(k, v)
        if not isinstance(view, (View, Handle)):  # of a cache that hands keys back
            return original(self, x, mask, _Updated(offset, (view, values)))
        if is_plain(view):
            return original(self, x, mask, _Updated(offset, view.live))
        out = _capped(q, view, self.scale, mask, self.attn_logit_softcapping)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    return __call__


@dataclass(frozen=True)
class _Updated:
    """Stands for a cache that has been updated already. offset: before that. pair: all keys and values."""

    offset: int
    pair: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.pair


def _capped(queries, keys: View | Handle, scale, mask, softcap: float) -> mx.array:
    if type(keys) is Handle:
        return keys.attended(queries, keys, softcap=softcap)
    if isinstance(keys, ObservedView):
        return keys.attended(queries, keys, scale=scale, mask=mask, softcap=softcap)
    return attend(queries, keys, scale, mask, softcap=softcap)


# -- block-sparse attention (phi3small)


def block_sparse(original: Callable) -> Callable:
    """Wrap the block-sparse attention of phi3small: its mask of blocks, of each query head, goes to our
    attention as an additive one."""

    @wraps(original)
    def _block_sparse_attention(self, queries, keys, values, scale, mask):
        if type(keys) is Handle:
            return keys.attended(queries, values)
        if not isinstance(keys, View):
            return original(self, queries, keys, values, scale, mask)
        if is_plain(keys):
            return original(self, queries, *keys.live, scale, mask)
        heads, new = queries.shape[1:3]
        if not keys.batched:
            seen = _blocks(self, heads, new, keys.shape[2], mask)
            if isinstance(keys, ObservedView):
                return keys.attended(queries, keys, scale=scale, mask=seen)
            return attend(queries, keys, scale, seen)
        rows = []
        for i, row in enumerate(keys.rows):
            one, n = (None, 0) if row is None else (row[0], new if row[1] is None else row[1])
            if not n:
                rows.append(mx.zeros((1, heads, new, keys.tokens)))
                continue
            part = mask
            if mask is not None:
                part = mask[min(i, mask.shape[0] - 1)][None, :, :n, : one.tokens]
            seen = _blocks(self, heads, n, one.tokens, part)
            room = (0, new - n), (0, keys.tokens - one.tokens)
            rows.append(mx.pad(seen, [(0, 0), (0, 0), *room]))
        return attend(queries, keys, scale, mx.concatenate(rows))

    return _block_sparse_attention


def _blocks(layer, heads: int, new: int, total: int, mask: mx.array | None) -> mx.array:
    """Return what the layer adds to scores: [1, H, L, T] float32."""
    _, dense = layer._block_sparse_mask(new, total)
    added = mx.where(dense, 0.0, -mx.inf).reshape(1, heads, new, total)
    return added if mask is None else added + mask.astype(mx.float32)


# (Family, attribute): what is rebound besides in families whose files have attention code of their own.
OWN_CODE: dict[tuple[str, str], Callable] = {
    ("gear", "_softcap_attention"): capped,
    ("gemma2", f"Attention.{CALL}"): gemma2,
    ("phi3small", "Attention._block_sparse_attention"): block_sparse,
    ("plamo", "mx"): functions(through),
    ("plamo", NAME): tiled(through),
    ("plamo2", "mx"): functions(through),
}
