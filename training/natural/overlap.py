"""Shingles of 13 words: near-duplicate documents, and how much of a held text is in the rest."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable

import numpy as np

WORDS = 13
SAMPLE = 16  # one shingle of this many stands for a document when duplicates are looked for
_WORD = re.compile(r"[A-Za-z0-9]+")
_POWERS = np.array([pow(0x9E3779B97F4A7C15, n, 2**64) for n in range(WORDS)], np.uint64)


class _Ids(dict):
    def __missing__(self, word: str) -> int:
        self[word] = number = zlib.crc32(word.encode()) * 0xD1B54A32D192ED03 % 2**64
        return number


_ids = _Ids()


def shingles(text: str) -> np.ndarray:
    """Return the sorted hashes (uint64) of the text's runs of 13 words, case and points ignored."""
    words = _WORD.findall(text.lower())
    if len(words) < WORDS:
        return np.empty(0, np.uint64)
    ids = np.fromiter(map(_ids.__getitem__, words), np.uint64, len(words))
    rows = np.lib.stride_tricks.sliding_window_view(ids, WORDS)
    hashes = (rows * _POWERS).sum(1, dtype=np.uint64)
    hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes * np.uint64(0xBF58476D1CE4E5B9))


def shared(hashes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return which of the hashes are in the sorted array `known` (bool, one each)."""
    if not len(known):
        return np.zeros(len(hashes), bool)
    at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return known[at] == hashes


class Duplicates:
    """Remembers what it was shown; `is_new` is False for text mostly seen before."""

    def __init__(self, limit: float = 0.4):
        self.limit, self.seen = limit, set()

    def is_new(self, hashes: np.ndarray) -> bool:
        """Say whether at most `limit` of the document's sampled shingles were seen, and keep them."""
        sample = hashes[hashes % np.uint64(SAMPLE) == 0].tolist() or hashes[:1].tolist()
        again = sum(h in self.seen for h in sample)
        if not sample or again > self.limit * len(sample):
            return False
        self.seen.update(sample)
        return True


def without_boilerplate(texts: list[str], share: float = 0.05, least: int = 6) -> list[str]:
    """Return the texts of one source without lines that at least `share` of them repeat."""
    counts = Counter(line for text in texts for line in {*text.split("\n")} if len(line) > 20)
    often = {line for line, n in counts.items() if n >= max(least, share * len(texts))}
    return ["\n".join(x for x in text.split("\n") if x not in often) for text in texts]


class Held:
    """The held texts' shingles: judges training text, then says what is left in common."""

    def __init__(self, texts: dict[str, str]):
        self.parts = {name: shingles(text) for name, text in texts.items()}
        arrays = list(self.parts.values())
        self.all = np.unique(np.concatenate(arrays)) if arrays else np.empty(0, np.uint64)
        self.found = np.zeros(len(self.all), bool)

    def is_near(self, hashes: np.ndarray, count: int = 40, share: float = 0.02) -> bool:
        """Say whether training text has 40 shingles, or 2 % of its own, in common with held text."""
        hit = hashes[shared(hashes, self.all)]
        if len(hit) >= min(count, max(3, share * len(hashes))):
            return True
        self.found[np.searchsorted(self.all, hit)] = True
        return False

    def figures(self) -> dict[str, float]:
        """Return for each held text the share of its shingles that accepted training text has."""
        seen = self.all[self.found]
        return {
            name: round(float(shared(part, seen).mean()), 6) if len(part) else 0.0
            for name, part in self.parts.items()
        }


def near_pairs(held: dict[str, str], limit: float = 0.005) -> Iterable[tuple[str, str, float]]:
    """Yield pairs of held texts that share more than `limit` of the first's shingles."""
    parts = {name: shingles(text) for name, text in held.items()}
    for a, left in parts.items():
        for b, right in parts.items():
            if a < b and len(left) and (both := float(shared(left, right).mean())) > limit:
                yield a, b, round(both, 6)
