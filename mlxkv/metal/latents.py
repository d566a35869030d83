"""Decode attention over latents (MLA): a record is key and value of all heads, decoded once for 8 to 32 heads.

The body is text/tile/attend_latent.metal; `merge` joins its splits. Reads the arrays of `CodePages` unchanged.
Plain-ops twin: `cache.attention` over `CodePages`. `builder` builds the kernels (`launch`).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxkv.codec.codec import Codec, Stored
from mlxkv.formats.quantizers import Affine, Quantizer
from mlxkv.formats.sizes import grown
from mlxkv.metal import gpu
from mlxkv.metal.launch import KernelBuilder, launch
from mlxkv.metal.template import exponents, ints, nothing

ROWS = 8  # query rows per tile
MOST_TILES = 4  # per threadgroup
HALVES = 2  # simdgroups that share the dims of a tile
DIMS = (64, 128, 256, 512)  # threads divide these evenly
TYPES = (mx.float16, mx.bfloat16, mx.float32)
WANTED_CUDA, PER_CORE, MAX_SPLITS = 256, 2.5, 128  # threadgroups on CUDA, per Apple core; splits
WINDOW = 256  # tokens: recent lengths are rounded up to it
LEAST_BLOCKS = 2  # per split, so that merging stays small
CAPABILITY = 8  # least CUDA compute capability, for matrix products


def why_not(quantizer: Quantizer, dims: int, page: int, dtype: mx.Dtype) -> str | None:
    """Return why the kernel cannot read such latents on any machine, or None. dims: stored dims."""
    if type(quantizer) is not Affine:
        return f"the kernel for latents reads affine codes, not {quantizer.label}"
    if dims not in DIMS:
        return f"the kernel for latents is for {', '.join(map(str, DIMS))} dims, not {dims}"
    if dtype not in TYPES:
        return f"the kernel for latents has no {str(dtype).removeprefix('mlx.core.')}"
    group = quantizer.group_size(dims, page)
    if group % 16 or (quantizer.axis == "token" and dims % group):
        return f"the kernel for latents reads whole groups of 16, not of {group}"
    return None


def why_not_here(builder: KernelBuilder) -> str | None:
    """Return why the kernel does not run on this machine, or None."""
    if builder is mx.fast.cuda_kernel:
        capability = int(mx.device_info().get("compute_capability_major", 0))
        return (
            None
            if capability >= CAPABILITY
            else "the kernel for latents needs an A100 or its successors"
        )
    if builder is mx.fast.metal_kernel:
        return gpu.why_no_tiles()
    return None if getattr(builder, "tiles", False) else "this backend has no tiles"


def attend(
    q: mx.array,
    code: Codec,
    stored: Stored,
    tokens: int,
    sink: mx.array | None,
    recent: mx.array,
    rotary: mx.array,
    scale: float,
    builder: KernelBuilder,
    sizes: Callable[..., mx.array] | None = None,
) -> mx.array:
    """Compute attention over latents for one new token per sequence.

    q: [B, H, 1, R], absorbed queries. code: affine codec, with a square transform or none.
    stored: codes [B, 1, T, W], scale and bias (`Affine.tensors`), of at least `tokens` tokens.
    sink, recent: latents [B, 1, n, R] in full precision; sink may be None.
    rotary: [B, H, 1, all tokens], added to the scores. scale: scale of the products with latents.
    sizes: for a step of fixed shapes, where `tokens`, recent and rotary include spare capacity: builds the kernel's
        sizes from (rows, splits of pages, capacity of codes, columns of rotary, capacity of recent) and the lengths,
        known on the device alone.
    Returns [B, H, 1, R] in the dtype of recent.
    """
    batch, rows, _, dims = q.shape
    quantizer, page, transform = code.quantizer, code.page, code.transform
    assert isinstance(quantizer, Affine)  # `why_not` checks it
    q_pages, up = q.astype(mx.float32).swapaxes(1, 2), None
    if transform is not None:
        q_pages, up = transform.query(q_pages), transform.up
    dtype, on_cuda = recent.dtype, builder is mx.fast.cuda_kernel
    group = quantizer.group_size(dims, page)
    by_channel = quantizer.axis == "channel"
    is_wide = (on_cuda or getattr(builder, "wide", False)) and not (by_channel and group % 32)
    per = 2 if is_wide else 1  # times 16 tokens per block: CUDA has the memory for 32
    block = 16 * per
    need = -(-rows // ROWS)
    groups = -(-need // MOST_TILES)
    tiles = -(-need // groups)
    n_sink = 0 if sink is None else sink.shape[2]
    n_recent = recent.shape[2]
    # Round up to the capacity of a step of fixed shapes in every step, so that both split work alike.
    page_blocks = (
        -(-page * grown(tokens // page) // block) if sizes is None else -(-tokens // block)
    )
    window_blocks = -(-n_sink // block) + -(-WINDOW * -(-n_recent // WINDOW) // block)
    page_splits = _splits(page_blocks, groups * batch, builder)
    split_blocks = -(-page_blocks // page_splits)
    splits = page_splits + min(MAX_SPLITS, -(-window_blocks // split_blocks))
    capacities = stored["codes"].shape[2], rotary.shape[3], n_recent
    if sizes is None:
        lengths = ints(rows, page_splits, tokens, n_sink, n_recent, *capacities, n_sink + tokens)
    else:
        lengths = sizes(rows, page_splits, *capacities)
    threads = 32 * tiles * HALVES
    out, stats = launch(
        "attend_latent",
        [
            q_pages.reshape(batch, rows, dims),
            q.reshape(batch, rows, dims).astype(dtype),
            stored["codes"],
            stored["scale"],
            stored.get("bias", nothing(mx.float16)),
            recent if sink is None else sink,
            recent,
            rotary.reshape(batch, rows, -1).astype(dtype),
            exponents(scale),
            lengths,
        ],
        {
            "T": dtype,
            "R": dims,
            "QT": tiles,
            "DH": HALVES,
            "M": per,
            "BITS": quantizer.bits,
            "GROUP": group,
            "CHANNEL": int(by_channel),
            "SYMMETRIC": int(quantizer.symmetric),
        },
        (threads * groups, splits, batch),
        (threads, 1, 1),
        [((batch * rows, splits, dims), mx.float32), ((batch * rows, splits, 2), mx.float32)],
        builder,
        f"{threads}, 2",
    )
    threads = 32 * min(8, dims // 32)
    (merged,) = launch(
        "merge",
        [
            out,
            stats,
            nothing() if up is None else up,
            nothing(),
            exponents(scale),
            ints(splits, page_splits, rows, 1, 1, 1, page_splits, 1),
        ],
        {
            "T": dtype,
            "WIDTH": dims,
            "RV": dims,
            "D": dims,
            "HAS_UP": int(up is not None),
            "HAS_SINKS": 0,
        },
        (threads * batch * rows, 1, 1),
        (threads, 1, 1),
        [((batch, rows, dims), dtype)],
        builder,
    )
    return merged.reshape(q.shape)


def _splits(blocks: int, readers: int, builder: KernelBuilder) -> int:
    """Return the number of splits of the pages' blocks. readers: threadgroups that read the same blocks."""
    cores = gpu.cores(builder)
    target = WANTED_CUDA if cores is None else PER_CORE * cores
    return max(1, min(MAX_SPLITS, round(target / readers), -(-blocks // LEAST_BLOCKS)))
