"""The preamble that MLX puts before every text: from its own headers, as its build does it.

`make_compiled_preamble.sh` of MLX writes the files in the order of inclusion and drops the lines that include
others of its own. `digestible` then makes the fewest changes with which C++ for OpenCL reads it.
"""

import re
from functools import cache
from pathlib import Path

FOLDER = "mlx/backend/metal/kernels"
FIRST = f"{FOLDER}/utils.h"


def root() -> Path:
    """The folder `include` of the installed MLX."""
    import mlx.core as mx

    return Path(mx.__file__).parent / "include"


def files(name: str = FIRST, seen: tuple[str, ...] = ()) -> list[str]:
    """The headers in the order of inclusion, each once, those that are included first."""
    out = list(seen)
    if name not in out:
        for other in re.findall(r'^#include "(.*\.h)"', (root() / name).read_text(), re.M):
            out = files(other, tuple(out))
        out.append(name)
    return out


@cache
def preamble() -> str:
    """`metal::utils()` of MLX: what stands before the text of a custom kernel."""
    out = []
    for name in files():
        lines = (root() / name).read_text().splitlines()
        kept = [x for x in lines if not re.search(r'#include ".*.h"|#pragma once', x)]
        out.append("\n".join([f'#line 1 "{name}"', *kept, ""]))
    return "\n".join(out)


# (pattern, replacement, why): all that is changed in MLX's preamble. Each makes it easier to read for C++
# for OpenCL, none touches a name that a text of ours could meet.
CHANGES = [
    (r"^#include <.*$", "", "Metal's library is words.h"),
    (r"\b__metal_\w+(?=\()", "metal_below", "builtins of Metal's compiler"),
    (r"\) thread : (?=real)", ") : ", "a temporary has no address space in C++ for OpenCL"),
    (r"return Limits<bfloat16_t>::max;", "return x;", "words.h copies no bfloat out of `constant`"),
    (r"^static_assert\((?:[^;{]|\{[^}]*\})*;", "", "MLX's own tests of complex numbers"),
]


def digestible() -> str:
    """The preamble with `CHANGES`."""
    text = preamble()
    for pattern, replacement, _ in CHANGES:
        text = re.sub(pattern, replacement, text, flags=re.M)
    return text
