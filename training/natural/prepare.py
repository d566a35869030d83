"""Tokenize the training text once, on all cores, for both trainings.

    python -m natural.prepare runs/natural runs/natural/data    # train.xz, tokenizer/ -> data/

Writes tokens.bin (uint16, all documents one after another), starts.npy (the first token of each
document, and the end), tokenizer/ and prepared.json.
"""

import argparse
import json
import lzma
import multiprocessing as mp
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import tokenizer as chat
from tokenizer import SPECIALS, FastEncoder
from tokenizers import Tokenizer

from natural.data import encoder


def read_documents(folder: Path) -> list[str]:
    """Return the documents of train.xz, or of its parts train.xz.*, separated by NUL."""
    parts = [folder / "train.xz"] if (folder / "train.xz").exists() else []
    parts = parts or sorted(folder.glob("train.xz.*"))
    if not parts:
        raise FileNotFoundError(f"[prepare] no training text; got {folder}; it must hold train.xz")
    packed = b"".join(part.read_bytes() for part in parts)
    return [doc for doc in lzma.decompress(packed).decode("utf-8").split("\0") if doc.strip()]


def _encode(tokenizer_file: str, texts: list[str]) -> tuple[np.ndarray, list[int]]:
    """Return the ids of the texts, one after another, and how many each has."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.encode_special_tokens = True  # "<eos>" in a text is only text
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    flat = np.fromiter((i for row in ids for i in row), np.uint16, sum(map(len, ids)))
    return flat, [len(row) for row in ids]


def _portions(texts: list[str], size: int = 1_000_000) -> Iterator[list[str]]:
    portion, chars = [], 0
    for text in texts:
        portion.append(text)
        chars += len(text)
        if chars >= size:
            yield portion
            portion, chars = [], 0
    if portion:
        yield portion


def prepare(source: Path, out: Path, workers: int) -> dict:
    """Tokenize train.xz into out/tokens.bin (uint16) and out/starts.npy (first token of each document)."""
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    files = out / "tokenizer"
    shutil.copytree(source / "tokenizer", files, dirs_exist_ok=True)
    if not (files / "tokenizer_config.json").exists():
        (files / "tokenizer_config.json").write_text(json.dumps(chat.config(), indent=2) + "\n")
    file = str(files / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    for n, name in enumerate(SPECIALS):
        if tokenizer.token_to_id(name) != n:
            raise ValueError(
                f"[prepare] {name} must be token {n}; got {tokenizer.token_to_id(name)}"
            )
    texts = read_documents(source)
    read = time.monotonic()
    lengths: list[int] = []
    work = partial(_encode, file)
    with open(out / "tokens.bin", "wb") as tokens, mp.get_context("spawn").Pool(workers) as pool:
        for flat, sizes in pool.imap(work, _portions(texts)):
            flat.tofile(tokens)
            lengths += sizes
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    np.save(out / "starts.npy", starts)
    chars = sum(map(len, texts))
    report = {
        "documents": len(texts),
        "characters": chars,
        "tokens": int(starts[-1]),
        "characters_a_token": round(chars / max(1, int(starts[-1])), 3),
        "vocabulary": tokenizer.get_vocab_size(),
        "fast_encoder": isinstance(encoder(tokenizer), FastEncoder),
        "seconds_reading": round(read - begun, 1),
        "seconds": round(time.monotonic() - begun, 1),
    }
    (out / "prepared.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "source", type=Path, help="folder with train.xz (or train.xz.*) and tokenizer/"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    print(json.dumps(prepare(args.source, args.out, args.workers)))


if __name__ == "__main__":
    main()
