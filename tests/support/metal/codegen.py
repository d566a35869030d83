"""Compile texts with a clang that has code generators: which private arrays stay in memory, and how many registers
an AMD GPU needs that is held to 128, as a thread of 256 on Apple's has them.

Both are stand-ins. What is approximated: another compiler of another age than Apple's; a library of one or two
instructions a function (`amd.h`), matrices multiplied by one; no preamble of MLX's; 32 lanes, as Apple's GPUs have.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metal.parse import HERE, translate
from metal.signature import ATTRIBUTES, Kernel

SWITCH = "MLXKV_CLANG"  # an environment variable: which clang
OLDEST, NEWEST = 16, 22
WORDS = 8  # a private array up to here may stay in memory: 32 bytes
REGISTERS = 128
SOURCES = {  # of what a text names, on AMD: as kernel arguments they would be equal in all threads
    "thread_index_in_simdgroup": "metal::metal_lane()",
    "thread_index_in_threadgroup": "__builtin_amdgcn_workitem_id_x()",
    "simdgroup_index_in_threadgroup": "__builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x() >> 5)",
    "simdgroups_per_threadgroup": "{threads} / 32u",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "threads_per_threadgroup": "(uint3)({threads}u, 1u, 1u)",
    "thread_position_in_threadgroup": "(uint3)(__builtin_amdgcn_workitem_id_x(), 0u, 0u)",
    "threadgroup_position_in_grid": "(uint3)({group})",
    "thread_position_in_grid": "(uint3)(__builtin_amdgcn_workgroup_id_x() * {threads}u + "
    "__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z())",
    "threadgroups_per_grid": "(uint3)(__builtin_amdgcn_grid_size_x() / {threads}u, "
    "__builtin_amdgcn_grid_size_y(), __builtin_amdgcn_grid_size_z())",
    "threads_per_grid": "(uint3)(__builtin_amdgcn_grid_size_x(), __builtin_amdgcn_grid_size_y(), "
    "__builtin_amdgcn_grid_size_z())",
}
GROUP = ", ".join(f"__builtin_amdgcn_workgroup_id_{x}()" for x in "xyz")


@cache
def clang() -> str | None:
    """A clang that compiles for spir64 and for AMD's GPUs, the newest here, or that of MLXKV_CLANG."""
    asked = os.environ.get(SWITCH)
    names = [f"clang-{n}" for n in range(NEWEST, OLDEST - 1, -1)]
    for name in [asked] if asked else filter(shutil.which, names):
        said = subprocess.run([name, "--print-targets"], capture_output=True, text=True)
        if "amdgcn" in said.stdout:
            return name
    return None


def why_not() -> str | None:
    """Why nothing is compiled here, or None."""
    if os.environ.get(SWITCH) and not shutil.which(os.environ[SWITCH]):
        return f"{SWITCH}={os.environ[SWITCH]} is no program"
    return (
        None if clang() else f"no clang-{OLDEST} or newer with AMD's GPUs; {SWITCH}=... names one"
    )


class CompileError(Exception):
    """Clang refused a text; its first error."""


def _before(*files: str) -> str:
    return "#define METAL_LEVEL 320\n" + "\n".join((HERE / x).read_text() for x in files)


def _run(text: str, flags: Sequence[str], timeout: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "text.clcpp", Path(folder) / "out"
        source.write_text(text, encoding="utf-8")
        args = [clang(), "-x", "clcpp", "-cl-no-stdinc", "-O2", "-Wno-everything", *flags]
        done = subprocess.run(
            [*args, "-S", "-o", out, source], capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            errors = [x for x in done.stderr.splitlines() if "error" in x]
            raise CompileError((errors or [done.stderr])[0])
        return out.read_text()


# Names of MLX's preamble. And functions of a text are all put into the kernel: Apple's compiler does so too.
INLINE = "typedef bfloat bfloat16_t;\ntypedef half float16_t;\n"
INLINE += "#undef inline\n#define inline inline __attribute__((always_inline))\n"


def private_arrays(kernel: Kernel, words: int = WORDS, timeout: int = 120) -> list[tuple[str, int]]:
    """(type, bytes) of the private arrays of more than `words` words that are left in memory at -O2, the
    largest first."""
    text = _before("words.h", "bodies.h", "vectors.h") + INLINE + translate(kernel.text())
    ir = _run(text, ["-cl-std=clc++2021", "-target", "spir64", "-emit-llvm"], timeout)
    found = []
    types = dict(re.findall(r"^(%\S+) = type (.*)$", ir, re.M))
    for kind in re.findall(r"= alloca (.+?), align", ir):
        size = _bytes(kind, types)
        if size > 4 * words:
            found.append((kind, size))
    return sorted(found, key=lambda x: -x[1])


def _bytes(kind: str, types: dict[str, str]) -> int:
    """Of a type of LLVM's."""
    kind = kind.strip()
    if kind in types:
        return _bytes(types[kind], types)
    if match := re.fullmatch(r"[\[<](\d+) x (.*)[\]>]", kind):
        return int(match[1]) * _bytes(match[2], types)
    if kind[:1] in "{<":
        depth, start, parts, inner = 0, 0, [], kind.strip("<>").strip()[1:-1]
        for i, letter in enumerate(inner):
            depth += (letter in "[{<") - (letter in "]}>")
            if letter == "," and not depth:
                parts.append(inner[start:i])
                start = i + 1
        return sum(_bytes(x, types) for x in [*parts, inner[start:]])
    sizes = {"float": 4, "half": 2, "double": 8, "ptr": 8}
    if match := re.fullmatch(r"i(\d+)", kind):
        return -(-int(match[1]) // 8)
    return sizes.get(kind, 8)


@dataclass(frozen=True)
class Registers:
    """Of the AMD stand-in: vector registers of a thread, how many of them were spilled, bytes of scratch memory of a
    thread, of threadgroup memory, and of code."""

    vgprs: int
    spilled: int
    scratch: int
    shared: int
    code: int


def registers(
    kernel: Kernel, threads: int, limit: int = REGISTERS, timeout: int = 300
) -> Registers:
    """What the kernel takes with threadgroups of `threads` and at most `limit` registers a thread."""
    values = {"threads": threads, "group": GROUP}
    given = "".join(
        f"const {ATTRIBUTES[name]} {name} = {SOURCES[name].format(**values)};\n"
        for name in kernel.attributes
    )
    parameters = ",\n".join(re.sub(r" \[\[.*\]\]", "", x) for x in kernel.buffers)
    # So many simdgroups share a core's 1024: the scheduler works towards it, the limit is kept.
    held = (
        f"amdgpu_flat_work_group_size({threads}, {threads}), amdgpu_num_vgpr({limit}), "
        f"amdgpu_waves_per_eu({1024 // limit}, {1024 // limit})"
    )
    text = (
        _before("words.h", "bodies.h", "amd.h", "vectors.h")
        + INLINE
        + translate(kernel.header)
        + f"__kernel __attribute__(({held})) void {kernel.function()}(\n{parameters}) {{\n"
        + f"{given}{kernel.source}\n}}\n"
    )
    target = ["-target", "amdgcn-amd-amdhsa", "-mcpu=gfx1030", "-nogpulib"]
    said = _run(text, ["-cl-std=clc++1.0", *target], timeout)

    def number(pattern: str) -> int:
        return max(map(int, re.findall(pattern, said)))

    return Registers(
        number(r"\.vgpr_count: *(\d+)"),
        number(r"\.vgpr_spill_count: *(\d+)"),
        number(r"; ScratchSize: *(\d+)"),
        number(r"; LDSByteSize: *(\d+)"),
        number(r"; codeLenInByte = *(\d+)"),
    )
