"""Decode attention by matrix tiles: one dispatch for rotation, attention, merging, un-rotation.

The body is text/attend/attend_tile.metal; the portable one of `attend` computes the same on any GPU.
Halves in, floats summed: for 16-bit model types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlxkv.codec.transform import Transform
from mlxkv.formats import levels
from mlxkv.formats.records import BLOCK, TOKENS, RecordLayout, SideLayout
from mlxkv.metal import gpu, trust
from mlxkv.metal.launch import Factory, build
from mlxkv.metal.lengths import Division, Known, Later, behind, division, own_starts
from mlxkv.metal.template import (
    LOG2E,
    Pair,
    cap_bits,
    fill_table,
    nothing,
    side_template,
)

SIMDGROUPS, SIMDGROUPS_CUDA = 8, 16  # of a threadgroup; Apple's registers are for 256 threads
ROWS = 8  # query rows of a threadgroup
SIMDGROUPS_WANTED = 2048  # in all: nearly 16 for each core of an H200
# Threadgroups wanted on Apple: by registers and threadgroup memory a core holds two or three of them.
PER_CORE = 2.5
# Loads of four floats that a lane starts at once when it merges splits: more do not fit in 128 registers.
AHEAD, AHEAD_CUDA = 8, 16
SOON, SOON_CUDA = 4, 8  # the same of blocks whose bits differ, before the first is used
MAX_DIMS, MAX_GROUPS, MAX_SPLITS = 256, 8, 128
RING_BYTES = 180 << 10  # of shared memory, which these generations of CUDA have
RING_MOST = 196 << 10  # with what a threadgroup has besides
RING_CAPABILITIES = (9, 10)
MOST_STAGES = 6
MASKS = {  # of codes in their slots, by bits; a sign is the highest bit of four
    0: (0, 0, 0, 0),  # of a table
    16: (0, 0, 0, 0),
    8: (0x00FF00FF, 0, 0, 0),
    4: (0x000F000F, 0x00F000F0, 0, 0),
    3: tuple(0x00030003 << 2 * p for p in range(4)),
    2: tuple(0x00030003 << 2 * p for p in range(4)),
}


def why_not(layout: RecordLayout, dims: int, dtype: mx.Dtype, make: Factory) -> str | None:
    """Return why the tile body does not read such records, or None. dims: head dim D."""
    if layout.values.channel:
        return "tiles read no scales per channel of values"
    if dtype not in (mx.float16, mx.bfloat16):
        return f"tiles are of 16-bit types, not {str(dtype).removeprefix('mlx.core.')}"
    if dims % 8:
        return f"a head dim of {dims} is no multiple of 8"
    if max(dims, layout.keys.dims, layout.values.dims) > MAX_DIMS:
        return f"tiles of more than {MAX_DIMS} dims do not fit in registers"
    if any(at.groups > MAX_GROUPS and not at.tree for at in (layout.keys, layout.values)):
        return f"more than {MAX_GROUPS} groups"
    if make is mx.fast.cuda_kernel:
        if _ring_stage(layout, SIMDGROUPS) > RING_MOST:
            return f"records of {4 * layout.words} bytes do not fit in shared memory"
        return (
            None if _capability() in RING_CAPABILITIES else "tiles need an H100 or its successors"
        )
    if make is mx.fast.metal_kernel:
        return gpu.why_no_tiles() or trust.why_not(layout, dims, dtype)
    return None if getattr(make, "tiles", False) else "this backend has no tiles"


@lru_cache(maxsize=1)
def _capability() -> int:
    return mx.device_info().get("compute_capability_major", 0)


@lru_cache(maxsize=64)
def half_levels(at: SideLayout) -> tuple[int, ...]:
    """Coefficients, each twice in a word, of the odd polynomial in v = (2 code + 1) / 2^b - 1 that gives
    the levels of a codebook: exactly, or for 4 bits, where more terms would be lost in halves, within
    2e-4 of the largest."""
    words = np.zeros(5, np.float16)
    if at.codebook:
        count = 2 ** (at.bits - 1)
        v, terms = (np.arange(count) + 0.5) / count, min(count, 5)
        powers = v[:, None] ** (2 * np.arange(terms) + 1)
        table = levels.sphere(at.dims, at.bits)[count:]
        words[:terms] = np.linalg.lstsq(powers, table, rcond=None)[0]
    return tuple(int(n) for n in np.repeat(words, 2).view(np.int32))


@dataclass(frozen=True)
class Run:
    """A second run of pages, behind the first, with transforms of its own. records: how many. The rest as
    for `attend`."""

    buffer: mx.array
    records: int
    transforms: tuple[Transform | None, Transform | None]
    headers: mx.array | None = None


def _stored(layout: RecordLayout, dims: int) -> tuple[int, int]:
    """Stored dims of keys and of values as kernels see them: where a table says what differs by layer, as many as a
    head has."""
    if layout.keys.widths:
        return dims, dims
    return layout.keys.dims, layout.values.dims


def tile_map(matrix: mx.array) -> mx.array:
    """[M, K], [G, M, K] or [B, G, M, K] -> [1, G or B G; M/16, K/16, 32 lanes, 4] words: left factors,
    padded with zeros."""
    matrix = matrix.reshape(-1, *matrix.shape[-2:]).astype(mx.float16)
    count, rows, columns = matrix.shape
    pad = [(0, 0), (0, -rows % BLOCK), (0, -columns % BLOCK)]
    x = mx.pad(matrix, pad).reshape(
        count, -(-rows // BLOCK) * 2, 2, 8, -(-columns // BLOCK) * 2, 2, 4, 2
    )
    x = mx.contiguous(x.transpose(0, 1, 4, 3, 6, 5, 2, 7))  # m, k, g, t, word, i
    return x.view(mx.uint32).reshape(count, x.shape[1], x.shape[2], 32, 4)


Map = tuple[mx.array | None, int]  # words, for how many heads; 0 where there is no transform
_maps: WeakKeyDictionary[Transform, dict[bool, Map]] = WeakKeyDictionary()


def _map(transform: Transform | None, keys: bool, room: int = 0) -> Map:
    """The map of queries into the stored domain of the keys, or of stored values back. Kept as long as
    the transform, if that follows the text. room: stored dims at least, the others zeros."""
    if transform is None or transform.up.ndim < 4:
        return _lasting(transform, keys, room)
    made = _maps.setdefault(transform, {})
    if keys not in made:  # not evaluated: it depends on tokens still being read
        made[keys] = _made(transform, keys)
    return made[keys]


@lru_cache(maxsize=512)
def _lasting(transform: Transform | None, keys: bool, room: int) -> Map:
    if transform is None:
        return None, 0
    with mx.stream(mx.cpu):
        out = _made(transform, keys, room)
        mx.eval(out[0])
    return out


def _made(transform: Transform, keys: bool, room: int = 0) -> Map:
    up = transform.up
    if room > up.shape[-2]:
        up = mx.pad(up, [(0, 0)] * (up.ndim - 2) + [(0, room - up.shape[-2]), (0, 0)])
    words = tile_map(up if keys else up.swapaxes(-1, -2))
    return words, words.shape[0]


def _spread(one: Map, count: int) -> Map:
    """The map repeated for each of a batch, where another run of pages has one for each."""
    words, own = one
    return one if own == count else (mx.tile(words, (count // own, 1, 1, 1, 1)), count)


def _bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


def _is_wide(layout: RecordLayout, dims: int) -> bool:
    """Return whether a core has registers, or memory for records, for only 8 simdgroups."""
    most = max(dims, *_stored(layout, dims))
    return most > 128 or _ring_stage(layout, SIMDGROUPS) > RING_BYTES // 2


def _simdgroups(layout: RecordLayout, wide: bool, merges: int, make: Factory) -> int:
    """Simdgroups of a threadgroup. Many on CUDA, so that few splits are merged, unless heads are many."""
    few = merges * SIMDGROUPS_CUDA * 4 <= SIMDGROUPS_WANTED  # on CUDA alone
    words = 0 if layout.keys.widths else layout.words  # one text for records of all sizes
    fits = not wide and SIMDGROUPS_CUDA * 4 * words * 4 <= RING_BYTES
    return SIMDGROUPS_CUDA if make is mx.fast.cuda_kernel and few and fits else SIMDGROUPS


def splits_for(
    records: int, merges: int, simdgroups: int, wide: bool, cores: int | None = None
) -> tuple[int, int]:
    """Return how many threadgroups share the records of a head, and how many its windows. merges: heads
    times tiles of rows; cores: of an Apple GPU, None elsewhere."""
    few = -(-records // (2 * simdgroups))
    if cores is not None:  # windows come besides: they end early
        room = max(1, round(PER_CORE * cores / merges))
        return max(1, min(MAX_SPLITS // 2, room, few)), 1
    room = SIMDGROUPS_WANTED // simdgroups // merges
    if wide:  # a core holds half as many, and each leaves more to merge
        room = min(room // 2 if merges > 1 else room, MAX_SPLITS // 2)
    windows = 2 if room >= 16 and simdgroups < SIMDGROUPS_CUDA else 1
    return max(1, min(MAX_SPLITS - windows, room - windows, few)), windows


def _ring_stage(layout: RecordLayout, simdgroups: int) -> int:
    """Bytes: two records for each."""
    return simdgroups * 2 * layout.words * 4


def _ring(layout: RecordLayout, simdgroups: int, wide: bool, make: Factory) -> tuple[int, int]:
    """(stages, bytes of shared memory) of the ring of records."""
    if make is not mx.fast.cuda_kernel:
        return 1, 0
    each = _ring_stage(layout, simdgroups)
    room = RING_BYTES if simdgroups == SIMDGROUPS_CUDA or wide else RING_BYTES // 2
    if layout.keys.widths:  # records of all sizes share a text, which finds how many stages fit
        each = room // MOST_STAGES // 128 * 128
    stages = max(1, min(MOST_STAGES, room // each))
    return stages, stages * each + -(-stages * simdgroups * 8 // 128) * 128


def _soon(layout: RecordLayout, wide: bool, make: Factory) -> dict[str, int]:
    """Return how many blocks of a side are read ahead where blocks have different widths."""
    most = SOON_CUDA if make is mx.fast.cuda_kernel else SOON
    return {"SOON": 0 if wide else most} if layout.keys.widths else {}


def _held(layout: RecordLayout, simdgroups: int, stages: int, shared_memory: int) -> int:
    """Words of a record, or for records of all sizes what a stage of the ring has for each."""
    if not layout.keys.widths:
        return layout.words
    barriers = -(-stages * simdgroups * 8 // 128) * 128
    return max(0, shared_memory - barriers) // (stages * simdgroups * 2 * 4)


@lru_cache(maxsize=256)
def _kernel(
    layout: RecordLayout,
    dims: int,
    dtype: mx.Dtype,
    mapped: tuple[bool, bool],
    has_window: bool,
    has_sinks: bool,
    simdgroups: int,
    runs: int,
    make: Factory,
    softcap: float | None,
):
    wide = _is_wide(layout, dims)
    stages, shared_memory = _ring(layout, simdgroups, wide, make)
    stored = _stored(layout, dims)
    template = {
        "T": dtype,
        "BF16": int(dtype == mx.bfloat16),
        "S": simdgroups,
        "STAGES": stages,
        "AHEAD": AHEAD_CUDA if make is mx.fast.cuda_kernel and simdgroups == SIMDGROUPS else AHEAD,
        "POOLED": int(wide and make is not mx.fast.cuda_kernel),
        "RUNS": runs,
        "D": dims,
        "RK": stored[0],
        "RV": stored[1],
        "RECORD": _held(layout, simdgroups, stages, shared_memory),
        "PAGE": layout.page,
        "HEADER": layout.header_words,
        "HAS_K": int(mapped[0]),
        "HAS_V": int(mapped[1]),
        "WINDOW": int(has_window),
        "HAS_SINKS": int(has_sinks),
        "CAP": cap_bits(softcap),
        **_soon(layout, wide, make),
        **side_template(layout.keys, "_K"),
        **side_template(layout.values, "_V"),
        "LEVELS_K": half_levels(layout.keys),
        "LEVELS_V": half_levels(layout.values),
    }
    bounds = f"{32 * simdgroups}, {2 if simdgroups < SIMDGROUPS_CUDA and not wide else 1}"
    return build("attend_tile", tuple(template.items()), make, shared_memory, bounds)


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    rooms: tuple[int, int, int],
    heads: int,
    layout: RecordLayout,
    counts: tuple[int, int],
    division: Division,
    scale: float,
    make: Factory,
    window: int,
    has_sinks: bool,
    splits: tuple[int, int] | None,
    second: tuple[int, int] | None = None,
    softcap: float | None = None,
):
    """(kernel, sizes but for the lengths, the rest of the call), the same for all layers of a step.

    rooms: records, or tokens, that the buffers of records, sink and live hold. counts: maps of keys
        and of values. second: what the buffer of a second run holds, and its records.
    """
    batch, q_heads, new_tokens, dims = shape
    rows = q_heads // heads * new_tokens
    merges = batch * heads * -(-rows // ROWS)
    own_blocks = -(-dims // BLOCK)
    stored = [-(-n // BLOCK) for n in _stored(layout, dims)]
    sizes = (
        512 * own_blocks * stored[0],
        512 * own_blocks * stored[1],
    )
    strides = (size if n > 1 else 0 for n, size in zip(counts, sizes, strict=True))
    own = sum(bit for bit, n in zip((1, 2), counts, strict=True) if n > heads)
    most, (capacity, more) = division.records, second or (0, 0)
    wide = _is_wide(layout, dims)
    busy = division.busy(merges)
    simdgroups = _simdgroups(layout, wide, busy, make)
    splits = splits or splits_for(most + more, busy, simdgroups, wide, gpu.cores(make))
    if second:
        splits = max(2, splits[0]), splits[1]
    first = splits[0]
    if second:
        first = min(splits[0] - 1, max(1, round(splits[0] * most / (most + more))))
    size = (
        *(rows, splits[0], *rooms, new_tokens, window, heads, *strides),
        *(_bits(scale * LOG2E), _bits(LOG2E)),
        *(*MASKS[layout.keys.bits], *MASKS[layout.values.bits]),
        *(first, capacity, more, own),
    )
    width = BLOCK * max(stored[1], own_blocks)
    mapped, runs = tuple(n > 0 for n in counts), 2 if second else 1
    return (
        _kernel(
            *(layout, dims, dtype, mapped, window > 0, has_sinks, simdgroups, runs, make),
            softcap,
        ),
        size,
        {
            "template": [],
            "grid": (32 * simdgroups, sum(splits), merges),
            "threadgroup": (32 * simdgroups, 1, 1),
            "output_shapes": [shape, (batch * heads * rows, sum(splits), width + 4)],
            "output_dtypes": [dtype, mx.float32],
        },
    )


class _Counters:
    """Arrays of zeros in which a kernel counts; it leaves them as zeros.

    Each call takes the next of many, so that calls that run at the same time never share one.
    """

    def __init__(self, count: int = 256, each: int = 512):
        self.each = each
        slab = mx.zeros((count * each,), mx.uint32)
        self._slots = [slab[i * each : (i + 1) * each] for i in range(count)]
        mx.eval(self._slots)
        self._next = cycle(self._slots)

    def take(self, merges: int) -> mx.array:
        return next(self._next) if merges <= self.each else mx.zeros((merges,), mx.uint32)


@lru_cache(maxsize=1)
def _counters() -> _Counters:
    return _Counters()


_forgotten = [0]


def forget_counters() -> None:
    """Make new counters: a kernel that was stopped by an error may leave one that is not zero."""
    _counters.cache_clear()
    _forgotten[0] += 1


def times_forgotten() -> int:
    """Return how often counters were made anew: what holds older ones, as a trace does, has to go."""
    return _forgotten[0]


def attend(
    q: mx.array,
    buffer: mx.array,
    layout: RecordLayout,
    transforms: tuple[Transform | None, Transform | None],
    sink: Pair | None,
    live: Pair,
    lengths: Known | Later,
    scale: float,
    make: Factory,
    window: int = 0,
    sink_logits: mx.array | None = None,
    splits: tuple[int, int] | None = None,
    headers: mx.array | None = None,
    starts: tuple[int, ...] | None = None,
    second: Run | None = None,
    page: int = 0,
    softcap: float | None = None,
) -> mx.array:
    """Attention of a few new tokens over records and windows.

    q: [B, H, L, D] in the model's domain and dtype; the other arguments as in `attend.attend`.
    transforms: of keys and of values, one for all heads, one per kv head, or one for each of the batch
        too. splits: threadgroups for the records and the windows of a head.
    Returns [B, H, L, D] in the dtype of q.
    """
    sink = sink or live  # never read: its length is 0
    room = q.shape[3] if layout.keys.widths else 0
    keys, values = _map(transforms[0], True, room), _map(transforms[1], False, room)
    if room:
        headers = fill_table(layout)
    after = (None,) * 4
    if second:
        others = _map(second.transforms[0], True), _map(second.transforms[1], False)
        most = [max(x[1], y[1]) for x, y in zip((keys, values), others, strict=True)]
        keys, values = map(_spread, (keys, values), most)
        after = (
            second.buffer,
            second.headers,
            *(_spread(*x)[0] for x in zip(others, most, strict=True)),
        )
    own = own_starts(q.shape[0], buffer.shape[1], buffer.shape[2])
    shared = division(lengths, starts, (page or layout.page) // TOKENS)
    kernel, numbers, call = _plan(
        *(tuple(q.shape), q.dtype, (buffer.shape[2], sink[0].shape[2], live[0].shape[2])),
        *(buffer.shape[1], layout, (keys[1], values[1])),
        *(shared, scale, make, window),
        *(sink_logits is not None, splits),
        (second.buffer.shape[2], second.records) if second else None,
        softcap,
    )
    sizes = behind(numbers, lengths, starts or own)
    logits = nothing() if sink_logits is None else sink_logits.astype(mx.float32)
    counter = _counters().take(call["grid"][2])
    inputs = [q, buffer, headers, *sink, *live, keys[0], values[0], logits, sizes, counter, *after]
    empty = nothing(mx.uint32)
    return kernel(inputs=[empty if x is None else x for x in inputs], **call)[0]
