"""The texts of the kernels: their files, the names of what they read and write. No framework."""

from __future__ import annotations

import re
from importlib.resources import files

# name: (inputs, outputs), in the order in which the body names them
SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "seal": (("keys", "values", "table_k", "table_v", "size"), ("records",)),
    "seal_channel": (("keys", "values", "size"), ("records", "headers")),
    "balance": (("x", "numbers"), ("tokens", "channels")),
    "whiten": (("rows", "numbers"), ("out",)),
    "unseal": (("records", "headers", "sink", "live", "size"), ("out",)),
    "attend": (
        (
            *("q_pages", "q_window", "records", "headers", "sink_k", "sink_v", "live_k", "live_v"),
            *("size", "lengths", "scale", "records_2", "headers_2"),
        ),
        ("partial_out", "partial_stats"),
    ),
    "attend_tile": (
        (
            *("q", "records", "headers", "sink_k", "sink_v", "live_k", "live_v"),
            *("map_k", "map_v", "sinks", "size", "counter"),
            *("records_2", "headers_2", "map_k_2", "map_v_2"),
        ),
        ("out", "partial_out"),
    ),
    "merge": (("partial_out", "partial_stats", "up", "sinks", "scale", "size"), ("out",)),
}
HEADERS = {  # before the others stands codes.h alone; tile.h stands for that of the machine too
    "seal": (
        *("codes.h", "butterflies.h", "select.h", "seal.h", "seal_codebook.h", "seal_half.h"),
    ),
    "seal_channel": ("codes.h", "butterflies.h", "select.h", "seal.h"),
    "attend": ("codes.h", "tree.h"),
    "unseal": ("codes.h", "tree.h"),
    "attend_tile": ("codes.h", "tree.h", "tile.h", "tile_codes.h"),
}
BODIES = {  # where a body is more than one file
    "attend": ("attend.metal", "attend_keys.metal", "attend_values.metal", "attend_join.metal"),
    "attend_tile": tuple(
        f"attend_tile{part}.metal" for part in ("", "_read", "_values", "_windows", "_merge")
    ),
}


def read(name: str) -> str:
    """The text of a file of this folder without comments and indentation: MLX looks for names in
    comments too, and long texts cost time at every call."""
    text = files("mlxkv.metal").joinpath(name).read_text(encoding="ascii")
    text = re.sub(r"//[^\n]*", "", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def headers(name: str, on_cuda: bool = False) -> list[str]:
    """The files that stand before the body `name`."""
    names = list(HEADERS.get(name, ("codes.h",)))
    if "tile.h" in names:
        names.insert(0, "tile_cuda.h" if on_cuda else "tile_metal.h")
    return ["cuda.h", *names] if on_cuda else names


def bodies(name: str) -> tuple[str, ...]:
    """The files of the body `name`."""
    return BODIES.get(name, (f"{name}.metal",))


def body(name: str) -> str:
    """The text of the body `name`."""
    return "".join(map(read, bodies(name)))


def header(name: str, on_cuda: bool = False) -> str:
    """What stands before the body `name`."""
    return "".join(map(read, headers(name, on_cuda)))
