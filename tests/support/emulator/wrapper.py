"""Writes the C++ text around a body, by the rules by which MLX writes the Metal text."""

import re
from collections.abc import Sequence
from typing import Any

from emulator import dtypes
from emulator.fault import EmulatorFault

MAX_CONSTANT = 8  # smaller inputs live in `constant` memory

# MLX looks for these names in the source, comments included. The order is MLX's.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# How the core hands them over, see `Attributes` in core.cpp.
_FROM_CORE = {
    "simdgroup_index_in_threadgroup": "a.simdgroup",
    "thread_index_in_simdgroup": "a.lane",
    "thread_index_in_threadgroup": "a.index",
    "thread_position_in_grid": "a.in_grid",
    "thread_position_in_threadgroup": "a.in_group",
    "threadgroup_position_in_grid": "a.group_at",
    "threadgroups_per_grid": "a.groups",
    "threads_per_grid": "a.grid",
    "threads_per_threadgroup": "a.threads",
}

_ENTRY = """
struct EmuThree {{
  uint x, y, z;
  __attribute__((no_sanitize("thread", "undefined"))) operator uint3() const {{
    return uint3(x, y, z);
  }}
}};
struct EmuAttributes {{
  EmuThree in_grid, in_group, group_at, grid, threads, groups;
  uint index, lane, simdgroup;
}};
extern "C" __attribute__((no_sanitize("thread", "undefined")))
void emu_entry(const EmuAttributes* attributes, void* const* b) {{
  const EmuAttributes& a = *attributes;
  emu_kernel{template}({arguments});
}}
"""


def attributes_in(source: str) -> list[str]:
    return [name for name in ATTRIBUTES if name in source]


def info_in(source: str, name: str) -> list[str]:
    """Which of x_shape, x_strides, x_ndim MLX would add for the input `x`."""
    return [part for part in ("shape", "strides", "ndim") if f"{name}_{part}" in source]


def blank_comments(source: str) -> str:
    """The same text with spaces for comments: places stay."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.S)


_TYPE = r"(?:alignas\([^)]*\)\s*)?[A-Za-z_][\w:]*(?:\s*<[^;{}]*?>)?"
_NAME = r"\s*\w+\s*(?:\[[^\];]*\]\s*)*"
_SHARED = re.compile(rf"(?<![\w.])threadgroup\s+({_TYPE})\s+({_NAME}(?:,{_NAME})*);")
_MISSED = re.compile(rf"(?<![\w.])threadgroup\s+{_TYPE}\s+\w+\s*[\[;=]")


def place_shared(source: str) -> str:
    """Turns `threadgroup T name[N];` into references to memory of the core, line by line."""
    code = blank_comments(source)
    out, end, count = [], 0, 0
    missed = _MISSED.search(_SHARED.sub(lambda match: " " * len(match[0]), code))
    if missed:
        raise EmulatorFault("dialect", f"cannot read this declaration: {missed[0]}")
    for found in _SHARED.finditer(code):
        before = code[: found.start()]
        if before.count("{") != before.count("}"):
            raise EmulatorFault(
                "dialect",
                f"threadgroup memory only at the top scope of the body: {found[0]}",
                where=f"line {before.count(chr(10)) + 1}",
            )
        text = ""
        for item in _split(found[2]):
            name, dims = re.fullmatch(r"\s*(\w+)\s*((?:\[.*\])?)\s*", item, flags=re.S).groups()
            text += f'auto& {name} = emu::shared<{found[1]}{dims}>({count}u, "{name}"); '
            count += 1
        out += [source[end : found.start()], text.replace("\n", " "), "\n" * found[0].count("\n")]
        end = found.end()
    return "".join([*out, source[end:]])


def _split(declarators: str) -> list[str]:
    """Splits at commas outside of brackets."""
    parts, depth = [""], 0
    for char in declarators:
        depth += (char in "[(<") - (char in "])>")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def template_text(template: Sequence[tuple[str, Any]]) -> tuple[str, str]:
    """Parameter list and arguments of the kernel's template."""
    numbers = [isinstance(value, int) for _, value in template]
    kinds = ["int" if number else "typename" for number in numbers]
    names = [f"{kind} {name}" for kind, (name, _) in zip(kinds, template, strict=True)]
    values = [
        str(value) if number else dtypes.NAMES[dtypes.type_name(value)]
        for number, (_, value) in zip(numbers, template, strict=True)
    ]
    return ", ".join(names), ", ".join(values)


def write_source(
    name: str,
    source: str,
    header: str,
    inputs: Sequence[tuple[str, str, int, int]],
    outputs: Sequence[tuple[str, str]],
    template: Sequence[tuple[str, Any]],
    writable: Sequence[str] = (),
) -> str:
    """The whole C++ text. `inputs`: (name, type, size, ndim); `outputs`: (name, type)."""
    parameters, arguments = [], []

    def add(type_: str, parameter: str, value: str | None = None) -> None:
        parameters.append(f"{type_} {parameter}")
        arguments.append(value or f"({type_})b[{len(arguments)}]")

    for input_, dtype, size, ndim in inputs:
        space = "constant" if size < MAX_CONSTANT else "device"
        if ndim == 0:
            raise EmulatorFault("dialect", f"0-d input {input_}: pass a one-element array")
        add(f"const {space} {dtypes.NAMES[dtype]}*", input_)
        if input_ in writable and space == "constant":
            what = (
                f"{input_} is written and has {size} elements: below {MAX_CONSTANT} it is constant"
            )
            raise EmulatorFault("dialect", what)
        for part in info_in(source, input_):
            type_ = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}[part]
            value = f"*(const int*)b[{len(arguments)}]" if part == "ndim" else None
            add(f"const constant {type_}", f"{input_}_{part}", value)
    for output, dtype in outputs:
        add(f"device {dtypes.NAMES[dtype]}*", output)
    for attribute in attributes_in(source):
        if attribute not in _FROM_CORE:
            raise EmulatorFault("dialect", f"no kernel has asked for {attribute} so far")
        parameters.append(f"{ATTRIBUTES[attribute]} {attribute}")
        arguments.append(_FROM_CORE[attribute])

    names, values = template_text(template)
    return "\n".join(
        [
            '#include "metal.h"',
            "using namespace metal;",
            f'#line 1 "{name}.h"',
            header,
            f"template <{names}>" if template else "",
            "__attribute__((noinline)) void emu_kernel(",
            "  " + ",\n  ".join(parameters) + ") {",
            f'#line 1 "{name}.metal"',
            place_shared(source),
            "}",
            '#line 1 "entry"',
            _ENTRY.format(
                template=f"<{values}>" if template else "", arguments=", ".join(arguments)
            ),
        ]
    )
