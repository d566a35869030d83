"""Runs kernel bodies in the dialect of `mx.fast.metal_kernel` on a CPU. See README.md beside this."""

from emulator.build import can_check, why_not
from emulator.dtypes import bfloat16, to_bfloat16, to_float32
from emulator.fault import EmulatorFault
from emulator.kernel import Kernel, metal_kernel, tile_header

__all__ = [
    "EmulatorFault",
    "Kernel",
    "bfloat16",
    "can_check",
    "metal_kernel",
    "tile_header",
    "to_bfloat16",
    "to_float32",
    "why_not",
]
