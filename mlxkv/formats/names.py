"""Parse values of `--kv`.

    NUMBER          the best codes of about so many bits a value: 8, 4, 3, 2.25 (`dialled`)
    PRESET          a name of `formats.presets.PRESETS`
    fill-NUMBER     mixed bits, so many a value with scales: fill-2.25
    SHARE%, auto    for commands that load a model: the fewest bits that keep such a share of its next tokens
    KEYS/VALUES     int8/int4: keys and windows of the first, values of the second; of equal numbers (fill-3) one
                    budget, of others (fill-3/fill-2) one each

and what other tools call full precision and widths: f16, none, q8_0, INT4, 4bit. Anything else is a `CacheConfig`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.presets import PRESETS, mixed_bits
from mlxkv.formats.quantizers import RATES, Quantizer

FILL = "fill"
PICKS = ("fp16", "int8", "int4", "fill-4", "fill-3", "fill-2.25")  # what to choose from at first
# What other tools call full precision, and widths: q4_0 (llama.cpp), INT4, 4bit. Of 2 and 3 bits only "int3" means the
# preset of that name; q3 and 3bit are the number.
PLAIN_NAMES = ("f16", "bf16", "float16", "bfloat16", "none", "off", "full", "16", "16bit")
WIDTH = re.compile(r"(?:(?P<kind>int|q|kv)[-_ ]?)?(?P<bits>[2348])(?:[-_ ]?bits?|_[01])?")
THEIRS = re.compile(r"i?q(?P<bits>[2-8])_\w+")  # llama.cpp's other types: q5_1, iq4_nl, q6_k
DIAL = re.compile(r"\d*\.?\d+")
MOST_BITS = 16  # of full precision; a larger number is no number of bits
SMALLEST = (
    2.25  # bits: the fewest that answer questions about long texts (docs/results/pretrained.md)
)
# A share of next tokens in place of bits (`formats.agreement`), percent; and what `auto` stands for.
SHARE, LEAST, MOST = re.compile(r"(\d+(?:\.\d+)?) ?%"), 50, 99.9
AUTO = "99%"
# Of names that older versions took: other windows, groups, ranks and shares.
OLDER = ("+", "static-", "oja-")
IN_PYTHON = "; in Python also attach(model, replace(parse_kv('int4'), sink=16)) and any CacheConfig"


def canonical(text: str) -> str:
    """Translate names of other tools to a preset or pair: 'Q8_0/q4_0' -> 'int8/int4'. Unknown names are unchanged."""
    return "/".join(map(_own_name, text.strip().lower().split("/")))


def bound_of(kv: object) -> float | None:
    """Return the share that `--kv 99%` or `auto` asks for, None for anything else. Raises UserError for shares outside
    LEAST to MOST percent."""
    text = kv.strip().lower() if isinstance(kv, str) else ""
    match = SHARE.fullmatch(AUTO if text == "auto" else text)
    if match is None:
        return None
    if not LEAST <= float(match[1]) <= MOST:
        raise UserError(
            f"[--kv] no such share of next tokens; got {text!r}; choose {LEAST}% to {MOST}%, or fp16, which keeps all"
        )
    return float(match[1]) / 100


def _own_name(name: str) -> str:
    name = name.strip()
    if name in PLAIN_NAMES:
        return "fp16"
    if DIAL.fullmatch(name) and float(name) <= MOST_BITS:
        return dialled(float(name))
    match = WIDTH.fullmatch(name)
    if match and match["kind"] != "int" and match["bits"] in "23":
        return dialled(float(match["bits"]))
    return f"int{match['bits']}" if match else name


def dialled(bits: float) -> str:
    """Return the name of the best preset of about `bits` a value (docs/results/pretrained.md)."""
    return "fp16" if bits >= 16 else "int8" if bits >= 8 else f"{FILL}-{bits:g}"


def warning_of(config: CacheConfig) -> str | None:
    """Return a line for mixed bits below `SMALLEST`, else None."""
    rates = [side.quantizer.budget for side in (config.keys, config.values)]
    if any(rate is not None and rate < SMALLEST for rate in rates):
        return (
            f"--kv {config.label} is below {FILL}-{SMALLEST:g}, the smallest preset that answers well on the models we "
            "measured"
        )
    return None


def requested(kv: str | float | CacheConfig | Quantizer) -> CacheConfig | str:
    """Return the configuration that `kv` names; a share ("99%"), which a command asks of a model, as it is. Raises
    UserError."""
    if isinstance(kv, str) and bound_of(kv) is not None:
        return kv
    return parse_kv(kv)


def fallback_preset(config: CacheConfig) -> str | None:
    """Return the preset that replaces mixed bits in models of latents or whose keys need their mean.

    Sink logits and soft-capping need the mean. None for configurations without mixed bits.
    """
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


def complete_kv(incomplete: str) -> list[str]:
    """Return shell completions of `--kv`, also after a comma or a slash."""
    start = max(incomplete.rfind(","), incomplete.rfind("/")) + 1
    given_text, last = incomplete[:start], incomplete[start:]
    return [
        given_text + name for name in dict.fromkeys((*PRESETS, *PICKS)) if name.startswith(last)
    ]


def parse_kv(text: str | float | CacheConfig | Quantizer) -> CacheConfig:
    """Return the configuration that `--kv TEXT`, or a number of bits, names. A configuration is returned unchanged, but
    loses a name that stands for others; a quantizer (`Method`) stores keys and values. Raises UserError for names that
    it does not know."""
    if isinstance(text, Quantizer):
        side = Side(text)
        text = CacheConfig(side, side, name=text.label)
    if isinstance(text, CacheConfig):
        return text if _has_own_name(text) else replace(text, name="")
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = f"{text:g}"
    if not isinstance(text, str):
        raise UserError(
            f"[kv] a preset's name, a number of bits or a CacheConfig; got {text!r}; choose from {', '.join(PICKS)}"
        )
    if bound_of(text) is not None:
        raise UserError(
            f"[--kv] a share of next tokens is asked of a model that mlxkv loads; got {text!r}; choose a preset or a "
            "number of bits here, or use chat, serve, read, eval, fit or mlxkv.load"
        )
    canonical_name = canonical(text)
    names = canonical_name.split("/")
    sides = [_preset(name) for name in names]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides) or len(sides) > 2:
        is_older = any(part in canonical_name for part in OLDER)
        raise UserError(
            f"[--kv] unknown preset; got {text!r}; {_hint(names, sides)}choose from {', '.join(PICKS)}, a number of "
            "bits such as 2.6, KEYS/VALUES such as int8/int4, or what mlxkv presets --all lists"
            f"{IN_PYTHON if is_older else ''}"
        )
    keys, values = known[0], known[-1]
    windows = keys if keys.compresses else values
    return replace(windows, keys=keys.keys, values=values.values, name=canonical_name)


def _has_own_name(config: CacheConfig) -> bool:
    """Return whether `config.name` names no other configuration."""
    try:
        return not config.name or parse_kv(config.name) == config
    except UserError:  # a name of the caller's
        return True


def _hint(names: list[str], sides: list[CacheConfig | None]) -> str:
    wrong = [name for name, side in zip(names, sides, strict=True) if side is None]
    if wrong and DIAL.fullmatch(wrong[0]) and LEAST <= float(wrong[0]) <= MOST:
        close = [f"{wrong[0]}%"]
    elif wrong and (match := THEIRS.fullmatch(wrong[0])):
        close = [match["bits"] if match["bits"] in "23567" else f"int{match['bits']}"]
    else:
        close = get_close_matches(wrong[0], dict.fromkeys((*PICKS, *PRESETS)), n=2) if wrong else []
    return f"did you mean {' or '.join(close)}? " if close else ""


def _preset(name: str) -> CacheConfig | None:
    """Return the configuration of one part of a name. Raises UserError for what is no number of bits."""
    prefix, dash, number = name.partition("-")
    if prefix != FILL or not dash:
        return PRESETS.get(name)
    if not DIAL.fullmatch(number) or not RATES[0] <= float(number) <= RATES[1]:
        raise UserError(
            f"[--kv] no such number of bits; got {number!r}; write bits a value from {RATES[0]:g} to {RATES[1]:g} "
            f"with scales, such as {SMALLEST}, or fill-{SMALLEST}"
        )
    return mixed_bits(float(number))
