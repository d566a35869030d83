"""What `--kv` takes: presets, pairs, and names that have numbers in them. No framework.

    KEYS/VALUES              int8/int4: keys and windows of the first, values of the second
    static-NUMBER[+EXTRA]    low rank (StaticPCA); +windows keeps the first and the last 32 tokens
    oja-NUMBER[+EXTRA]       low rank that follows the text (OjaKV), with these windows
    NAME+keepX, NAME+pagesX  of any of them, the share X of a prompt's sealed tokens, or pages, stays

NUMBER: 0.75 of the head dim, r96 dims, or e0.95 of the energy. EXTRA: a preset whose codes are taken
(int4), and for oja also transport, segments, segments4, stay; raw, the update as published; fast, rates of
1 and 0.5; all, taught by every token of a prompt; prompt, without updates while decoding.
"""

from __future__ import annotations

import re

from mlxkv.config import CacheConfig
from mlxkv.errors import UserError
from mlxkv.formats_lowrank import STORED, Half, LowRank
from mlxkv.presets import PRESETS, low_rank

METHODS = ("static", "oja")
NUMBER = re.compile(r"(?P<kind>[re]?)(?P<number>\d+(?:\.\d+)?)")
KEEP = re.compile(r"\+(?P<what>keep|pages)(?P<share>\d*\.?\d+)$")
SEGMENTS = re.compile(r"segments(\d+)")
SETTINGS = {
    "raw": {"raw": True},
    "fast": {"prefill_rate": 1.0, "decode_rate": 0.5},
    "prompt": {"decode_rate": 0.0},
    "all": {"salient": 1.0},
    **{name: {"stored": name} for name in STORED},
}


def parse(text: str) -> CacheConfig:
    """The configuration of that name. Raises UserError."""
    rest, selection = text.strip(), {}
    if found := KEEP.search(rest):
        rest = rest[: found.start()]
        selection = {"keep": float(found["share"]), "whole_pages": found["what"] == "pages"}
    names = rest.split("/")
    sides = [_one(name) for name in names]
    if None in sides or len(sides) > 2:
        choices = ", ".join(PRESETS)
        raise UserError(
            f"[--kv] unknown preset; got {text!r}; choose from {choices}, KEYS/VALUES such as "
            "int8/int4, static-NUMBER and oja-NUMBER such as oja-r96+int4, any of them with +keep0.5"
        )
    keys, values = sides[0], sides[-1]
    windows = keys if keys.compresses else values
    return CacheConfig(
        keys.keys, values.values, windows.sink, windows.recent, windows.page, **selection
    )


def with_keep(names: str, keep: float | None) -> str:
    """Presets by commas, each with the token selection of `--keep`."""
    if keep is None:
        return names
    if not 0 < keep <= 1:
        raise UserError(f"[--keep] must be above 0 and at most 1; got {keep:g}; choose 0.5")
    return ",".join(f"{name.strip()}+keep{keep:g}" for name in names.split(","))


def _one(name: str) -> CacheConfig | None:
    if name in PRESETS:
        return PRESETS[name]
    method, _, rest = name.partition("-")
    if method not in METHODS:
        return None
    number, *extras = rest.split("+")
    found = NUMBER.fullmatch(number)
    if found is None:
        return None
    size = {"": "share", "r": "rank", "e": "energy"}[found["kind"]]
    value = int(found["number"]) if size == "rank" and "." not in number else float(found["number"])
    follows = method == "oja"
    settings, windows, codes = {size: value, "follows": follows}, 32 if follows else 0, None
    for extra in extras:
        if extra in PRESETS and codes is None and not PRESETS[extra].follows:
            codes = PRESETS[extra]
        elif extra == "windows" and not follows:
            windows = 32
        elif follows and (count := SEGMENTS.fullmatch(extra)):
            settings |= {"stored": "segments", "segments": int(count[1])}
        elif follows and extra in SETTINGS:
            settings |= SETTINGS[extra]
        else:
            return None
    quantizers = (codes.keys.quantizer, codes.values.quantizer) if codes else (Half(), Half())
    return low_rank(LowRank(**settings), *quantizers, windows)
