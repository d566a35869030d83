"""Kernel sources: their files, and the names of their inputs and outputs. Imports no framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

# name: (inputs, outputs), in the order of the body's arguments
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "quantize": (("keys", "values", "table_k", "table_v", "size"), ("records",)),
    "quantize_channel": (("keys", "values", "size"), ("records", "headers")),
    "whiten": (("rows", "numbers"), ("out",)),
    "dequantize": (
        ("records", "headers", "sink_k", "sink_v", "recent_k", "recent_v", "size"),
        ("out",),
    ),
    "attend": (
        (
            *("q", "records", "headers", "sink_k", "sink_v", "recent_k", "recent_v"),
            *("size", "lengths", "scale", "down", "records_2", "headers_2", "down_2"),
        ),
        ("partial_out", "partial_stats"),
    ),
    "attend_tile": (
        (
            *("q", "records", "headers", "sink_k", "sink_v", "recent_k", "recent_v"),
            *("map_k", "map_v", "sinks", "size", "counter"),
            *("records_2", "headers_2", "map_k_2", "map_v_2"),
        ),
        ("out", "partial_out"),
    ),
    "attend_latent": (
        (
            *("q_pages", "q_window", "codes", "scales", "biases", "sink", "recent", "rotary"),
            *("scale", "size"),
        ),
        ("partial_out", "partial_stats"),
    ),
    "merge": (("partial_out", "partial_stats", "up", "sinks", "scale", "size"), ("out",)),
}
HEADERS = {  # files that precede a body; the tile file of the backend precedes the codes of tiles
    "quantize": (
        *("codes.h", "loads.h", "butterflies.h", "select.h", "quantize.h", "quantize_codebook.h"),
        *("quantize_half.h", "quantize_mixed_bits.h"),
    ),
    "quantize_channel": ("codes.h", "loads.h", "select.h", "quantize.h"),
    "attend": ("codes.h", "loads.h", "tree.h", "mixed_bits.h", "attend.h"),
    "dequantize": ("codes.h", "loads.h", "tree.h", "mixed_bits.h", "dequantize.h"),
    "attend_tile": ("codes.h", "tree.h", "mixed_bits.h", "tile.h", "tile_codes.h"),
    "attend_latent": ("codes.h", "loads.h", "tile.h"),
    "whiten": (),
    "merge": (),
}
BODIES = {  # bodies of more than one file
    "attend": tuple(
        f"attend{part}.metal" for part in ("", "_keys", "_values", "_windows", "_join")
    ),
    "attend_tile": tuple(
        f"attend_tile{part}.metal" for part in ("", "_read", "_values", "_windows", "_merge")
    ),
}
# Source sections between `#if WITH_NAME` and `#endif`, and the template values that enable them.
# Sections that a format does not use are left out: they would slow down a Mac's compiler.
FEATURES = {
    "WITH_TREE": ("TREE", 1),
    "WITH_PAIRS": ("PAIRS", 1),
    "WITH_CODEBOOK": ("CODEBOOK", 1),
    "WITH_CHANNEL": ("CHANNEL", 1),
    "WITH_PER_TOKEN": ("PER_TOKEN_K", 1),
    "WITH_HALVES": ("BITS", 16),
    "WITH_TRANSFORM": ("KIND", 1),
    "WITH_CLIP": ("RANK", 2),
    "WITH_MIXED_BITS": ("MIXED_BITS", 1),
    "WITH_PLAIN_K": ("PLAIN_K", 1),
    "WITH_PLAIN_V": ("PLAIN_V", 1),
    "WITH_DECODED_K": ("DECODED_K", 1),
    "WITH_DECODED_V": ("DECODED_V", 1),
}
Features = frozenset[str]
ALL: Features = frozenset(FEATURES)


def features(template: Mapping[str, object]) -> Features:
    """Return the source sections that these template values enable; a value of either side is enough."""
    return frozenset(
        name
        for name, (word, minimum) in FEATURES.items()
        if any(
            isinstance(value := template.get(word + side), int) and value >= minimum
            for side in ("", "_K", "_V")
        )
    )


@cache
def path(name: str) -> Traversable:
    """Return the path of file `name` in `text/` or its subfolders, where names are unique."""
    home = files("mlxkv.metal").joinpath("text")
    paths = (
        folder / name
        for folder in [home, *(folder for folder in home.iterdir() if folder.is_dir())]
    )
    return next(file for file in paths if file.is_file())


def read_source(name: str) -> str:
    """Return a source file without comments and indentation.

    MLX searches comments for names, too, and long sources cost time at every call.
    """
    text = path(name).read_text(encoding="ascii")
    text = re.sub(r"//[^\n]*", "", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def resolved(text: str, parts: Features) -> str:
    """Return `text` with every `#if WITH_NAME` and `#if WITH_A || WITH_B` resolved."""
    out, open_ = [], []  # per open condition: whether its lines stay, None for other conditions
    for line in text.splitlines(keepends=True):
        word, _, condition = line.strip().partition(" ")
        if word == "#if" and condition.startswith("WITH_"):
            open_.append(any(name.strip() in parts for name in condition.split("||")))
            continue
        if word in ("#if", "#ifdef", "#ifndef"):
            open_.append(None)
        elif word == "#else" and open_[-1] is not None:
            open_[-1] = not open_[-1]
            continue
        elif word == "#endif" and open_.pop() is not None:
            continue
        if False not in open_:
            out.append(line)
    return "".join(out)


def headers(name: str, on_cuda: bool = False) -> list[str]:
    """Return the files that precede the body `name`."""
    names = list(HEADERS[name])
    if "tile.h" in names:
        names.insert(names.index("codes.h"), "tile_cuda.h" if on_cuda else "tile_metal.h")
    return ["cuda.h", *names] if on_cuda else names


def bodies(name: str) -> tuple[str, ...]:
    """Return the files of the body `name`."""
    return BODIES.get(name, (f"{name}.metal",))


def body(name: str, parts: Features = ALL) -> str:
    """Return the source of the body `name`."""
    return resolved("".join(map(read_source, bodies(name))), parts)


def header(name: str, on_cuda: bool = False, parts: Features = ALL) -> str:
    """Return the source that precedes the body `name`."""
    return resolved("".join(map(read_source, headers(name, on_cuda))), parts)
