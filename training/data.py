"""Make training batches: worker processes pack documents into sequences while training runs."""

import multiprocessing as mp
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from random import Random

import numpy as np
from tokenizer import BOS, FastEncoder
from tokenizers import Tokenizer

from mlxkv.texts.worlds.documents import document
from mlxkv.texts.worlds.pydocs import python_docs

# From this progress (share of the time budget) on: sequence lengths with their shares of the steps.
Schedule = tuple[tuple[float, dict[int, float]], ...]
SCHEDULE: Schedule = (
    (0.00, {512: 1.0}),
    (0.25, {512: 0.25, 2048: 0.75}),
    (0.45, {512: 0.15, 2048: 0.20, 8192: 0.65}),
)


Row = tuple[Iterable[int], Iterable[int]]  # ids and weights in the loss, each length + 1
# (seed, lengths) -> endless rows of each length; it runs in a worker process
Sources = Callable[[str, set[int]], dict[int, Iterator[Row]]]


def pick_length(rng: Random, progress: float, schedule: Schedule = SCHEDULE) -> int:
    """Draw the sequence length of a batch at this point of the training."""
    shares = [shares for start, shares in schedule if progress >= start][-1]
    return rng.choices(tuple(shares), tuple(shares.values()))[0]


def sequences(
    rng: Random, length: int, encode: Callable[[str], list[int]], make=document
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (ids, weights) of length + 1 without end: concatenated documents, each after a <bos>."""
    ids: list[int] = []
    weights: list[int] = []
    docs = python_docs()
    while True:
        pieces = make(rng, length - len(ids), docs)
        ids.append(BOS)
        weights.append(0)
        for weight, group in groupby(pieces, key=lambda piece: piece[1]):
            new = encode("".join(text for text, _ in group))
            ids += new
            weights += [weight] * len(new)
        if len(ids) > length:
            yield ids[: length + 1], weights[: length + 1]
            ids, weights = [], []


def worlds(tokenizer_file: str, seed: str, lengths: set[int]) -> dict[int, Iterator[Row]]:
    """Return endless rows of generated documents."""
    encode = FastEncoder(Tokenizer.from_file(tokenizer_file))
    return {n: sequences(Random(f"{seed}-{n}"), n, encode) for n in lengths}


def _work(
    sources: Sources, seed: str, tokens: int, schedule: Schedule, progress, queue: mp.Queue
) -> None:
    rng = Random(seed)
    rows_of = sources(seed, {n for _, shares in schedule for n in shares})
    while True:
        length = pick_length(rng, progress.value, schedule)
        rows = [next(rows_of[length]) for _ in range(tokens // length)]
        ids = np.array([row[0] for row in rows], np.uint16)
        weights = np.array([row[1] for row in rows], np.uint8)
        queue.put((ids, weights))


class Batches:
    """Endless batches from `workers` processes; `progress.value` moves the length schedule."""

    def __init__(
        self,
        sources: Sources | str,
        seed: int,
        tokens: int,
        workers: int,
        schedule: Schedule = SCHEDULE,
    ):
        """sources: what makes rows, or the tokenizer's file for generated documents alone."""
        if isinstance(sources, str):
            sources = partial(worlds, sources)
        context = mp.get_context("spawn")
        self.progress = context.Value("d", 0.0)
        self.queue = context.Queue(maxsize=2 * workers + 4)
        self.workers = [
            context.Process(
                target=_work,
                args=(sources, f"train-{seed}-{w}", tokens, schedule, self.progress, self.queue),
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
