"""Predict decode attention by tiles on Apple's GPUs, nothing measured: bytes against the rate of the memory, issue
cycles against cores and clock. docs/internals/apple.md says how far to trust it."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.formats.layout import TOKENS
from mlxkv.formats.names import parse_kv
from mlxkv.metal import gpu

# Cores of a GPU, GHz, GB/s.
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
# Issue cycles of a simdgroup for a record and up to ROWS query rows, of 64, 128 and 256 dims (`agx.roofline`).
CYCLES = {
    "int8": {64: 964, 128: 1770, 256: 3502},
    "int4": {64: 948, 128: 1738, 256: 3488},
    "int3": {64: 804, 128: 1426, 256: 2755},
    "int2": {64: 861, 128: 1546, 256: 3050},
}
ROWS = 8
SCHEDULERS = 4  # of a core: each issues an instruction of 32 lanes in a cycle


def attend_us(preset: str, dims: int, kv_heads: int, rows: int, tokens: int) -> float | None:
    """Microseconds of one call. kv_heads: of all sequences; rows: of queries, for each of them; tokens: stored, of each
    sequence. None for a chip or a preset that is not in the tables."""
    chip = str(mx.device_info().get("device_name", "")).removeprefix("Apple ")
    if chip not in CHIPS or dims not in CYCLES.get(preset, {}):
        return None
    cores, clock, bandwidth = CHIPS[chip]
    cores = gpu.known_cores() or cores
    bandwidth = FEWER_CORES.get((chip, cores), bandwidth)
    records = kv_heads * tokens / TOKENS
    memory = records * TOKENS * token_bytes(preset, dims) / bandwidth
    cycles = records * -(-rows // ROWS) * CYCLES[preset][dims]
    return max(memory, cycles / (SCHEDULERS * cores * clock)) / 1000


def token_bytes(preset: str, dims: int) -> float:
    """Bytes that are read for a token of one kv head, scales included."""
    return 2 * dims * parse_kv(preset).bits_per_value(dims, dims) / 8
