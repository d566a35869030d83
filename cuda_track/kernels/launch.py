"""Launch attention, sealing and unsealing by Triton, and say why a kernel cannot run.

q --queries_kernel--> stored domain --attend_kernel--> partials --merge_kernel--> output
new tokens --seal_kernel--> pages --unseal_kernel--> the stored domain, for prefill
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from cuda_track.codec.codec import Codec, Stored
from cuda_track.kernels import layout
from cuda_track.kernels.arguments import (
    SEAL_BLOCK,
    SEAL_STAGES,
    SEALED,
    down_of,
    given,
    interpreted,
    per_head,
    rows_together,
)
from cuda_track.kernels.pool import PoolPages
from mlxkv.formats.config import CacheConfig

ROWS = 128  # of a group at most: query heads times new tokens
LEAST_ROWS = 8  # to which fewer are padded
WINDOWS, SLOTS = 3, 16  # programs of windows, where a head has so many times more for its pages
FEW = 132  # programs that merge, below which a row has several
MANY = 256  # rows of queries, above which a program takes LEAST_ROWS before and after attention
MERGED = 1 << 14  # numbers that a program which merges holds at a time
LONGEST = 4096  # tokens that a program sums at most: measured, and what `bench` checks
LOG2E = math.log2(math.e)


@cache
def absent() -> str | None:
    """Return why there is no Triton here, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


def why_not(config: CacheConfig, dims: tuple[int, int], device: torch.device) -> str | None:
    """Return why Triton does not read caches of `config` with heads of these dims, or None."""
    if reason := absent():
        return reason
    if device.type != "cuda" and not interpreted():
        return f"no Triton kernels on {device.type}"
    if dims[0] != dims[1]:
        return f"keys of {dims[0]} and values of {dims[1]} dims have no kernel"
    return layout.why_not(config.keys.quantizer, dims[0], config.page) or layout.why_not(
        config.values.quantizer, dims[1], config.page, keys=False
    )


@dataclass(frozen=True)
class Launch:
    """How `attend_kernel` is launched.

    warps: of a program. programs: on one multiprocessor, by which splits are sized. stages: of its
    pipeline. registers: of a thread at most, 0 for the compiler's choice. early: the next kernel may start
    while it runs. asm: PTX unpacks codes.
    """

    warps: int = 1
    programs: int = 10
    stages: int = 3
    registers: int = 0
    early: bool = False
    asm: bool = True


# By head dim and bits of the values, on an H200 (docs/results/cuda.md).
LAUNCHES: dict[tuple[int, int], Launch] = {
    (64, 4): Launch(1, 8, 5, 168),
    (64, 2): Launch(1, 8, 5, 168),
    (128, 4): Launch(1, 8, 5),
    (128, 2): Launch(1, 8, 5),
    (256, 4): Launch(2, 2, 5, early=True),
    (256, 2): Launch(2, 2, 5, early=True),
}


def launch(dims: int, bits: int, padded: int = LEAST_ROWS) -> Launch:
    """The launch that was fastest on an H200, for few rows of queries; else as many warps
    as hold their part of the sums in registers (`tests/support/triton_compile.py`)."""
    if padded == LEAST_ROWS and (dims, bits) in LAUNCHES:
        return LAUNCHES[dims, bits]
    warps = 4 if padded > LEAST_ROWS else 2 if dims > 128 else 1
    return Launch(warps, 10 // warps)


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
    """(programs that share the pages of a row, programs that share its windows).

    page: tokens of a page. heads: kv heads of all rows. All programs run at the same time, or each sums at
    most LONGEST tokens.
    """
    slots = max(1, _processors(device) * programs)
    windows = WINDOWS if slots >= WINDOWS * SLOTS * heads else 1
    parts = max(slots // heads - windows, -(-pages * page // LONGEST))
    return max(1, min(pages, parts)), windows


def attend(
    queries: torch.Tensor,
    pages: PoolPages,
    sink: tuple[torch.Tensor, torch.Tensor] | None,
    live: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    mask: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    how: Launch | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend with queries [B, H, L, D], causal among the new tokens. Returns [B, H, L, D].

    live, sink: (keys, values) [B, G, T, D]; live holds the new tokens. mask: boolean [B, T], tokens that may
    be seen at all. sink_logits: [H]. softcap: scores are bent to stay below it (Gemma 2).
    """
    from cuda_track.kernels.decode import attend_kernel
    from cuda_track.kernels.many import many_merge_kernel, many_queries_kernel
    from cuda_track.kernels.turn import merge_kernel, queries_kernel

    batch, heads, new, dims = queries.shape
    kv_heads = live[0].shape[1]
    rows = heads // kv_heads * new
    padded = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
    key_side, value_side = pages.layouts
    how = how or launch(dims, value_side.spec.bits, padded)
    queries = queries.contiguous()
    turns = [None if code.transform is None else code.transform.up for code in pages.codecs]
    groups = 1 if key_side.channel else key_side.groups  # of a token
    coded = {"GROUPS": groups, "BITS": key_side.spec.bits, "PLANES": key_side.planes}
    device, kw = queries.device, {"device": queries.device}
    chained = _chained(device)
    parts, around = splits(
        pages.table.shape[1], key_side.page, batch * kv_heads, device, how.programs
    )

    q = torch.empty(batch, kv_heads, padded, dims, dtype=torch.float16, **kw)
    sums = torch.empty(batch, kv_heads, 2, groups, padded, dtype=torch.float32, **kw)
    factors = torch.empty(batch, kv_heads, padded, dtype=torch.float32, **kw)
    # AMD's compiler lacks float32 products in three parts of TF32, which kernels of many rows use.
    many = batch * kv_heads * rows > MANY and dims <= 128 and torch.version.hip is None
    before, after = (
        (many_queries_kernel, many_merge_kernel) if many else (queries_kernel, merge_kernel)
    )
    together = {"M": LEAST_ROWS} if many else {}
    before[(padded // together.get("M", 1), kv_heads, batch)](
        *(queries, given(turns[0], q), q, sums, factors, rows, scale * LOG2E, per_head(turns[0])),
        **{"D": dims, "R": dims, "N": padded, "TURNED": turns[0] is not None, **coded},
        **together,
        **chained,
        num_warps=8 if dims <= 128 else 16,
    )

    shape = (batch, kv_heads, parts + around, padded)
    out = torch.empty(*shape, dims, dtype=torch.float32, **kw)
    top, total = (torch.empty(shape, dtype=torch.float32, **kw) for _ in range(2))
    live = tuple(map(rows_together, live))
    sink = tuple(map(rows_together, sink)) if sink is not None else live
    seen = None if mask is None else mask.to(torch.uint8).contiguous()
    codes, kinds = _read(pages, dims)
    attend_kernel[(parts + around, kv_heads, batch)](
        *(q, sums, factors, queries),
        *codes,
        *(pages.table, pages.counts, *sink, *live),
        *(0 if sink is live else sink[0].shape[2], live[0].shape[2]),
        *(sink[0].stride(1), live[0].stride(1), sink[0].stride(0), live[0].stride(0)),
        *(given(seen, pages.table), 0 if seen is None else seen.shape[1]),
        *(out, top, total, pages.table.shape[1], parts, rows, new, scale * LOG2E),
        0.0 if softcap is None else softcap * LOG2E,
        **{"N": padded, "T": key_side.turn, "PAGE": key_side.page, "WINDOW": 32, **kinds},
        MASKED=seen is not None,
        CAPPED=softcap is not None,
        ASM=how.asm and not interpreted() and torch.version.hip is None,
        STAGES=how.stages,
        EARLY=how.early,
        WIDE=interpreted() and live[0].dtype == torch.bfloat16,
        num_warps=how.warps,
        **chained,
        **({"maxnreg": how.registers} if how.registers and not interpreted() else {}),
    )

    result = torch.empty_like(queries)
    every, block = 1 << (parts + around - 1).bit_length(), min(dims, 128)
    if many:
        grid, at_once = -(-rows // LEAST_ROWS), MERGED // LEAST_ROWS
    else:
        while block > 64 and batch * kv_heads * rows * dims // block < FEW // 2:
            block //= 2
        grid, at_once, together = rows * (dims // block), MERGED, {"BLOCK": block}
    after[(grid, kv_heads, batch)](
        *(out, top, total, given(turns[1], out), given(sink_logits, out), result),
        *(parts, around, rows, new, per_head(turns[1])),
        **{
            "D": dims,
            "R": dims,
            "N": padded,
            "SPLITS": every,
            "CHUNK": min(at_once // dims, every),
        },
        **{"TURNED": turns[1] is not None, "SINKS": sink_logits is not None},
        **together,
        **chained,
        num_warps=16 if not many and grid * kv_heads * batch <= FEW else 8,
    )
    return result


def _read(pages: PoolPages, dims: int) -> tuple[tuple, dict]:
    """Return the tensors of codes and the constants that `attend_kernel` reads them by."""
    codes, kinds = [], {"R": dims}
    for letter, at, side in zip("KV", pages.layouts, pages.sides, strict=True):
        codes += [side["words"], side.get("high", side["words"]), side["numbers"]]
        groups = 1 if at.channel else at.groups
        kinds |= {f"{letter}_BITS": at.spec.bits, f"{letter}_PLANES": at.planes}
        kinds[f"{letter}_GROUPS"] = groups
    keys = pages.layouts[0]
    return tuple(codes), kinds | {"CHANNEL": keys.group if keys.channel else 0}


def seal(
    code: Codec,
    x: torch.Tensor,
    at: layout.SideLayout,
    side: Stored,
    places: list[int] | torch.Tensor,
) -> None:
    """Encode x [B, G, T, D], whole pages, into `places` of one side of a pool, row by row."""
    from cuda_track.kernels.encode import seal_kernel

    batch, heads, tokens, dims = x.shape
    x = rows_together(x)
    # Every program reads the whole matrix, for many tokens. It computes whole scales of channels.
    block = at.group if at.channel else math.gcd(tokens, SEALED)
    # Minima over the tokens of a channel cross warps: as few as hold its numbers in registers.
    wide = at.dims > 128 or block > SEALED if at.channel else block == SEALED
    down, of_head, parts = down_of(code.transform, x.dtype)
    seal_kernel[(tokens // block, heads, batch)](
        *(x, given(down, x), side["words"], side.get("high", side["words"]), side["numbers"]),
        *(torch.as_tensor(places, device=x.device), x.stride(0), x.stride(1), of_head),
        tokens // at.page,
        **{"D": dims, "R": at.dims, "T": block, "PAGE": at.page, "BITS": at.spec.bits},
        **{"PLANES": at.planes, "GROUPS": at.groups, "SYMMETRIC": at.spec.symmetric},
        CHANNEL=at.group if at.channel else 0,
        **{"RANK": at.spec.clip_rank(at.dims), "KEYS": at.keys, "TURNED": down is not None},
        **{"PARTS": parts, "BLOCK": SEAL_BLOCK, "FUSED": not interpreted()},
        num_warps=8 if wide else 4,
        num_stages=SEAL_STAGES if block >= SEALED else 2,
    )


def unseal(pages: PoolPages, side: int, out: torch.Tensor, start: int) -> None:
    """Decode keys (side 0) or values (1) of all pages, in the stored domain, into out [B, G, T, R] from token
    `start` on."""
    from cuda_track.kernels.unsealing import unseal_kernel

    at, stored = pages.layouts[side], pages.sides[side]
    batch, heads, _, dims = out.shape
    most = pages.table.shape[1]
    unseal_kernel[(most * (at.page // at.turn), heads, batch)](
        *(stored["words"], stored.get("high", stored["words"]), stored["numbers"]),
        *(pages.table, pages.counts, out, most, start, out.stride(0), out.stride(1)),
        **{"R": dims, "T": at.turn, "PAGE": at.page, "BITS": at.spec.bits, "PLANES": at.planes},
        **{"GROUPS": 1 if at.channel else at.groups, "KEYS": at.keys},
        CHANNEL=at.group if at.channel else 0,
        num_warps=4,
    )
