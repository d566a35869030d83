"""Configurations of tests by a short name: a preset or a low rank, then what differs from it."""

import re
from dataclasses import replace

from mlxkv.formats.config import CacheConfig
from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS, low_rank
from mlxkv.formats.quantizers import Affine, Half

SIZES = {"": "share", "r": "rank", "e": "energy"}
LOW = {
    "raw": {"raw": True},
    "fast": {"prefill_rate": 1.0, "decode_rate": 0.5},
    "prompt": {"decode_rate": 0.0},
    "all": {"salient": 1.0},
    "pinned": {"pinned": True},
    "transport": {"stored": "transport"},
    "stay": {"stored": "stay"},
    **{f"segments{n}": {"stored": "segments", "segments": n} for n in (1, 2, 3, 4)},
    "segments": {"stored": "segments"},
}


def config_named(name: str) -> CacheConfig:
    """Return the configuration of "oja-r24+int8+segments3+keep0.5", "int2+g32", "fp16+keep0.25", KEYS/VALUES.

    Behind `static-` or `oja-`: a share, r24 dims or e0.9 of the energy, then codes and entries of LOW. Then, of any:
    g32 (group), clip.92, keep, pages (`keep` by whole pages), page, sink, recent, rotary.
    """
    sides = [PRESETS[one] if one in PRESETS else _side(one) for one in name.split("/")]
    keys, values = sides[0], sides[-1]
    windows = keys if keys.compresses else values
    return replace(windows, keys=keys.keys, values=values.values, name=name)


def _side(name: str) -> CacheConfig:
    base, *extras = name.split("+")
    while extras and not base.startswith(("static-", "oja-")) and f"{base}+{extras[0]}" in PRESETS:
        base += f"+{extras.pop(0)}"
    if match := re.fullmatch(r"(static|oja)-([re]?)([\d.]+)", base):
        low = {SIZES[match[2]]: float(match[3]) if match[2] != "r" else int(match[3])}
        codes, windows, page = (Half(), Half()), 32 * (match[1] == "oja"), 64
        for extra in list(extras):
            if extra in LOW:
                low |= LOW[extra]
            elif extra in ("int8", "int4"):
                codes = (Affine(int(extra[3:]), 64),) * 2
            elif extra in PRESETS:
                preset = PRESETS[extra]
                codes, page = (preset.keys.quantizer, preset.values.quantizer), preset.page
            elif extra == "windows":
                windows = 32
            else:
                continue
            extras.remove(extra)
        config = low_rank(LowRank(follows=match[1] == "oja", **low), *codes, windows, page)
    else:
        config = parse_kv(base)
    for extra in extras:
        config = _changed(config, *re.fullmatch(r"([a-z]+)([\d.]+)", extra).groups())
    return config


def _changed(config: CacheConfig, what: str, number: str) -> CacheConfig:
    if what in ("keep", "pages"):
        return replace(config, keep=float(number), whole_pages=what == "pages")
    if what in ("page", "sink", "recent", "rotary"):
        return replace(config, **{what: int(number)})
    sides = {}
    for name in ("keys", "values"):
        side = getattr(config, name)
        if what == "g":
            sides[name] = replace(side, quantizer=replace(side.quantizer, group=int(number)))
        elif side.quantizer.clips:
            sides[name] = replace(side.clipped(float(number)), own_clip=True)
    return replace(config, **sides)
