"""Decode attention by matrix tiles: one dispatch for rotation, attention, merging and inverse rotation.

The body is text/attend/attend_tile.metal; the portable one of `attend` computes the same on any GPU. For 16-bit model
types: inputs are halves, sums are floats.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle

import mlx.core as mx
import numpy as np

from mlxkv.codec.transform import Transform, kept_with
from mlxkv.formats import levels
from mlxkv.formats.layout import BLOCK, SideLayout
from mlxkv.formats.records import RecordLayout
from mlxkv.metal import gpu
from mlxkv.metal.attend import Run
from mlxkv.metal.launch import KernelBuilder, build
from mlxkv.metal.lengths import Division, Lengths, Splits
from mlxkv.metal.template import LOG2E, Pair, cap_bits, mixed_bits_table, nothing, side_template

SIMDGROUPS, SIMDGROUPS_CUDA = 8, 16  # per threadgroup; Apple has registers for 256 threads
ROWS = 8  # query rows per threadgroup
SIMDGROUPS_WANTED = 2048  # total: nearly 16 per core of an H200
# Threadgroups to launch per Apple core, whose registers and threadgroup memory fit two or three.
PER_CORE = 2.5
# Loads of four floats in flight per lane when merging splits: more do not fit in 128 registers.
AHEAD, AHEAD_CUDA = 8, 16
SOON, SOON_CUDA = 4, 8  # mixed bits: blocks loaded ahead of the first use
MAX_DIMS, MAX_GROUPS, MAX_SPLITS = 256, 8, 128
RING_BYTES = 180 << 10  # shared memory of these CUDA generations
RING_MOST = 196 << 10  # with a threadgroup's other shared memory
RING_CAPABILITIES = (9, 10)
MOST_STAGES = 6
MASKS = {  # masks of codes in their slots, by bits; a sign is the highest bit of four
    0: (0, 0, 0, 0),  # masks come from a table
    16: (0, 0, 0, 0),
    8: (0x00FF00FF, 0, 0, 0),
    4: (0x000F000F, 0x00F000F0, 0, 0),
    3: tuple(0x00030003 << 2 * p for p in range(4)),
    2: tuple(0x00030003 << 2 * p for p in range(4)),
}


def why_not(layout: RecordLayout, dims: int, dtype: mx.Dtype, builder: KernelBuilder) -> str | None:
    """Return why the tile body cannot read such records, or None. dims: head dim D."""
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
    if builder is mx.fast.cuda_kernel:
        if _ring_stage(layout, SIMDGROUPS) > RING_MOST:
            return f"records of {4 * layout.words} bytes do not fit in shared memory"
        return (
            None if _capability() in RING_CAPABILITIES else "tiles need an H100 or its successors"
        )
    if builder is mx.fast.metal_kernel:
        return gpu.why_no_tiles()
    return None if getattr(builder, "tiles", False) else "this backend has no tiles"


@lru_cache(maxsize=1)
def _capability() -> int:
    return int(mx.device_info().get("compute_capability_major", 0))


@lru_cache(maxsize=64)
def half_levels(at: SideLayout) -> tuple[int, ...]:
    """Return coefficients, each twice in a word, of an odd polynomial in v = (2 code + 1) / 2^b - 1.

    It equals the levels of a codebook exactly, or for 4 bits within 2e-4 of the largest: more terms would be lost in
    halves.
    """
    words = np.zeros(5, np.float16)
    if at.codebook:
        count = 2 ** (at.bits - 1)
        v, terms = (np.arange(count) + 0.5) / count, min(count, 5)
        powers = v[:, None] ** (2 * np.arange(terms) + 1)
        table = levels.sphere(at.dims, at.bits)[count:]
        words[:terms] = np.linalg.lstsq(powers, table, rcond=None)[0]
    return tuple(int(n) for n in np.repeat(words, 2).view(np.int32))


def _stored(layout: RecordLayout, dims: int) -> tuple[int, int]:
    """Return the stored dims of keys and of values that kernels are built for.

    For mixed bits these are the head dim, since a table has the layer's own.
    """
    if layout.keys.widths:
        return dims, dims
    return layout.keys.dims, layout.values.dims


def tile_map(matrix: mx.array) -> mx.array:
    """Convert matrices to left factors of tiles, padded with zeros.

    [M, K], [G, M, K] or [B, G, M, K] -> [1, G or B G; M/16, K/16, 32 lanes, 4] words.
    """
    matrix = matrix.reshape(-1, *matrix.shape[-2:]).astype(mx.float16)
    count, rows, columns = matrix.shape
    pad = [(0, 0), (0, -rows % BLOCK), (0, -columns % BLOCK)]
    x = mx.pad(matrix, pad).reshape(
        count, -(-rows // BLOCK) * 2, 2, 8, -(-columns // BLOCK) * 2, 2, 4, 2
    )
    x = mx.contiguous(x.transpose(0, 1, 4, 3, 6, 5, 2, 7))  # m, k, g, t, word, i
    return x.view(mx.uint32).reshape(count, x.shape[1], x.shape[2], 32, 4)


Map = tuple[mx.array | None, int]  # words, number of heads (0: no transform)


def _map(transform: Transform | None, keys: bool, least_dims: int) -> Map:
    """Return the map of queries into the stored domain of keys, or of stored values back.

    least_dims: pad stored dims with zeros up to this number.
    """
    if transform is None or transform.up.ndim < 4:
        return _lasting(transform, keys, least_dims)
    return _following(transform, keys)


@lru_cache(maxsize=512)
def _lasting(transform: Transform | None, keys: bool, least_dims: int) -> Map:
    if transform is None:
        return None, 0
    with mx.stream(mx.cpu):
        out = _map_of(transform, keys, least_dims)
        mx.eval(out[0])
    return out


@kept_with
def _following(transform: Transform, keys: bool) -> Map:
    """Return the unevaluated map of a transform that follows the text: it depends on tokens still being read."""
    return _map_of(transform, keys)


def _map_of(transform: Transform, keys: bool, least_dims: int = 0) -> Map:
    up = transform.up
    if least_dims > up.shape[-2]:
        up = mx.pad(up, [(0, 0)] * (up.ndim - 2) + [(0, least_dims - up.shape[-2]), (0, 0)])
    words = tile_map(up if keys else up.swapaxes(-1, -2))
    return words, words.shape[0]


def _maps(run: Run, dims: int) -> tuple[Map, Map]:
    """Return the maps of keys and of values, cached in `run`. dims: head dim D, the size of maps for mixed bits."""
    least_dims = dims if run.layout.keys.widths else 0
    keys, values = run.transforms
    maps = _map(keys, True, least_dims), _map(values, False, least_dims)
    run.maps[:] = maps
    return maps


def _spread(single: Map, count: int) -> Map:
    """Return the map repeated for each sequence, to match another run of pages with one per sequence."""
    words, heads = single
    if words is None or heads == count:
        return single
    return mx.tile(words, (count // heads, 1, 1, 1, 1)), count


def _bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


def _is_wide(layout: RecordLayout, dims: int) -> bool:
    """Return whether registers, or memory for records, limit a core to 8 simdgroups."""
    dims_limit = max(dims, *_stored(layout, dims))
    return dims_limit > 128 or _ring_stage(layout, SIMDGROUPS) > RING_BYTES // 2


def _simdgroups(layout: RecordLayout, wide: bool, merges: int, builder: KernelBuilder) -> int:
    """Return the simdgroups per threadgroup. Many on CUDA, so that few splits are merged, unless heads are many."""
    merges_fit = merges * SIMDGROUPS_CUDA * 4 <= SIMDGROUPS_WANTED  # CUDA only
    words = 0 if layout.keys.widths else layout.words  # one kernel for records of all sizes
    fits = not wide and SIMDGROUPS_CUDA * 4 * words * 4 <= RING_BYTES
    return SIMDGROUPS_CUDA if builder is mx.fast.cuda_kernel and merges_fit and fits else SIMDGROUPS


def splits_for(
    records: int, merges: int, simdgroups: int, wide: bool, cores: int | None = None
) -> tuple[int, int]:
    """Return the number of splits of a head's records, and of its windows.

    merges: heads times tiles of rows. cores: Apple GPU cores, None elsewhere.
    """
    limit = -(-records // (2 * simdgroups))
    if cores is not None:  # not counting windows, which end early
        budget = max(1, round(PER_CORE * cores / merges))
        return max(1, min(MAX_SPLITS // 2, budget, limit)), 1
    budget = SIMDGROUPS_WANTED // simdgroups // merges
    if wide:  # a core holds half as many, and each split costs more to merge
        budget = min(budget // 2 if merges > 1 else budget, MAX_SPLITS // 2)
    windows = 2 if budget >= 16 and simdgroups < SIMDGROUPS_CUDA else 1
    return max(1, min(MAX_SPLITS - windows, budget - windows, limit)), windows


def _ring_stage(layout: RecordLayout, simdgroups: int) -> int:
    """Return the bytes of a ring stage: two records per simdgroup."""
    return simdgroups * 2 * layout.words * 4


def _ring(
    layout: RecordLayout, simdgroups: int, wide: bool, builder: KernelBuilder
) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) of the ring of records."""
    if builder is not mx.fast.cuda_kernel:
        return 1, 0
    stage = _ring_stage(layout, simdgroups)
    budget = RING_BYTES if simdgroups == SIMDGROUPS_CUDA or wide else RING_BYTES // 2
    if layout.keys.widths:  # one kernel for all sizes, which computes the stages that fit
        stage = budget // MOST_STAGES // 128 * 128
    stages = max(1, min(MOST_STAGES, budget // stage))
    return stages, stages * stage + -(-stages * simdgroups * 8 // 128) * 128


def _soon(layout: RecordLayout, wide: bool, builder: KernelBuilder) -> dict[str, int]:
    """Return the template value SOON: blocks of a side to read ahead, for mixed bits."""
    count = SOON_CUDA if builder is mx.fast.cuda_kernel else SOON
    return {"SOON": 0 if wide else count} if layout.keys.widths else {}


def _record_words(layout: RecordLayout, simdgroups: int, stages: int, shared_memory: int) -> int:
    """Return the words of a record, or for mixed bits the words that a ring stage has per record."""
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
    has_sinks: bool,
    simdgroups: int,
    runs: int,
    builder: KernelBuilder,
    softcap: float | None,
):
    wide = _is_wide(layout, dims)
    stages, shared_memory = _ring(layout, simdgroups, wide, builder)
    stored = _stored(layout, dims)
    template = {
        "T": dtype,
        "BF16": int(dtype == mx.bfloat16),
        "S": simdgroups,
        "STAGES": stages,
        "AHEAD": AHEAD_CUDA
        if builder is mx.fast.cuda_kernel and simdgroups == SIMDGROUPS
        else AHEAD,
        "POOLED": int(wide and builder is not mx.fast.cuda_kernel),
        "RUNS": runs,
        "D": dims,
        "RK": stored[0],
        "RV": stored[1],
        "RECORD": _record_words(layout, simdgroups, stages, shared_memory),
        "PAGE": layout.page,
        "HEADER": layout.header_words,
        "HAS_K": int(mapped[0]),
        "HAS_V": int(mapped[1]),
        "HAS_SINKS": int(has_sinks),
        "CAP": cap_bits(softcap),
        **_soon(layout, wide, builder),
        **side_template(layout.keys, "_K"),
        **side_template(layout.values, "_V"),
        "LEVELS_K": half_levels(layout.keys),
        "LEVELS_V": half_levels(layout.values),
    }
    bounds = f"{32 * simdgroups}, {2 if simdgroups < SIMDGROUPS_CUDA and not wide else 1}"
    return build("attend_tile", tuple(template.items()), builder, shared_memory, bounds)


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    layout: RecordLayout,
    counts: tuple[int, int],
    division: Division,
    builder: KernelBuilder,
    capacities: tuple[int, int, int, int, int, int],
    scores: tuple[float, float | None, bool],
):
    """Return (kernel, sizes without the lengths, other arguments of the call), the same for all layers of a step.

    shape: shape of the queries. counts: number of maps of keys and of values. capacities: kv heads; capacity of the
        buffers of records, sink, recent and a second run, in records or tokens; records of the second run. scores:
        scale, softcap, whether there are sink logits.
    """
    batch, q_heads, new_tokens, dims = shape
    heads, *buffers, capacity, second_count = capacities
    scale, softcap, has_sinks = scores
    rows = q_heads // heads * new_tokens
    merges = batch * heads * -(-rows // ROWS)
    own_blocks = -(-dims // BLOCK)
    stored = [-(-n // BLOCK) for n in _stored(layout, dims)]
    sizes = (512 * own_blocks * stored[0], 512 * own_blocks * stored[1])
    strides = (size if n > 1 else 0 for n, size in zip(counts, sizes, strict=True))
    by_sequence = sum(bit for bit, n in zip((1, 2), counts, strict=True) if n > heads)
    first_count, runs = division.records, 2 if capacity else 1
    wide = _is_wide(layout, dims)
    busy = division.busy(merges)
    simdgroups = _simdgroups(layout, wide, busy, builder)
    wanted = splits_for(first_count + second_count, busy, simdgroups, wide, gpu.cores(builder))
    splits = Splits.of_runs(wanted, (first_count, second_count)[:runs])
    size = (
        *(rows, splits.pages, *buffers, new_tokens, heads, *strides),
        *(_bits(scale * LOG2E), _bits(LOG2E)),
        *(*MASKS[layout.keys.bits], *MASKS[layout.values.bits]),
        *(splits.first, capacity, second_count, by_sequence),
    )
    width = BLOCK * max(stored[1], own_blocks)
    mapped = tuple(n > 0 for n in counts)
    return (
        _kernel(*(layout, dims, dtype, mapped, has_sinks, simdgroups, runs, builder), softcap),
        size,
        {
            "template": [],
            "grid": (32 * simdgroups, splits.total, merges),
            "threadgroup": (32 * simdgroups, 1, 1),
            "output_shapes": [shape, (batch * heads * rows, splits.total, width + 4)],
            "output_dtypes": [dtype, mx.float32],
        },
    )


COUNTERS, EACH = 256, 512  # most concurrent calls, most merges per call


@lru_cache(maxsize=1)
def _counters() -> Iterator[mx.array]:
    """Return an endless iterator over zeroed counter arrays, which kernels reset to zero.

    Each call uses the next one, so that concurrent calls never share a counter.
    """
    slab = mx.zeros((COUNTERS * EACH,), mx.uint32)
    slots = [slab[i * EACH : (i + 1) * EACH] for i in range(COUNTERS)]
    mx.eval(slots)
    return cycle(slots)


_resets = [0]


def forget_counters() -> None:
    """Replace the counters: a kernel stopped by an error may leave one that is not zero."""
    _counters.cache_clear()
    _resets[0] += 1


def times_forgotten() -> int:
    """Return how often counters were replaced: holders of older ones, such as traces, must be discarded."""
    return _resets[0]


def attend(
    q: mx.array,
    runs: Sequence[Run],
    sink: Pair | None,
    recent: Pair,
    lengths: Lengths,
    scale: float,
    builder: KernelBuilder,
    sink_logits: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """As `attend.attend`."""
    sink = sink or recent  # never read: its length is 0
    run, second, counts, second_inputs = runs[0], None, (0, 0), ()
    q, headers, (keys, values) = (
        q.astype(recent[0].dtype),
        run.headers,
        run.maps or _maps(run, q.shape[3]),
    )
    if run.layout.keys.widths:
        headers = mixed_bits_table(run.layout)
    if len(runs) > 1:
        second, second_maps = runs[1], _maps(runs[1], q.shape[3])
        heads = [max(x[1], y[1]) for x, y in zip((keys, values), second_maps, strict=True)]
        keys, values, *second_maps = map(_spread, (keys, values, *second_maps), heads * 2)
        counts = second.buffer.shape[2], second.records
        second_inputs = second.buffer, second.headers, *(words for words, _ in second_maps)
    kernel, numbers, call = _plan(
        *(tuple(q.shape), q.dtype, run.layout, (keys[1], values[1]), lengths.division, builder),
        (*run.buffer.shape[1:3], sink[0].shape[2], recent[0].shape[2], *counts),
        (scale, softcap, sink_logits is not None),
    )
    merges, empty = call["grid"][2], nothing(mx.uint32)
    logits = nothing() if sink_logits is None else sink_logits.astype(mx.float32)
    counter = next(_counters()) if merges <= EACH else mx.zeros((merges,), mx.uint32)
    inputs = [q, run.buffer, headers, *sink, *recent, keys[0], values[0], logits]
    inputs += lengths.behind(numbers), counter, *(second_inputs or (None,) * 4)
    for i, x in enumerate(inputs):
        if x is None:
            inputs[i] = empty
    return kernel(inputs=inputs, **call)[0]
