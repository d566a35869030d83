"""Batches of real text, read from a file of tokens, and of the small worlds."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from data import Row, sequences
from tokenizer import BOS, FastEncoder
from tokenizers import Tokenizer

from mlxkv.texts.worlds.documents import Piece, document, documents, retrieval_document

WORLDS = 0.30  # share of rows that hold documents of the small worlds
HIDDEN = 0.35  # share of those documents whose facts are hidden in real text
_PIECE = re.compile(
    r"[^\n]*?(?:[.!?] +(?=[A-Z])|\n+|$)"
)  # a sentence or a line, with its white space


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return the fast encoder of generated text if it agrees with the tokenizer, else the slow one."""
    fast = FastEncoder(tokenizer)
    source = documents(Random("train-encoder"), 1024)
    for _ in range(8):
        text = "".join(piece for piece, _ in next(source))
        if fast(text) != tokenizer.encode(text, add_special_tokens=False).ids:
            return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return fast


def pieces_of(text: str) -> list[str]:
    """Cut a text to sentences and lines, each with the white space after it."""
    return [piece for piece in _PIECE.findall(text.strip("\ufffd")) if piece] or [" "]


@dataclass(frozen=True)
class RealText:
    """The prepared file of tokens. tokens: [N] uint16; starts: [documents + 1]."""

    tokens: np.ndarray
    starts: np.ndarray

    @staticmethod
    def open(folder: Path) -> "RealText":
        tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")
        return RealText(tokens, np.load(folder / "starts.npy"))

    def parts(self, length: int) -> np.ndarray:
        """Return (start, end) [n, 2] of the documents, longer ones cut to parts of `length` tokens."""
        begin, end = self.starts[:-1], self.starts[1:]
        counts = np.maximum(1, -(-(end - begin) // length))
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(begin, counts) + offset * length
        return np.stack([first, np.minimum(first + length, np.repeat(end, counts))], axis=1)

    def rows(self, seed: str, share: int, shares: int, length: int) -> Iterator[Row]:
        """Yield rows of length + 1 ids: parts of documents, each after a <bos>, in an order of each epoch.

        share, shares: the worker's number and how many there are; each has its own parts.
        """
        # All workers draw the same order of an epoch, and each takes its own share of it.
        parts, order = self.parts(length), Random(f"{seed}-order-{length}")
        ids: list[np.ndarray] = []
        filled = 0
        while True:
            shuffled = np.random.default_rng(order.getrandbits(64)).permutation(len(parts))
            for first, last in parts[shuffled[share::shares]]:
                while first < last:
                    piece = self.tokens[first : min(last, first + length - filled)]
                    ids += [np.array([BOS], np.uint16), piece]
                    first, filled = first + len(piece), filled + 1 + len(piece)
                    if filled >= length:  # one <bos> more would leave no room for its text
                        row = np.concatenate([*ids, np.array([BOS], np.uint16)])[: length + 1]
                        yield row, (row != BOS).astype(np.uint8)
                        ids, filled = [], 0

    def pieces(self, tokenizer: Tokenizer, rng: Random, tokens: int) -> list[str]:
        """Return about `tokens` tokens of text from anywhere, cut to sentences and lines."""
        first = rng.randrange(max(1, len(self.tokens) - tokens))
        return pieces_of(tokenizer.decode(self.tokens[first : first + tokens].tolist()))


def natural(
    tokenizer_file: str, folder: str, shares: int, worlds: float, seed: str, lengths: set[int]
) -> dict[int, Iterator[Row]]:
    """Return endless rows of each length, of real text and of the small worlds; runs in a worker.

    shares: how many workers there are; worlds: the share of rows that are generated.
    """
    tokenizer = Tokenizer.from_file(tokenizer_file)
    fast, real = encoder(tokenizer), RealText.open(Path(folder))

    def encode(text: str) -> list[int]:
        return (
            fast(text) if text.isascii() else tokenizer.encode(text, add_special_tokens=False).ids
        )

    def make(rng: Random, room: int, docs: list[str]) -> list[Piece]:
        if room >= 160 and rng.random() < HIDDEN:
            return retrieval_document(rng, room, docs, partial(real.pieces, tokenizer))
        return document(rng, room, docs)

    run, _, worker = seed.rpartition("-")

    def mixed(length: int) -> Iterator[Row]:
        rng = Random(f"{seed}-{length}")
        generated = sequences(rng, length, encode, make)
        read = real.rows(run, int(worker), shares, length)
        while True:
            yield next(generated if rng.random() < worlds else read)

    return {length: mixed(length) for length in lengths}


def held_texts(folder: Path, split: str) -> dict[str, str]:
    """Return name -> text of the held-out texts of a split, in the order of their names."""
    return {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((folder / "held" / split).glob("*.txt"))
    }
