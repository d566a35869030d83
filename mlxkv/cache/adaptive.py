"""`AdaptiveKVCache`: a compressed cache that observes queries, for the uses in `mlxkv.formats.rules.observing`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxkv.cache import choose
from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.backends import masked, scorer
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Codes, Records, codes_of, moved
from mlxkv.cache.view import CodePages, Pair, Parts, RecordPages, View
from mlxkv.codec.codec import Codec, Stored
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Transform
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES
from mlxkv.formats.rules.observing import BLOCK, POOL, Observing
from mlxkv.formats.rules.runs import Runs
from mlxkv.metal import launch
from mlxkv.metal.launch import KernelBuilder
from mlxkv.metal.whiten import RIDGE, TINY, orthonormal, whiten, why_not

# -- Bases of low rank that follow the text, by Oja's rule. Spec: `spec.oja`.
#
# U: [B, G, D, R] float32, orthonormal columns. A kernel factorises on a GPU; MLX does so only on the
# CPU, where it takes tens of milliseconds a layer.

BATCH = 32  # batches are padded to a multiple of it, since each length needs a kernel


def update(
    u: mx.array, x: mx.array, rate: float, raw: bool = False, builder: KernelBuilder | None = None
) -> mx.array:
    """Return U updated by a batch x [B, G, N, D]; U is unchanged if the batch contains NaN or infinity.

    builder: builds the kernel of `metal.whiten`, which must support this size (`why_not`); None: plain ops.
    """
    if builder is not None and not raw:
        return _updated(u, x.astype(mx.float32), rate, builder)
    with mx.stream(mx.cpu):
        x = x.astype(mx.float32)
        y = x @ u
        step = (x - y @ u.swapaxes(-1, -2)).swapaxes(-1, -2) @ y
        if not raw:
            moment = y.swapaxes(-1, -2) @ y
            mean = mx.diagonal(moment, axis1=-2, axis2=-1).mean(-1)[..., None, None]
            moment = moment + (RIDGE * mean + TINY) * mx.eye(u.shape[-1])
            # LAPACK fails on NaN: replace such moments.
            sound = mx.isfinite(moment).all((-1, -2), keepdims=True)
            moment = mx.where(sound, moment, mx.eye(u.shape[-1]))
            step = mx.linalg.solve(moment, step.swapaxes(-1, -2)).swapaxes(-1, -2)
        stepped = u + rate * step
        sound = mx.isfinite(stepped).all((-1, -2), keepdims=True)
        return mx.where(sound, orthonormal(mx.where(sound, stepped, u)), u)


def _updated(u: mx.array, x: mx.array, rate: float, builder: KernelBuilder) -> mx.array:
    """Compute `update` by the kernel: y^T y + r I = L L^T, and y (y^T y + r I)^-1 = (y L^-T) L^-1."""
    x = mx.pad(x, [(0, 0), (0, 0), (0, -x.shape[-2] % BATCH), (0, 0)])  # zeros change nothing
    y, count = x @ u, x.shape[-2]
    residual = x - y @ u.swapaxes(-1, -2)
    whitened = whiten(y, builder, RIDGE)
    step = residual.swapaxes(-1, -2) @ (
        whitened[..., :count, :] @ whitened[..., count:, :].swapaxes(-1, -2)
    )
    stepped = u + rate * step
    sound = mx.isfinite(stepped).all((-1, -2), keepdims=True)
    return mx.where(sound, whiten(mx.where(sound, stepped, u), builder), u)


def next_basis(
    basis: LayerMaps, config: CacheConfig, batch: Pair, prompt: bool, heads: tuple[int, int]
) -> LayerMaps:
    """Return `basis` updated by a batch of keys and values [B, G, N, D].

    prompt: whether the batch is from a prompt, not decoded. heads: (B, G).
    """
    bases, todo = {}, []
    for name, x in zip(("keys", "values"), batch, strict=True):
        side = getattr(config, name)
        if side.low is not None and (rate := side.low.rate(prompt)):
            todo.append((name, per_head(getattr(basis, name), heads), x, rate, side.low.raw))
    if len(todo) == 2 and _alike(*todo):  # one kernel for both costs no more than for one
        (keys, *first), (values, *second) = todo
        u, x = (mx.concatenate([*pair]) for pair in zip(first[:2], second[:2], strict=True))
        bases[keys], bases[values] = mx.split(_update(u, x, *first[2:]), 2)
    else:
        bases |= {name: _update(*update) for name, *update in todo}
    return replace(basis, **{n: transform_of(u) for n, u in bases.items()}) if bases else basis


def _alike(a: tuple, b: tuple) -> bool:
    return a[1].shape == b[1].shape and a[2].shape == b[2].shape and a[3:] == b[3:]


def _update(u: mx.array, x: mx.array, rate: float, raw: bool) -> mx.array:
    """Compute `update`, by kernels if they run."""
    builder, (dims, rank) = launch.kernel_builder(), u.shape[-2:]
    return update(u, x, rate, raw, None if why_not(dims, rank, builder) else builder)


def per_head(transform: Transform, heads: tuple[int, int]) -> mx.array:
    """Return U of a transform, broadcast to (B, G)."""
    down = transform.down
    return mx.broadcast_to(down, (*heads, *down.shape[-2:]))


def transform_of(u: mx.array) -> Transform:
    return Transform(u, u.swapaxes(-1, -2))


# -- `Segments`: quantized pages in runs, each with one basis, for caches whose basis follows the text.
#
# Each run is a separate store, not a slice of one array: kernels read the records of a second run from the start of its
# buffer, and MLX would copy a slice.


def _merged(run: Codes | Records, following: Codes | Records) -> dict:
    """Return the joint state of two runs, the first transported into the basis of `following`."""
    if not run.count:
        return following.state
    if (
        isinstance(run, Records)
        and isinstance(following, Records)
        and run.layout.quantized_by_kernel
    ):
        records = run.transported(following.codecs)
        return _joined(records, following.state) if following.count else records
    first = transported(run, following.codecs)
    if not following.count:
        return first
    codes = codes_of(following)
    return {name: _joined(first[name], codes[name]) for name in NAMES}


def transported(run: Codes | Records, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """Return the codes of a run, re-encoded in the bases of `codecs`. Spec: `spec.oja.transported`."""
    out = {}
    if not run.count:
        return out
    stored = codes_of(run)
    for name, old, new in zip(NAMES, run.codecs, codecs, strict=True):
        if old.transform is new.transform:
            out[name] = stored[name]
            continue
        values = old.decode_stored(stored[name], mx.float32)
        out[name] = new.method.encode(new.quantizer, moved(values, old, new), new.page)
    return out


def _joined(first: Stored, second: Stored) -> Stored:
    return {k: mx.concatenate([x, second[k]], axis=2) for k, x in first.items()}


def _rows(x: mx.array, at: mx.array, units: int) -> mx.array:
    """Return the rows of x [B, G, rows, W] that belong to units `at` [B, G, N] out of `units`."""
    batch, heads, rows, width = x.shape
    size = rows // units
    x = x.reshape(batch, heads, units, size * width)
    return mx.take_along_axis(x, at[..., None], axis=2).reshape(batch, heads, -1, width)


class Segments(Runs):
    _codes, _merged = staticmethod(codes_of), staticmethod(_merged)

    def __deepcopy__(self, memo):
        segments = copy(self)
        segments.runs, segments.bases = deepcopy(self.runs, memo), list(self.bases)
        return segments

    @property
    def dims(self) -> tuple[int, int]:
        return self.runs[0].dims

    def read_all(self) -> Parts | CodePages | RecordPages | None:
        """Return a snapshot of all pages, or None for none."""
        parts = [run.read_all() for run in self.runs if run.count]
        return Parts(tuple(parts)) if len(parts) > 1 else next(iter(parts), None)

    def _parts(self, snapshots: Sequence[CodePages | RecordPages]) -> Parts:
        return Parts(tuple(snapshots))

    def _selected(
        self, codes: dict[str, Stored], begin: int, positions: mx.array, count: int
    ) -> tuple[dict[str, Stored], int]:
        first = mx.broadcast_to(mx.arange(begin), (*positions.shape[:2], begin))
        at = mx.concatenate([first, begin + positions], axis=2)
        rows = {n: {k: _rows(x, at, count) for k, x in codes[n].items()} for n in NAMES}
        return rows, at.shape[2]

    def _counts(self, counts: list[int]) -> mx.array:
        return mx.array(counts, mx.int32)


# -- importance: the attention of a prompt's last queries to each token selects the tokens that update a basis (OjaKV,
# section 5.2) and those that are kept (SnapKV). Spec: `spec.oja`


def importance(
    queries: mx.array, view: View, scale: float, mask: mx.array | None = None
) -> mx.array:
    """Return [B, G, T] float32: softmax scores summed over queries and over the query heads of a kv head.

    queries: of the last tokens, [B, H, w, D]. mask: for these queries; None: causal.
    """
    batch, heads, new, dims = queries.shape
    kv_heads, total = view.recent[0].shape[1], view.tokens
    if mask is None:
        mask = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None]
    q = (queries.astype(mx.float32) * scale).reshape(batch, kv_heads, -1, new, dims)
    out, score = mx.array(0.0), scorer(view)
    for start in range(0, new, BLOCK):  # in blocks, to bound the memory of scores
        part = slice(start, min(start + BLOCK, new))
        s = score(q[..., part, :].flatten(2, 3)).reshape(batch, heads, -1, total)
        rows = mask[..., part, :] if mask.shape[-2] > 1 else mask
        p = mx.softmax(masked(s, rows), axis=-1, precise=True)
        out = out + p.reshape(batch, kv_heads, -1, total).sum(2)
    return out


def salient(importance: mx.array, count: int) -> mx.array:
    """Return positions [B, count], ascending, of the tokens of highest importance [B, G, T], summed over heads."""
    return mx.sort(_largest(importance.sum(1), count), axis=-1)


def taken(x: mx.array, at: mx.array) -> mx.array:
    """Gather tokens `at` [B, N] of x [B, G, T, D]: [B, G, N, D]."""
    return mx.take_along_axis(x, at[:, None, :, None], axis=2)


def votes(importance: mx.array, pool: int = POOL) -> mx.array:
    """Return the largest importance among `pool` neighbours, [B, G, T]."""
    radius = pool // 2
    padded = mx.pad(importance, [(0, 0), (0, 0), (radius, radius)], constant_values=-mx.inf)
    total = importance.shape[-1]
    out = importance
    for shift in range(pool):
        out = mx.maximum(out, padded[..., shift : shift + total])
    return out


def kept(votes: mx.array, count: int) -> mx.array:
    """Return positions [B, G, count], ascending, of the largest votes [B, G, T]."""
    return mx.sort(_largest(votes, count), axis=-1)


def kept_pages(votes: mx.array, page: int, count: int) -> mx.array:
    """Return pages [B, G, count], ascending, the same for all kv heads, by the votes of all their tokens."""
    batch, heads, total = votes.shape
    by_page = votes.reshape(batch, heads, total // page, page).sum((1, 3))
    pages = mx.sort(_largest(by_page, count), axis=-1)
    return mx.broadcast_to(pages[:, None], (batch, heads, count))


def _largest(x: mx.array, count: int) -> mx.array:
    """Return positions of the `count` largest values; ties prefer the earlier (the sort is stable)."""
    return mx.argsort(-x, axis=-1)[..., :count]


class AdaptiveKVCache(Observing, CompressedKVCache):
    """A CompressedKVCache for a `config` that needs queries."""

    observes_queries, shares_buffers = True, False
    importance, salient, taken = (
        staticmethod(importance),
        staticmethod(salient),
        staticmethod(taken),
    )
    votes, kept, kept_pages = staticmethod(votes), staticmethod(kept), staticmethod(kept_pages)

    def _new_store(self, pair: Pair):
        plan = self.plan((pair[0].shape[3], pair[1].shape[3]), pair[0].dtype)
        make = partial(choose.store, plan)
        online = self.config.online
        return Segments(make, self.layer_maps, self.basis, self.config.page, online)

    # -- reading and writing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        self._quantize_rest()
        if keys.shape[2] <= DECODE_TOKENS:
            self._before_decoding(keys.shape[2])
            return super().update_and_fetch(keys, values)
        new = self._behind_recent(keys, values)
        self._recent, self._count = new, new[0].shape[2]
        self.offset += keys.shape[2]
        self._since = 0
        pages = self.store and self.store.read_all()
        view = View(new, self.sink, pages, plain=pages is None, observer=self._attended)
        self._pending, self._chunk = view, keys.shape[2]
        return view, view

    def _attended(self, queries: mx.array, out: mx.array, scale: float, mask) -> mx.array:
        """Observe the queries [B, H, L, D] of the last chunk; called by attention.

        Returns `out`, made dependent on the arrays that this changes.
        """
        array = isinstance(mask, mx.array)
        if not self._observe(queries, scale, lambda n: mask[..., -n:, :] if array else None):
            return out
        return mx.depends(out, list(self.arrays()))

    def _next_basis(self, batch: Pair, prompt: bool) -> LayerMaps:
        heads = batch[0].shape[0], batch[0].shape[1]
        return next_basis(self.basis, self.config, batch, prompt, heads)

    def view(self) -> View:
        """Return what attention reads, without appending anything."""
        return self.keys_and_values()[0]

    # -- the rest of mlx-lm's contract

    def is_trimmable(self) -> bool:
        """Return False if tokens of a prompt are dropped or moved after prefill, since hosts may trim into it later."""
        return self.config.keep == 1 and not self.config.pinned

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        moved = self.dropped or self.pinned
        if not moved or (window_size is None and not return_array):
            return super().make_mask(N, return_array, window_size)
        if window_size is not None:
            raise UserError(
                "[--kv] token selection and pinned tokens need layers that see the whole context; got a "
                f"mask with a window of {window_size}; choose a preset without +keep and +pinned"
            )
        return super().make_mask(N, return_array, window_size)

    def arrays(self) -> tuple[mx.array, ...]:
        return (*super().arrays(), *self._own_arrays())
