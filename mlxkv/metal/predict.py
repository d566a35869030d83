"""Predict the time of decode attention on Apple GPUs, without measurements: bytes over memory bandwidth,
issue cycles over cores and clock. docs/internals/apple.md discusses its accuracy."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.formats.layout import TOKENS
from mlxkv.formats.names import parse_kv
from mlxkv.metal import gpu
from mlxkv.metal.attend import MOST_ROWS

# GPU cores, GHz, GB/s.
CHIPS = {
    "M1": (8, 1.278, 68),
    "M1 Pro": (16, 1.296, 200),
    "M1 Max": (32, 1.296, 400),
    "M1 Ultra": (64, 1.296, 800),
    "M2": (10, 1.398, 100),
    "M2 Pro": (19, 1.398, 200),
    "M2 Max": (38, 1.398, 400),
    "M2 Ultra": (76, 1.398, 800),
    "M3": (10, 1.398, 100),
    "M3 Max": (40, 1.398, 400),
    "M4": (10, 1.578, 120),
    "M4 Pro": (20, 1.578, 273),
    "M4 Max": (40, 1.578, 546),
}
FEWER_CORES = {("M3 Max", 30): 300, ("M4 Max", 32): 410}  # GB/s
# Issue cycles of a simdgroup per record (`agx.roofline`), by dims: of `attend_tile`, for up to TILE_ROWS query rows.
TILES = {
    "int8": {64: 952, 128: 1746, 256: 3384},
    "int4": {64: 936, 128: 1714, 256: 3336},
    "int3": {64: 804, 128: 1426, 256: 2696},
    "int2": {64: 853, 128: 1538, 256: 2980},
}
TILE_ROWS = 8
# And of `attend`, for 1, 2, 3 and 4 query rows.
MULTIPLY_ADDS = {
    "int8": {64: (299, 398, 504, 571), 128: (524, 682, 899, 1157), 256: (974, 1414, 2430, 2430)},
    "int4": {64: (288, 386, 491, 560), 128: (510, 668, 885, 1155), 256: (947, 1376, 2386, 2386)},
    "int3": {64: (240, 342, 464, 528), 128: (436, 621, 810, 1084), 256: (1040, 1501, 2388, 2388)},
    "int2": {64: (282, 386, 467, 537), 128: (484, 618, 810, 1080), 256: (908, 1276, 2246, 2246)},
}
SCHEDULERS = 4  # per core: each issues one instruction for 32 lanes per cycle


def attend_us(
    preset: str, dims: int, kv_heads: int, rows: int, tokens: int, by_tiles: bool = True
) -> float | None:
    """Return the microseconds of one call, or None for a chip or preset that the tables lack.

    kv_heads: over all sequences. rows: query rows per kv head. tokens: stored tokens per sequence. by_tiles: by
    `attend_tile`, else by `attend`.
    """
    chip = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
    if chip not in CHIPS or dims not in TILES.get(preset, {}):
        return None
    cores, clock, bandwidth = CHIPS[chip]
    cores = gpu.known_cores() or cores
    bandwidth = FEWER_CORES.get((chip, cores), bandwidth)
    records = kv_heads * tokens / TOKENS
    memory = records * TOKENS * token_bytes(preset, dims) / bandwidth
    groups = -(-rows // (TILE_ROWS if by_tiles else MOST_ROWS))
    each = TILES[preset][dims] if by_tiles else MULTIPLY_ADDS[preset][dims][-(-rows // groups) - 1]
    return max(memory, records * groups * each / (SCHEDULERS * cores * clock)) / 1000


def token_bytes(preset: str, dims: int) -> float:
    """Return the bytes read per token and kv head, scales included."""
    return 2 * dims * parse_kv(preset).bits_per_value(dims, dims) / 8
