"""Type check with clang, address spaces being part of the types, and the lint of the dialect."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from emulator import dtypes, wrapper
from emulator.build import CPP
from emulator.kernel import Kernel
from emulator.lint import lint

FLAGS = [
    *("-fsyntax-only", "-std=c++20", "-ferror-limit=5", "-Werror=vla", "-Werror=vla-extension"),
    *("-Werror=implicit-float-conversion", "-Werror=double-promotion", "-Werror=uninitialized"),
    *("-Werror=sometimes-uninitialized", "-Werror=return-type", "-Werror=literal-range"),
    *("-Werror=infinite-recursion", "-Wno-unknown-attributes", "-Wno-literal-conversion"),
]


@functools.cache
def clang() -> str | None:
    """The newest clang++ on this machine; concepts and address spaces need 16 or later."""
    names = [*(f"clang++-{version}" for version in range(30, 15, -1)), "clang++"]
    for name in filter(shutil.which, names):
        version = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"version (\d+)", version)
        if found and int(found[1]) >= 16:
            return name
    return None


def why_not() -> str | None:
    return None if clang() else "no clang++ 16 or newer on this machine"


def strict_text(
    kernel: Kernel, inputs: Sequence[Any], output_dtypes: Sequence[Any], template: Any = ()
) -> str:
    """The text that clang checks: the wrapper of the emulator with another header before it."""
    arrays = [dtypes.as_array(x) for x in inputs]
    text = kernel.text(arrays, [dtypes.type_name(d) for d in output_dtypes], template)
    text = text.replace('#include "metal.h"\nusing namespace metal;', '#include "strict.h"')
    # A local of an address space must not be automatic: here it is a declaration.
    text = re.sub(
        r"auto& (\w+) = emu::shared<([^\[\]>]+)((?:\[.*?\])*)>\(\d+u, \"\w+\"\);",
        r"extern threadgroup \2 \1\3;",
        text,
    )
    text = text[: text.index('#line 1 "entry"')]
    _, values = wrapper.template_text(template)
    # Taking the address instantiates the template, and with it every check.
    return text + f"void strict_use() {{ (void)&emu_kernel<{values}>; }}" if values else text


def check(
    kernel: Kernel, inputs: Sequence[Any], output_dtypes: Sequence[Any], template: Any = ()
) -> list[str]:
    """Breaches of the dialect in this kernel, as lines of text; empty when it is clean."""
    found = lint(kernel.source, kernel.header, kernel.input_names, kernel.output_names)
    text = strict_text(kernel, inputs, output_dtypes, template)
    # The syntax tree, for what C++ allows in a cast and Metal does not.
    command = [clang(), *FLAGS, "-Xclang", "-ast-dump", f"-I{CPP}", "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line]
        found += lines or [done.stderr]
    casts = re.findall(r"CStyleCastExpr.*'(.*)' <AddressSpaceConversion>", done.stdout)
    return found + [
        f"a cast into another address space: {target}" for target in dict.fromkeys(casts)
    ]
