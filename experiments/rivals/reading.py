"""The eight texts that rivals are compared on, the text they are calibrated on, and how their tables are written."""

from __future__ import annotations

from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.texts import corpus
from mlxkv.texts.sources import story_tokens

STORIES = ("stories-1", "stories-2", "stories-3", "stories-4")  # names and seeds
CORPUS = ("prose", "dialogue", "code", "tables")
CALIBRATION = 4096  # tokens, half stories, half corpus


def texts(loaded, count: int) -> dict[str, list[int]]:
    """Return `count` tokens of each evaluation text, by name."""
    out = {seed: story_tokens(loaded, count, seed) for seed in STORIES}
    passages = corpus.passages("evaluation")
    for kind in CORPUS:
        tokens = loaded.tokenizer.encode(passages[kind], add_special_tokens=False)
        if len(tokens) < count:
            raise UserError(
                f"[--context] the corpus has {len(tokens)} tokens of {kind}; got {count} to read; "
                "choose a shorter context"
            )
        out[kind] = tokens[:count]
    return out


def calibration_text(loaded, tokens: int = CALIBRATION) -> list[int]:
    """Return tokens of stories and of the corpus's calibration split, half and half, the same for every model."""
    text = "\n\n".join(corpus.interleaved("calibration"))[: 4 * tokens]
    half = loaded.tokenizer.encode(text, add_special_tokens=False)[: tokens // 2]
    return story_tokens(loaded, tokens - len(half), "calibration") + list(half)


def told(ours: list[float], theirs: list[float]) -> str:
    """Return the ratio of two means over the same texts with its interval, marked where that leaves out 1."""
    one = intervals.ratio(ours, theirs)
    if one.low is None:
        return f"{one.value:.2g}"
    mark = " *" if one.low > 1 or one.high < 1 else ""
    return f"{one.value:.2g} ({one.low:.2g} to {one.high:.2g}){mark}"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
