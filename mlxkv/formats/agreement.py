"""A bound on agreement in place of a number of bits (`--kv 99%`): what was measured for it, and what was chosen.

Agreement is the share of next tokens whose likeliest one is the full cache's. A cache keeps a bound if a further text
stays above it in 19 of 20 cases: the lower limit of Student's prediction interval over TEXTS texts, which spread at
least as counts of texts do that differ by DIFFER. Choices are kept beside the user's calibrations, a JSON file for each
model.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mlxkv import __version__, files, untrusted
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.untrusted import Unsound

# What a choice is made from, the fewest bits first: with a calibration, and without one.
DIAL = (
    *(f"fill-{quarters / 4:g}" for quarters in range(9, 21)),
    *("fill-5.5", "fill-6", "fill-6.5", "fill-7", "fill-7.5", "int8"),
)
PLAIN = ("int4", "int8")
TEXTS = 6
STUDENT = 2.015  # the 95th percentile of Student's t with TEXTS - 1 degrees of freedom
DIFFER = 0.3  # standard deviation of what is expected of a text, over its mean (docs/results/agreement.md)
MADE_BY = (
    f"{__version__} 5"  # count it up with how a share is measured: kept choices are then made anew
)
LARGEST = 1 << 20  # bytes of a file


@dataclass(frozen=True)
class Measured:
    """The agreement of a preset on texts. context, tokens: read before, and compared, of each text. same: of each text,
    tokens whose likeliest one is the full cache's."""

    preset: str
    context: int
    tokens: int
    same: tuple[int, ...]

    @property
    def mean(self) -> float:
        return fmean(self.same) / self.tokens

    def low(self, spread: Measured | None = None) -> float:
        """Return the share that 19 texts in 20 stay above. spread: TEXTS texts that spread as these do, where these
        are fewer; more of them spread wider at a longer context."""
        of = self if len(self.same) == TEXTS or spread is None else spread
        assert len(of.same) == TEXTS
        # Where nothing changed, one token may have: a share is never known to be whole.
        changed = max(self.tokens - fmean(self.same), 1 / len(self.same))
        least = sqrt(changed + (DIFFER * changed) ** 2) / self.tokens
        wide = max(stdev(of.same) / of.tokens, least)
        mean = 1 - changed / self.tokens
        return max(0.0, mean - STUDENT * wide * sqrt(1 + 1 / len(self.same)))


@dataclass(frozen=True)
class Choice:
    """The preset that keeps a bound. short, long: measured at two contexts; None for fp16, which needs no measuring,
    and where the model's context or a minute allows no longer one. why: why it has no fewer bits, or "". date: of the
    measurement, as YYYY-MM-DD. tried: all that was measured at the short context."""

    bound: float
    preset: str
    short: Measured | None
    long: Measured | None
    why: str
    date: str
    tried: tuple[Measured, ...] = ()

    @property
    def line(self) -> str:
        """Return one line: the preset and what it keeps at each context."""
        asked = f"{100 * self.bound:g}%: {self.preset}"
        if self.short is not None:
            asked += f", same next token {percent(self.short.mean)} %"
            asked += f" [19 texts of 20: {percent(self.short.low())} or more] at {short(self.short.context)}"
        if self.long is not None:
            asked += f", {percent(self.long.mean)} at {short(self.long.context)}"
        return asked + (f" ({self.why})" if self.why else "")


def percent(share: float) -> str:
    """Return a share in percent as the line has it, rounded down: 98.9."""
    return f"{int(1000 * share + 1e-9) / 10:g}"


def short(tokens: int) -> str:
    """Return a number of tokens as the line has it: 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def path_of(fingerprint: str) -> Path:
    """Return where choices of a model are kept."""
    return artifact.folder() / f"{fingerprint}.agreement.json"


def find(
    fingerprint: str, bound: float, calibration: str | None, dtype: str | None = None
) -> Choice | None:
    """Return the choice that was kept for a model, or None. calibration: its digest; dtype: as it was kept, any if
    None, the latest first. A file that is damaged or of another version counts as none."""
    for entry in reversed(_entries(fingerprint)):
        with suppress(KeyError, TypeError, ValueError, UserError):
            asked = entry["bound"], entry["calibration"], entry["version"]
            preset = parse_kv(str(entry["preset"])).label
            if asked == (bound, calibration, MADE_BY) and dtype in (None, entry["dtype"]):
                return Choice(
                    bound,
                    preset,
                    _measured(entry["short"], TEXTS),
                    _measured(entry["long"]),
                    str(entry["why"]),
                    str(entry["date"]),
                    tuple(filter(None, map(_measured, entry["tried"]))),
                )
    return None


def cost_of(fingerprint: str, calibration: str | None, preset: str) -> Measured | None:
    """Return what is known of a preset: what was measured of it, or of one with fewer bits, whatever was asked."""
    best: Measured | None = None
    for entry in _entries(fingerprint):
        with suppress(KeyError, TypeError, ValueError, UserError):
            if (entry["calibration"], entry["version"]) != (calibration, MADE_BY):
                continue
            for found in filter(None, map(_measured, entry["tried"])):
                if bits_of(found.preset) <= bits_of(preset) and (
                    best is None or bits_of(best.preset) < bits_of(found.preset)
                ):
                    best = found
    return best


def bits_of(preset: str) -> float:
    """Return the bits of a preset by which the dial is ordered."""
    return parse_kv(preset).bits_per_value(128, 128)


def keep(fingerprint: str, choice: Choice, calibration: str | None, dtype: str) -> Path:
    """Keep a choice; one for the same question is replaced. Raises OSError and UserError."""
    question = {
        "bound": choice.bound,
        "calibration": calibration,
        "dtype": dtype,
        "version": MADE_BY,
    }
    others = [x for x in _entries(fingerprint) if any(x.get(k) != v for k, v in question.items())]
    path = path_of(fingerprint)
    files.make_folder(path.parent)
    with files.written(path) as out:
        out.write(json.dumps([*others, question | asdict(choice)], indent=1).encode())
    return path


def _entries(fingerprint: str) -> list[dict[str, Any]]:
    try:
        data = untrusted.read_json(path_of(fingerprint), LARGEST)
    except (OSError, Unsound):
        return []
    return [x for x in data if isinstance(x, dict)] if isinstance(data, list) else []


def _measured(data: Any, texts: int = 0) -> Measured | None:
    """Return what an entry says, None if it says nothing. texts: how many there must be. Raises ValueError, KeyError,
    TypeError."""
    if data is None:
        return None
    same, tokens = tuple(int(n) for n in data["same"]), int(data["tokens"])
    if not same or len(same) != (texts or len(same)) or not all(0 <= n <= tokens > 0 for n in same):
        raise ValueError("not what was measured")
    return Measured(str(data["preset"]), int(data["context"]), tokens, same)
