"""Parse what `--kv` takes: presets, pairs, and names with numbers in them.

    NUMBER                   the best codes of about so many bits a value: 8, 4, 3, 2.25 (`dialled`)
    fill-NUMBER              mixed bits, so many a value with scales: fill-2.25; of a pair of equal numbers
                             (fill-3) one budget, of others (fill-3/fill-2) one each
    KEYS/VALUES              int8/int4: keys and windows of the first, values of the second
    static-NUMBER[+EXTRA]    low rank (StaticPCA); +windows keeps the first and the last 32 tokens
    oja-NUMBER[+EXTRA]       low rank that follows the text (OjaKV), with the same windows
    PRESET+SETTING...        a preset with other numbers: +g32 (values that share a scale), +clip.96 (OSCAR's
                             clip), both also of keys or values alone (+kg32, +vclip.94), +page128, and the
                             exact tokens +sink32 and +recent96
    PRESET+rope8, +rope16    the rotary keys beside latents (MLA) with 8 bits, or exact; other models refuse it
    NAME+keepX, NAME+pagesX  any of them, keeping the share X of a prompt's quantized tokens, or pages

NUMBER: 0.75 of the head dim, r96 dims, or e0.95 of the energy. EXTRA: int8 to int2, codes per token in
groups of 64, or a preset (kivi-int4) for its codes and page. For oja also transport, segments, segments4,
stay; raw: the update as published; fast: rates of 1 and 0.5; all: every token of a prompt updates; prompt:
no updates while decoding; pinned: the last tokens of the first prompt stay exact for good, as published
(without it they are stored once 32 newer ones and a page have come).
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.lowrank import SEGMENTS, STORED, LowRank
from mlxkv.formats.presets import PRESETS, low_rank, mixed_bits
from mlxkv.formats.quantizers import RATES, Affine, Half

METHODS = ("static", "oja")
FILL = "fill"
# Codes of the low-rank presets, a scale a token in groups of 64.
PLAIN = {
    "int8": Affine(8, 64),
    "int4": Affine(4, 64),
    "int3": Affine(3, 64),
    "int2": Affine(2, 64, clip=0.92),
}
PICKS = ("fp16", "int8", "int4", "fill-4", "fill-3", "fill-2.25")  # what to choose from at first
# What other tools call full precision, and widths: q4_0 (llama.cpp), INT4, 4bit.
PLAIN_NAMES = ("f16", "bf16", "float16", "bfloat16", "none", "off", "full", "16", "16bit")
WIDTH = re.compile(r"(?:int|q|kv)?[-_ ]?(?P<bits>[2348])(?:[-_ ]?bits?|_[01])?")
DIAL = re.compile(r"\d*\.?\d+")
NUMBER = re.compile(r"(?P<kind>[re]?)(?P<number>\d*\.?\d+)")
SIZES = {"": "share", "r": "rank", "e": "energy"}
KEEP = re.compile(r"\+(?P<what>keep|pages)(?P<share>\d*\.?\d+)$")
WAY = re.compile(rf"{'|'.join(STORED)}|{SEGMENTS}\d+")
TUNED = re.compile(r"\+(?P<sides>[kv]?)(?P<what>g|clip|page|sink|recent)(?P<number>\d*\.?\d+)$")
ROTARY = re.compile(r"\+rope(8|16)$")
SETTINGS = {
    "raw": {"raw": True},
    "fast": {"prefill_rate": 1.0, "decode_rate": 0.5},
    "prompt": {"decode_rate": 0.0},  # after fast, one of whose rates it replaces
    "all": {"salient": 1.0},
    "pinned": {"pinned": True},
}


def canonical(text: str) -> str:
    """Return the name of a preset, pair or selection for what users of other tools type: 'Q8_0/q4_0' -> 'int8/int4'.
    Names that are not known stay as they are."""
    name, keep = text.strip().lower(), ""
    if match := KEEP.search(name):
        name, keep = name[: match.start()], match[0]
    return "/".join(map(_own_name, name.split("/"))) + keep


def _own_name(name: str) -> str:
    name = name.strip()
    if name in PLAIN_NAMES:
        return "fp16"
    if DIAL.fullmatch(name):
        return dialled(float(name))
    match = WIDTH.fullmatch(name)
    return f"int{match['bits']}" if match else name


def dialled(bits: float) -> str:
    """Return the name of the best preset of about `bits` a value (docs/results/pretrained.md)."""
    return "fp16" if bits >= 16 else "int8" if bits >= 8 else f"{FILL}-{bits:g}"


def fallback_preset(config: CacheConfig) -> str | None:
    """Return the name of the preset that takes the place of mixed bits in models whose keys need their mean (a
    sink logit, a cap on scores) or are latents; None for other configurations."""
    quantizers = (config.keys.quantizer, config.values.quantizer)
    rates = [quantizer.budget for quantizer in quantizers if quantizer.budget is not None]
    if len(rates) < 2:
        return None
    return "int4" if min(rates) >= 4 else "int3" if min(rates) >= 3 else "int2"


def check_fold(config: CacheConfig, fold: bool) -> None:
    """Raise UserError if `fold` is asked for and `config` has no calibrated map of values."""
    if fold and (not config.values.calibrated or config.values.cut):
        sides = ((name, preset.values) for name, preset in PRESETS.items())
        choices = ", ".join(name for name, side in sides if side.calibrated and not side.cut)
        raise UserError(
            f"[fold] folds calibrated maps of values into the weights; got {config.label}, which has "
            f"none; choose from {choices}"
        )


def check_rotary(kv: CacheConfig, option: str = "--kv") -> None:
    """Raise UserError where `kv` says how rotary keys beside latents are stored. For models that have
    no latents to compress."""
    if not kv.asks_rotary and kv.rotary == 16:
        return
    label, without = kv.label, re.sub(r"\+rope(8|16)", "", kv.label)
    raise UserError(
        f"[{option}] +rope{kv.rotary} is for rotary keys beside compressed latents (MLA), which this model has none "
        f"of; got {label!r}; choose {without if without != label else 'presets without it'}"
    )


def complete_kv(incomplete: str) -> list[str]:
    """Names for a shell that completes `--kv`, behind a comma or a slash, too."""
    start = max(incomplete.rfind(","), incomplete.rfind("/")) + 1
    given_text, last = incomplete[:start], incomplete[start:]
    return [
        given_text + name for name in dict.fromkeys((*PRESETS, *PICKS)) if name.startswith(last)
    ]


def parse_kv(text: str | CacheConfig) -> CacheConfig:
    """Return the configuration that `--kv TEXT` names. A configuration is returned unchanged, but loses a
    name that stands for others. Raises UserError."""
    if isinstance(text, CacheConfig):
        return replace(text, name="") if text.name and parse_kv(text.name) != text else text
    if not isinstance(text, str):
        raise UserError(
            f"[--kv] is the name of a preset or a CacheConfig; got {text!r}; choose from {', '.join(PRESETS)}"
        )
    name_part = canonical(text)
    settings = {"name": name_part}
    if selection := KEEP.search(name_part):
        name_part = name_part[: selection.start()]
        settings |= {"keep": float(selection["share"]), "whole_pages": selection["what"] == "pages"}
    names = name_part.split("/")
    sides = [_side(name) for name in names]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides) or len(sides) > 2:
        raise UserError(
            f"[--kv] unknown preset; got {text!r}; {_hint(names, sides)}choose from {', '.join(PICKS)}, a number of "
            "bits such as 2.6, KEYS/VALUES such as int8/int4, or what mlxkv presets --all lists"
        )
    keys, values = known[0], known[-1]
    windows = keys if keys.compresses else values
    rotary_side = next((side for side in (windows, keys, values) if side.asks_rotary), windows)
    rotary = {
        name: getattr(rotary_side, name) for name in ("rotary", "short_rotary", "asks_rotary")
    }
    return replace(windows, keys=keys.keys, values=values.values, **rotary, **settings)


def _hint(names: list[str], sides: list[CacheConfig | None]) -> str:
    wrong = [name for name, side in zip(names, sides, strict=True) if side is None]
    close = get_close_matches(wrong[0], dict.fromkeys((*PICKS, *PRESETS)), n=2) if wrong else []
    return f"did you mean {' or '.join(close)}? " if close else ""


def _side(name: str) -> CacheConfig | None:
    if name in PRESETS:
        return PRESETS[name]
    if match := ROTARY.search(name):
        base = _side(name[: match.start()])
        return base and replace(base, rotary=int(match[1]), short_rotary=False, asks_rotary=True)
    if match := TUNED.search(name):
        base = _side(name[: match.start()])
        return base and _tuned(base, match, name)
    method, dash, number_and_extras = name.partition("-")
    if method == FILL and dash:
        return _filled(number_and_extras, name)
    if method not in METHODS or not dash:
        return None
    number, *extras = number_and_extras.split("+")
    follows, settings = method == "oja", {}
    codes = [extra for extra in extras if extra in PRESETS and _are_codes(PRESETS[extra])]
    stored = [extra for extra in extras if WAY.fullmatch(extra)]
    allowed = {*codes, *stored, *SETTINGS} if follows else {*codes, "windows"}
    match = NUMBER.fullmatch(number)
    if match is None or not _is_size(match) or not allowed.issuperset(extras):
        raise _not_low_rank(name)
    if len(set(extras)) < len(extras) or max(len(codes), len(stored)) > 1:
        raise _not_low_rank(name)
    for extra in SETTINGS:  # in this order, whatever order the user writes
        settings |= SETTINGS[extra] if extra in extras else {}
    if stored and (count := stored[0].removeprefix(SEGMENTS)).isdigit():
        settings |= {"stored": SEGMENTS, "segments": int(count)}
    elif stored:
        settings |= {"stored": stored[0]}
    size = SIZES[match["kind"]]
    value = int(number[1:]) if size == "rank" else float(match["number"])
    windows = 32 if follows or "windows" in extras else 0
    low = LowRank(**{size: value}, follows=follows, **settings)
    if not codes or codes[0] in PLAIN:
        plain = PLAIN[codes[0]] if codes else Half()
        return low_rank(low, plain, plain, windows)
    code_preset = PRESETS[codes[0]]
    return low_rank(
        low, code_preset.keys.quantizer, code_preset.values.quantizer, windows, code_preset.page
    )


def _filled(number: str, name: str) -> CacheConfig:
    """Return mixed bits. Raises UserError for what is no number of bits."""
    match = NUMBER.fullmatch(number)
    if match is None or match["kind"] or not RATES[0] <= float(number) <= RATES[1]:
        raise UserError(
            f"[--kv] no such number of bits; got {name!r}; write fill-NUMBER, bits a value from "
            f"{RATES[0]:g} to {RATES[1]:g} with scales, such as fill-2.25"
        )
    return mixed_bits(float(number))


def _tuned(base: CacheConfig, match: re.Match, name: str) -> CacheConfig:
    """Return `base` with one other number. Raises UserError."""
    sides, setting, number = match["sides"], match["what"], float(match["number"])
    is_whole = number == int(number)
    if setting in ("page", "sink", "recent"):
        if sides or not is_whole:
            raise _not_tuned(name)
        return replace(base, **{setting: int(number)})
    changed = {}
    for side in ("keys", "values"):
        old = getattr(base, side)
        if sides and not side.startswith(sides):
            continue
        spec = old.quantizer
        if not isinstance(spec, Affine) or (setting == "g" and not is_whole):
            raise _not_tuned(name)
        if setting == "g":
            changed[side] = replace(old, quantizer=replace(spec, group=int(number)))
        elif spec.axis == "token":  # keys per channel have no clip
            changed[side] = replace(old.clipped(number), own_clip=True)
    if not changed:
        raise _not_tuned(name)
    return replace(base, **changed)


def _not_tuned(name: str) -> UserError:
    return UserError(
        f"[--kv] no such setting of this preset; got {name!r}; write +g32 or +clip.96 for affine codes (of "
        "one side: +kg32, +vclip.94; keys per channel have no clip), +page128, +sink32, +recent96"
    )


def _are_codes(preset: CacheConfig) -> bool:
    """Return whether the preset quantises both sides."""
    return preset.keys.quantizer.codes and preset.values.quantizer.codes


def _is_size(match: re.Match) -> bool:
    """Return whether a number is a share of the dims or of the energy, or a whole number of dims."""
    kind, value = match["kind"], float(match["number"])
    if kind == "r":
        return match["number"].isdigit() and value > 0
    return 0 < value < 1 or (value == 1 and not kind)


def _not_low_rank(name: str) -> UserError:
    method = name.partition("-")[0]
    extras = (*SETTINGS, *STORED, "segments4") if method == "oja" else ("windows",)
    return UserError(
        f"[--kv] no low rank of this name; got {name!r}; write {method}-NUMBER, a share of the dims "
        "(0.75), even dims (r96) or a share of their energy (e0.95), then, each once, +CODES (a preset "
        f"such as +int4) and any of {', '.join(f'+{extra}' for extra in extras)}"
    )
