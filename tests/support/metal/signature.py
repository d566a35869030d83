"""Write the text of a custom kernel as MLX does.

Read in `mlx/backend/metal/custom_kernel.cpp` of MLX 0.31.2 and `mlx/backend/common/metal_kernel.cpp` of
0.32.0 and 0.32.1: the two ends of the pinned range. What differs is data here: `NAMES_TYPES`.
`test_signature.py` holds this against the text that MLX itself prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
from emulator.wrapper import ATTRIBUTES

VERSIONS = ("0.31.2", "0.32")
# "Include them in the kernel name so that a given name always maps to the same source": since 0.32.
NAMES_TYPES = {"0.31.2": False, "0.32": True}
CONSTANT_BELOW = 8  # `max_constant_array_size`: inputs of fewer elements are `constant`
TYPES = {  # `get_type_string`
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.complex64: "complex64_t",
    mx.bool_: "bool",
    **{getattr(mx, name): f"{name}_t" for name in ("int8", "int16", "int32", "int64")},
    **{getattr(mx, name): f"{name}_t" for name in ("uint8", "uint16", "uint32", "uint64")},
}
INFO = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}


@dataclass(frozen=True)
class Input:
    """An input of a call: its name, its type in the text, and how it is passed."""

    name: str
    type: str
    small: bool  # fewer than `CONSTANT_BELOW` elements
    scalar: bool  # of no dimension

    @staticmethod
    def of(name: str, x: mx.array) -> Input:
        return Input(name, TYPES[x.dtype], x.size < CONSTANT_BELOW, x.ndim == 0)


@dataclass(frozen=True)
class Kernel:
    """All that the text of a call depends on. outputs: (name, type)."""

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, str], ...]
    source: str
    header: str

    def function(self, version: str = VERSIONS[-1]) -> str:
        """The name of the function."""
        out = f"custom_kernel_{self.name}"
        if NAMES_TYPES[version]:
            for x in self.inputs:
                out += f"_{x.type}" + ("s" if x.scalar else "c" if x.small else "")
            out += "".join(f"_{kind}" for _, kind in self.outputs)
        return out

    @cached_property
    def attributes(self) -> list[str]:
        """The attributes that MLX finds, by substring, comments included."""
        return [name for name in ATTRIBUTES if name in self.source]

    @cached_property
    def buffers(self) -> list[str]:
        """The parameters that are buffers, as they are written, without their commas."""
        out = []
        for x in self.inputs:
            space, mark = "constant" if x.small else "device", "&" if x.scalar else "*"
            out.append(f"  const {space} {x.type}{mark} {x.name}")
            for part, kind in INFO.items():
                if not x.scalar and f"{x.name}_{part}" in self.source:
                    out.append(f"  const constant {kind} {x.name}_{part}")
        out += [f"  device {kind}* {name}" for name, kind in self.outputs]
        return [f"{line} [[buffer({i})]]" for i, line in enumerate(out)]

    def text(self, version: str = VERSIONS[-1]) -> str:
        """The text that MLX compiles behind its preamble."""
        return f"{self.header}{self.tail(version)}"

    def tail(self, version: str = VERSIONS[-1]) -> str:
        """The text behind the header."""
        return self._signature(version) + self.source + "\n}\n"

    def _signature(self, version: str) -> str:
        attributes = [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in self.attributes]
        out = f"[[kernel]] void {self.function(version)}(\n"
        # An output ends the list where none seems to follow: MLX counts the inputs, not the buffers.
        ends = len(self.inputs) + len(self.outputs) - 1
        for i, line in enumerate(self.buffers):
            goes_on = i < len(self.buffers) - len(self.outputs) or i < ends or attributes
            out += line + (",\n" if goes_on else ") {\n")
        return out + ",\n".join(attributes) + (") {\n" if attributes else "")


def kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
) -> Kernel:
    """What one call of `mx.fast.metal_kernel(...)` compiles, without template values."""
    return Kernel(
        name,
        tuple(Input.of(*one) for one in zip(input_names, inputs, strict=True)),
        tuple((one, TYPES[d]) for one, d in zip(output_names, output_dtypes, strict=True)),
        source,
        header,
    )
