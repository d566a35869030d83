"""Make training batches: worker processes pack documents into sequences while training runs."""

import multiprocessing as mp
from collections.abc import Callable, Iterator
from itertools import groupby
from random import Random

import numpy as np
from tokenizer import BOS, FastEncoder
from tokenizers import Tokenizer

from mlxkv.texts.worlds.documents import document
from mlxkv.texts.worlds.pydocs import python_docs

# From this progress (share of the time budget) on: sequence lengths with their shares of the steps.
SCHEDULE = (
    (0.00, {512: 1.0}),
    (0.25, {512: 0.25, 2048: 0.75}),
    (0.45, {512: 0.15, 2048: 0.20, 8192: 0.65}),
)


def pick_length(rng: Random, progress: float) -> int:
    """Draw the sequence length of a batch at this point of the training."""
    shares = [shares for start, shares in SCHEDULE if progress >= start][-1]
    return rng.choices(tuple(shares), tuple(shares.values()))[0]


def sequences(
    rng: Random, length: int, encode: Callable[[str], list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (ids, weights) of length + 1 without end: concatenated documents, each after a <bos>."""
    ids: list[int] = []
    weights: list[int] = []
    docs = python_docs()
    while True:
        pieces = document(rng, length - len(ids), docs)
        ids.append(BOS)
        weights.append(0)
        for weight, group in groupby(pieces, key=lambda piece: piece[1]):
            new = encode("".join(text for text, _ in group))
            ids += new
            weights += [weight] * len(new)
        if len(ids) > length:
            yield ids[: length + 1], weights[: length + 1]
            ids, weights = [], []


def _work(
    tokenizer_file: str, seed: str, tokens: int, progress, queue: mp.Queue, lengths: set[int]
) -> None:
    encode = FastEncoder(Tokenizer.from_file(tokenizer_file))
    rng = Random(seed)
    sources = {n: sequences(Random(f"{seed}-{n}"), n, encode) for n in lengths}
    while True:
        length = pick_length(rng, progress.value)
        rows = [next(sources[length]) for _ in range(tokens // length)]
        ids = np.array([row[0] for row in rows], np.uint16)
        weights = np.array([row[1] for row in rows], np.uint8)
        queue.put((ids, weights))


class Batches:
    """Endless batches from `workers` processes; `progress.value` moves the length schedule."""

    def __init__(self, tokenizer_file: str, seed: int, tokens: int, workers: int):
        context = mp.get_context("spawn")
        self.progress = context.Value("d", 0.0)
        self.queue = context.Queue(maxsize=2 * workers + 4)
        lengths = {n for _, shares in SCHEDULE for n in shares}
        self.workers = [
            context.Process(
                target=_work,
                args=(
                    tokenizer_file,
                    f"train-{seed}-{w}",
                    tokens,
                    self.progress,
                    self.queue,
                    lengths,
                ),
                daemon=True,
            )
            for w in range(workers)
        ]
        for worker in self.workers:
            worker.start()

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        return self.queue.get()

    def close(self) -> None:
        """Stop the worker processes."""
        for worker in self.workers:
            worker.terminate()
