"""Predict the time of decode attention by tiles on Apple GPUs, without measurements: bytes over memory bandwidth,
issue cycles over cores and clock. docs/internals/apple.md discusses its accuracy."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.formats.layout import TOKENS
from mlxkv.formats.names import parse_kv
from mlxkv.metal import gpu

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
# Issue cycles per simdgroup and record, for up to ROWS query rows of 64, 128 and 256 dims (`agx.roofline`).
CYCLES = {
    "int8": {64: 964, 128: 1770, 256: 3502},
    "int4": {64: 948, 128: 1738, 256: 3488},
    "int3": {64: 804, 128: 1426, 256: 2755},
    "int2": {64: 861, 128: 1546, 256: 3050},
}
ROWS = 8
SCHEDULERS = 4  # per core: each issues one instruction for 32 lanes per cycle


def attend_us(preset: str, dims: int, kv_heads: int, rows: int, tokens: int) -> float | None:
    """Return the microseconds of one call, or None for a chip or preset that the tables lack.

    kv_heads: over all sequences. rows: query rows per kv head. tokens: stored tokens per sequence.
    """
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
    """Return the bytes read per token and kv head, scales included."""
    return 2 * dims * parse_kv(preset).bits_per_value(dims, dims) / 8
