"""Launch attention, quantizing and dequantizing by Triton, and say why a kernel cannot run.

q --queries_kernel--> stored domain --attend_kernel--> partials --merge_kernel--> output
new tokens --quantize_kernel--> pages --dequantize_kernel--> the stored domain, for prefill
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol, cast

import torch

from cuda_track.codec.codec import Codec, Stored, both
from cuda_track.codec.transform import Transform
from cuda_track.kernels import blocks, interpreted, layout, record
from cuda_track.kernels.blocks import BlockLayout
from cuda_track.kernels.layout import Layout, PlaneLayout
from cuda_track.kernels.pool import PoolPages
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.quantizers import Affine, MixedBits, Polar

ROWS = 128  # of a group at most: query heads times new tokens
LEAST_ROWS = 8  # to which fewer are padded
WINDOWS, SLOTS = 3, 16  # programs of windows, where a head has so many times more for its pages
WINDOW = 32  # tokens of a window that a program reads at a time
FEW = 132  # programs that merge, below which a row has several
MANY = 256  # rows of queries, above which a program takes LEAST_ROWS before and after attention
MERGED = 1 << 14  # numbers that a program which merges holds at a time
QUANTIZED_TOKENS = 128  # tokens that a program encodes at most
POLAR_VALUES = 4096  # pairs of a page that a program encodes as radius and angle
QUANTIZE_BLOCK, QUANTIZE_STAGES = 32, 3  # dims that it multiplies at a time, and has in flight
PARTS = 3  # of 16 bits, that make up a matrix of 32
LONGEST = 4096  # tokens that a program sums at most: measured, and what `bench` checks
LOG2E = math.log2(math.e)


class Kernel(Protocol):
    """What `triton.jit` returns. Its stubs know the arguments of the function, not the options of a launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


@cache
def absent() -> str | None:
    """Return why there is no Triton here, or None."""
    return None if find_spec("triton") else "triton is not installed"


def why_not(config: CacheConfig, dims: tuple[int, int]) -> str | None:
    """Return why Triton does not read caches of `config` with heads of these dims, or None."""
    if config.keys.low or config.values.low:
        return "low rank has no Triton kernel"
    if dims[0] != dims[1]:
        return f"keys of {dims[0]} and values of {dims[1]} dims have no kernel"
    quantizers = config.keys.quantizer, config.values.quantizer
    if len({isinstance(one, MixedBits) for one in quantizers}) > 1:
        return "mixed bits beside other codes have no kernel"
    return layout.why_not(quantizers[0], dims[0], config.page) or layout.why_not(
        quantizers[1], dims[1], config.page, keys=False
    )


@dataclass(frozen=True)
class Launch:
    """How `attend_kernel` is launched.

    warps: of a program. programs: on one multiprocessor, by which splits are sized. stages: of its
    pipeline. registers: of a thread at most, 0 for the compiler's choice. early: the next kernel may start
    while it runs.
    """

    warps: int = 1
    programs: int = 10
    stages: int = 3
    registers: int = 0
    early: bool = False

    def options(self, device: torch.device) -> dict[str, object]:
        """Return how Triton launches the kernel."""
        out: dict[str, object] = {"num_warps": self.warps, **_chained(device)}
        return out | ({"maxnreg": self.registers} if self.registers and not interpreted() else {})


# By head dim, for values of 2 and 4 bits, on an H200 (docs/results/cuda.md).
MEASURED = {
    64: Launch(1, 8, 5, registers=168),
    128: Launch(1, 8, 5),
    256: Launch(2, 2, 5, early=True),
}


def launch_for(layouts: tuple[Layout, Layout], dims: int, padded: int) -> Launch:
    """Return the launch of attention for caches of these layouts."""
    keys, values = layouts
    if isinstance(keys, BlockLayout) or isinstance(values, BlockLayout):
        return launch(dims, 0, padded)
    wide = keys.kind == "polar" or "codebook" in (keys.kind, values.kind) and values.bits == 4
    if (
        padded == LEAST_ROWS and wide and dims > 64
    ):  # not measured yet; four warps of 256 dims: see `launch`
        warps = 8 if keys.kind == "polar" and dims > 128 else 2
        return Launch(warps, max(1, 10 // warps))
    return launch(dims, values.bits, padded)


def launch(dims: int, bits: int, padded: int = LEAST_ROWS) -> Launch:
    """Return the launch that was fastest on an H200, for few rows of queries; else as many warps
    as hold their part of the sums in registers (`tests/support/triton_compile.py`). bits: 0 for mixed ones, of
    which only the stages at 128 dims are measured."""
    if not bits:  # a product has 16 tokens or dims: more warps share its rows of queries
        warps = min(4, padded // LEAST_ROWS)
        return Launch(warps, max(1, (8 if dims <= 128 else 4) // warps), 5 if dims <= 128 else 3)
    if padded == LEAST_ROWS and bits in (2, 4):
        return MEASURED[dims]
    # Of 256 dims four warps multiply values by one instruction of theirs, and came out wrong on an H200: by eight they
    # are right.
    warps = 1 if dims <= 128 else 2
    if padded > LEAST_ROWS:
        warps = 4 if dims <= 128 else 8
    return Launch(warps, max(1, 10 // warps))


@cache
def _chained(device: torch.device) -> dict:
    """Launch options that let the kernels of one attention follow each other without a gap, on GPUs that can."""
    from cuda_track.kernels.chained import CAPABILITY

    can = device.type == "cuda" and torch.version.hip is None and not interpreted()
    can = can and torch.cuda.get_device_capability(device)[0] >= CAPABILITY
    return {"CHAINED": can, **({"launch_pdl": True} if can else {})}


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits(
    pages: int, page: int, heads: int, device: torch.device, programs: int
) -> tuple[int, int]:
    """Return (programs that share the pages of a row, programs that share its windows).

    page: tokens of a page. heads: kv heads of all rows. All programs run at the same time, or, where each would sum
    more than LONGEST tokens, in as few waves as have less, all of which are full: a wave takes as long with few.
    """
    slots, windows = slots_of(heads, device, programs)
    waves = -(-(-(-pages * page // LONGEST) + windows) * heads // slots)
    return max(1, min(pages, waves * slots // heads - windows)), windows


def slots_of(heads: int, device: torch.device, programs: int) -> tuple[int, int]:
    """Return (programs that run at the same time, programs that share the windows of a row)."""
    slots = max(1, _processors(device) * programs)
    return slots, WINDOWS if slots >= WINDOWS * SLOTS * heads else 1


def attend(
    queries: torch.Tensor,
    pages: PoolPages,
    sink: tuple[torch.Tensor, torch.Tensor] | None,
    recent: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    mask: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    softcap: float | None = None,
    tuned: Launch | None = None,
) -> torch.Tensor:
    """Attend with queries [B, H, L, D], causal among the new tokens. Returns [B, H, L, D].

    recent, sink: (keys, values) [B, G, T, D]; recent holds the new tokens. mask: boolean [B, T], tokens that may
    be seen at all. sink_logits: [H]. softcap: scores are bent to stay below it (Gemma 2).
    """
    batch, heads, new, dims = queries.shape
    kv_heads = recent[0].shape[1]
    tuned = tuned or launch_for(pages.layouts, dims, padded_rows(heads // kv_heads * new))
    at = Shape(batch, kv_heads, heads // kv_heads * new, new, dims, queries.device)
    parts, around = splits(
        pages.table.shape[1], pages.layouts[0].page, batch * kv_heads, at.device, tuned.programs
    )
    queries, matrices = queries.contiguous(), _matrices(pages, dims)
    turned = turn_queries(queries, at, pages.layouts[0], matrices[0], scale)
    out, top, total = at.partials(parts + around)
    recent = both(rows_together, recent)
    sink = both(rows_together, sink) if sink is not None else recent
    visible = None if mask is None else mask.to(torch.uint8).contiguous()
    options = {
        **{"R": dims, "N": at.padded, "PAGE": pages.layouts[0].page},
        **{"RECORD": record.stride(pages.sides[0]), "STAGES": tuned.stages, "ASM": by_ptx()},
        **{"MASKED": visible is not None, "CAPPED": softcap is not None},
        "WIDE": interpreted() and recent[0].dtype == torch.bfloat16,
    }
    if isinstance(pages.layouts[0], BlockLayout):
        from cuda_track.kernels.mixed_bits import attend_mixed_kernel as kernel

        turned, early = (turned[0], turned[2]), {}  # no sums of queries
    else:
        from cuda_track.kernels.decode import attend_kernel as kernel

        early = {"EARLY": tuned.early}
    cast(Kernel, kernel)[(parts + around, kv_heads, batch)](
        *(*turned, queries),
        *(x for side in pages.sides for x in tensors(side)),
        *(pages.table, pages.counts, *sink, *recent),
        *(0 if sink is recent else sink[0].shape[2], recent[0].shape[2]),
        *(sink[0].stride(1), recent[0].stride(1), sink[0].stride(0), recent[0].stride(0)),
        *(or_else(visible, pages.table), 0 if visible is None else visible.shape[1]),
        *(out, top, total, pages.table.shape[1], parts, at.rows, new, scale * LOG2E),
        0.0 if softcap is None else softcap * LOG2E,
        C=attend_constants(pages.layouts, options),
        **early,
        **tuned.options(at.device),
    )
    result = torch.empty_like(queries)
    merge((out, top, total), at, (parts, around), matrices[1], result, sink_logits)
    return result


def padded_rows(rows: int) -> int:
    """Return to how many rows of queries a kv head is padded."""
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class Shape:
    """Of queries. rows: of a kv head, its query heads times `new` tokens."""

    batch: int
    kv_heads: int
    rows: int
    new: int
    dims: int
    device: torch.device

    @property
    def padded(self) -> int:
        return padded_rows(self.rows)

    @property
    def many(self) -> bool:
        """Return whether a program takes LEAST_ROWS before and after attention. AMD's compiler lacks float32 products
        in three parts of TF32, which these kernels use."""
        many = self.batch * self.kv_heads * self.rows > MANY
        return many and self.dims <= 128 and torch.version.hip is None

    def each(self, rows: int, turned: bool) -> int:
        """Return how many requests a program takes in turn, so that those that load a matrix run at the same time."""
        programs = -(-rows // LEAST_ROWS) * self.kv_heads * self.batch
        return -(-programs // max(_processors(self.device), 1)) if turned else 1

    @property
    def sizes(self) -> dict[str, object]:
        return {"D": self.dims, "R": self.dims, "N": self.padded, **_chained(self.device)}

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(self.batch, self.kv_heads, *shape, dtype=dtype, device=self.device)

    def partials(self, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return room for the outputs, the largest scores and the sums of weights of `parts` programs."""
        shape = (parts, self.padded)
        return self.empty(*shape, self.dims), self.empty(*shape), self.empty(*shape)


def turn_queries(
    queries: torch.Tensor, at: Shape, keys: Layout, up: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [B, H, L, D] in the stored domain, float16 [B, G, N, R], their sums, and by what scores are
    multiplied."""

    from cuda_track.kernels.transform import many_queries_kernel, queries_kernel

    of_keys = constants_of(keys)
    if isinstance(keys, PlaneLayout) and keys.kind != "affine":
        of_keys["BITS"] = 8  # without gains
    q = at.empty(at.padded, at.dims, dtype=torch.float16)
    sums, factors = at.empty(2, of_keys["GROUPS"], at.padded), at.empty(at.padded)
    given = queries, or_else(up, q), q, sums, factors, at.rows, scale * LOG2E, stride_of(up)
    options = {**at.sizes, **of_keys, "TURNED": up is not None}
    options["num_warps"] = 8 if at.dims <= 128 else 16
    if at.many:
        each = at.each(at.padded, up is not None)
        grid = at.padded // LEAST_ROWS, at.kv_heads, -(-at.batch // each)
        cast(Kernel, many_queries_kernel)[grid](*given, at.batch, each, M=LEAST_ROWS, **options)
    else:
        grid = at.padded, at.kv_heads, at.batch
        cast(Kernel, queries_kernel)[grid](*given, **options)
    return q, sums, factors


def merge(
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    at: Shape,
    parts: tuple[int, int],
    up: torch.Tensor | None,
    result: torch.Tensor,
    sink_logits: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
) -> None:
    """Merge what programs computed into result [B, H, L, D]. parts: how many of pages, and of windows. used: int32
    [B, G], how many of those of pages did compute something."""
    from cuda_track.kernels.transform import many_merge_kernel, merge_kernel

    out, (splits, windows) = partials[0], parts
    slots, heads = 1 << (splits + windows - 1).bit_length(), at.batch * at.kv_heads
    given = *partials, or_else(up, out), or_else(sink_logits, out), or_else(used, out), result
    counts = *parts, at.rows, at.new, stride_of(up)
    options = {
        **{**at.sizes, "SPLITS": slots, "TURNED": up is not None},
        **{"SINKS": sink_logits is not None, "USED": used is not None},
    }
    if at.many and up is not None:
        each, chunk = at.each(at.rows, up is not None), min(MERGED // LEAST_ROWS // at.dims, slots)
        grid = -(-at.rows // LEAST_ROWS), at.kv_heads, -(-at.batch // each)
        options |= {"CHUNK": chunk, "M": LEAST_ROWS, "num_warps": 8}
        cast(Kernel, many_merge_kernel)[grid](*given, *counts, at.batch, each, **options)
        return
    block = min(at.dims, 128)
    while block > 64 and heads * at.rows * at.dims // block < FEW // 2:
        block //= 2
    grid = at.rows * (at.dims // block), at.kv_heads, at.batch
    options |= {"BLOCK": block, "CHUNK": min(MERGED // at.dims, slots)}
    options["num_warps"] = 16 if grid[0] * heads <= FEW else 8
    cast(Kernel, merge_kernel)[grid](*given, *counts, **options)


def _matrices(pages: PoolPages, dims: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return matrices_of(pages.codecs, pages.layouts, dims, pages.table.device)


def matrices_of(
    codecs: tuple[Codec, Codec], layouts: tuple[Layout, Layout], dims: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what queries and outputs are multiplied with, [G, R, D] or [R, D] each; None: nothing."""
    keys, values = layouts
    if isinstance(keys, BlockLayout) and isinstance(values, BlockLayout):
        return blocks.matrices(codecs, (keys, values), dims, device)
    return both(lambda code: code.transform and code.transform.up, codecs)


def by_ptx() -> bool:
    """Return whether kernels unpack codes by PTX."""
    return not interpreted() and torch.version.hip is None


def attend_constants(layouts: tuple[Layout, Layout], options: dict) -> NamedTuple:
    """Return what a kernel of attention over pages of these layouts is compiled for."""
    keys, values = layouts
    if isinstance(keys, BlockLayout) and isinstance(values, BlockLayout):
        from cuda_track.kernels.mixed_bits import MixedConstants, block_constants

        window = WINDOW if options["R"] <= 128 else WINDOW // 2  # what one warp holds
        sides = both(block_constants, (keys, values))
        return MixedConstants(*sides, WINDOW=window, **options)
    from cuda_track.kernels.decode import Constants, SideConstants

    assert isinstance(keys, PlaneLayout) and isinstance(values, PlaneLayout)  # by `why_not`
    sides = both(lambda at: SideConstants(**constants_of(at), KIND=at.kind), (keys, values))
    channel = keys.channel_tokens
    return Constants(*sides, T=keys.step_tokens, WINDOW=WINDOW, CHANNEL=channel, **options)


def constants_of(at: Layout) -> dict[str, int]:
    """Return the constants by which kernels read the codes of a side; GROUPS: of a token. Of mixed bits those by
    which queries keep their size."""
    if isinstance(at, BlockLayout):
        return {"BITS": 8, "PLANES": 4, "GROUPS": 1}
    groups = 1 if at.channel else at.groups
    return {"BITS": at.bits, "PLANES": at.planes, "GROUPS": groups}


def tensors(side: Stored) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a side; without a third bit, or half a tile, its words stand in for those."""
    return side["words"], side.get("high", side.get("odd", side["words"])), side["numbers"]


def down_of(
    transform: Transform | None, dtype: torch.dtype
) -> tuple[torch.Tensor | None, int, int]:
    """Return (down, its stride of a head, parts that it is split into) for inputs of `dtype`; (None, 0, 0) of None."""
    if transform is None:
        return None, 0, 0
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    exact = dtype == torch.float16 or (dtype == torch.bfloat16 and not interpreted())
    down = _parts(transform, dtype) if exact else transform.down
    return down, down.stride(0) if transform.down.ndim == 3 else 0, PARTS if exact else 0


@lru_cache(maxsize=512)
def _parts(transform: Transform, dtype: torch.dtype) -> torch.Tensor:
    """Split down [.., D, R] into a sum of parts of 16 bits, [.., PARTS, D, R], the largest first."""
    remainder, out = transform.down, []
    for _ in range(PARTS):
        out.append(remainder.to(dtype))
        remainder = remainder - out[-1].float()
    return torch.stack(out, -3).contiguous()


def or_else(x: torch.Tensor | None, fallback: torch.Tensor) -> torch.Tensor:
    """Return x, or a tensor that stands in for an argument that is not read."""
    return fallback if x is None else x


def stride_of(matrix: torch.Tensor | None) -> int:
    """Return the stride of a head in a transform, 0 where all heads share it."""
    return matrix.stride(0) if matrix is not None and matrix.ndim == 3 else 0


def rows_together(x: torch.Tensor) -> torch.Tensor:
    """Return x [B, G, T, D] with the tokens of a head side by side; there may be room behind them."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def quantize_pages(
    code: Codec,
    x: torch.Tensor,
    at: Layout,
    side: Stored,
    places: list[int] | torch.Tensor,
) -> None:
    """Encode x [B, G, T, D], whole pages, into `places` of one side of a pool, row by row."""
    if isinstance(at, BlockLayout):
        return _quantize_blocks(code, x, at, side, places)
    if isinstance(at.quantizer, Polar):
        return _quantize_polar(code, x, at, side, places)
    from cuda_track.kernels.encode import quantize_kernel

    batch, heads, tokens, dims = x.shape
    x = rows_together(x)
    # Every program reads the whole matrix, for many tokens. It computes whole scales of channels.
    block = at.group if at.channel else math.gcd(tokens, QUANTIZED_TOKENS)
    # Minima over the tokens of a channel cross warps: as few as hold its numbers in registers.
    wide = at.dims > 128 or block > QUANTIZED_TOKENS if at.channel else block == QUANTIZED_TOKENS
    down, of_head, parts = down_of(code.transform, x.dtype)
    cast(Kernel, quantize_kernel)[(tokens // block, heads, batch)](
        *(x, or_else(down, x), *tensors(side)),
        *(torch.as_tensor(places, device=x.device), x.stride(0), x.stride(1), of_head),
        *(tokens // at.page, record.stride(side)),
        **constants_of(at) | {"GROUPS": at.groups, "CHANNEL": at.channel_tokens},
        **{
            "D": dims,
            "R": at.dims,
            "T": block,
            "PAGE": at.page,
            "SYMMETRIC": isinstance(at.quantizer, Affine) and at.quantizer.symmetric,
            "KIND": at.kind,
        },
        **{"RANK": at.quantizer.clip_rank(at.dims), "KEYS": at.keys, "TURNED": down is not None},
        **{"PARTS": parts, "BLOCK": QUANTIZE_BLOCK, "FUSED": not interpreted()},
        num_warps=8 if wide else 4,
        num_stages=QUANTIZE_STAGES if block >= QUANTIZED_TOKENS else 2,
    )


def _quantize_polar(
    code: Codec, x: torch.Tensor, at: PlaneLayout, side: Stored, places: list[int] | torch.Tensor
) -> None:
    from cuda_track.kernels.encode import quantize_polar_kernel

    assert isinstance(at.quantizer, Polar)
    x = rows_together(code.store(x))  # which is x: pairs of RoPE have no transform
    batch, heads, tokens, dims = x.shape
    count, halves = tokens // at.page, at.planes // 2
    # A page's minima take all of its tokens, so a program has fewer pairs: as many as fill its registers.
    pairs = min(dims // 2, max(POLAR_VALUES // at.page, halves))
    cast(Kernel, quantize_polar_kernel)[(count, heads * (dims // 2 // pairs), batch)](
        *(x, *tensors(side), torch.as_tensor(places, device=x.device)),
        *(x.stride(0), x.stride(1), count, record.stride(side)),
        **{"R": dims, "PAGE": at.page, "BITS": at.bits, "PLANES": at.planes, "PAIRS": pairs},
        **{"RADIUS": at.quantizer.radius, "ANGLE": at.quantizer.angle},
        num_warps=4,
    )


def _quantize_blocks(
    code: Codec, x: torch.Tensor, at: BlockLayout, side: Stored, places: list[int] | torch.Tensor
) -> None:
    from cuda_track.kernels.mixed_bits import quantize_mixed_kernel

    batch, heads, tokens, dims = x.shape
    x, most = rows_together(x), QUANTIZED_TOKENS if dims <= 128 else QUANTIZED_TOKENS // 2
    block = math.gcd(tokens, most)
    down, of_head, parts = down_of(blocks.whole(code.transform, dims), x.dtype)
    cast(Kernel, quantize_mixed_kernel)[(tokens // block, heads, batch)](
        *(x, or_else(down, x), *tensors(side), torch.as_tensor(places, device=x.device)),
        *(blocks.numbers_of_dims(at, dims, x.device), blocks.recipe(at, dims, x.device)),
        *(x.stride(0), x.stride(1), of_head, tokens // at.page, record.stride(side)),
        *(at.dims, at.quantizer.words),
        **{"D": dims, "T": block, "PAGE": at.page, "KEYS": at.keys, "TURNED": down is not None},
        **{"PARTS": parts, "BLOCK": QUANTIZE_BLOCK},
        num_warps=8 if block == QUANTIZED_TOKENS or dims > 128 else 4,
        num_stages=QUANTIZE_STAGES if block >= QUANTIZED_TOKENS else 2,
    )


def dequantize(pages: PoolPages, side: int, out: torch.Tensor, start: int) -> None:
    """Decode keys (side 0) or values (1) of all pages, in the stored domain, into out [B, G, T, R] from token
    `start` on."""
    from cuda_track.kernels.dequantize import dequantize_kernel
    from cuda_track.kernels.mixed_bits import dequantize_mixed_kernel

    at, stored = pages.layouts[side], pages.sides[side]
    batch, heads, _, dims = out.shape
    longest_row = pages.table.shape[1]
    if isinstance(at, BlockLayout):
        cast(Kernel, dequantize_mixed_kernel)[(longest_row * at.steps, heads, batch)](
            *(*tensors(stored), pages.table, pages.counts, out, blocks.places_of(at, out.device)),
            *(longest_row, start, out.stride(0), out.stride(1), record.stride(stored)),
            *(len(at.places), at.tiles),
            **{"PAGE": at.page, "KEYS": at.keys},
            num_warps=4,
        )
        return
    cast(Kernel, dequantize_kernel)[(longest_row * (at.page // at.step_tokens), heads, batch)](
        *tensors(stored),
        *(pages.table, pages.counts, out, longest_row, start, out.stride(0), out.stride(1)),
        record.stride(stored),
        **{"R": dims, "T": at.step_tokens, "PAGE": at.page, **constants_of(at)},
        **{"KEYS": at.keys, "CHANNEL": at.channel_tokens, "KIND": at.kind},
        num_warps=4,
    )
