"""Build the natural corpus: real text to train on, held-out texts, and a tokenizer.

PYTHONPATH=.:training python -m natural.corpus [--out runs/natural] [--megabytes 165] [--mirror FOLDER] [--cache FOLDER]

Reads the sources of sources.toml (gather.py), cleans them (clean.py), drops near-duplicates and
what is near a held text (overlap.py), and writes train.xz (documents separated by a NUL, shuffled),
held/SPLIT/KIND-N.txt, tokenizer/ and corpus.json.
"""

import argparse
import hashlib
import json
import lzma
import multiprocessing
import shutil
import subprocess
import sys
import time
from heapq import heapify, heappop, heappush
from pathlib import Path
from random import Random

import numpy as np

from natural.clean import clean, is_english
from natural.gather import KINDS, Source, order, read, sources
from natural.overlap import Duplicates, Held, near_pairs, shingles, without_boilerplate

SHARES = {"prose": 0.40, "manual": 0.25, "code": 0.25, "dialogue": 0.10}
CAP = 0.08  # of all training text, for one source
LEAST = {"prose": 2000, "manual": 1500, "code": 800, "dialogue": 1500}  # characters a document
# Text read is this many times what the kind needs: sources are of unequal size.
SPARE = {"prose": 1.4, "manual": 3, "code": 2, "dialogue": 5}
PIECE = 100_000  # characters; a longer document is shuffled in pieces
HELD_LEAST, HELD_MOST, CALIBRATION = 60_000, 300_000, 200_000  # characters
XZ_LIMIT = 44 * 2**20


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def documents(source: Source, limit: int) -> list[tuple[str, str]]:
    """Return (path, text) of the source's cleaned documents, about `limit` characters in all."""
    found, size = [], 0
    for path, data in read(source):
        if len(data) > 30_000_000:
            continue
        text = clean(path, data)
        if source.after and source.after in text:
            text = text.split(source.after, 1)[1].lstrip()
        if len(text) < LEAST[source.kind] or (source.kind != "code" and not is_english(text)):
            continue
        if source.split == "train":
            text = text[: max(limit - size, 2 * PIECE)]
        found.append((path, text))
        size += len(text)
        if size >= limit:
            break
    if source.kind != "code" and len(found) > 20:
        texts = without_boilerplate([text for _, text in found])
        pairs = zip((path for path, _ in found), texts, strict=True)
        found = [(path, text) for path, text in pairs if len(text) >= LEAST[source.kind]]
    return found


def held_text(source: Source, found: list[tuple[str, str]]) -> str:
    """Return the held text of a source: its longest document, or several until 60,000 characters."""
    by = (lambda d: d[0]) if source.kind == "code" else (lambda d: (-len(d[1]), d[0]))
    least, most = HELD_LEAST, HELD_MOST
    if source.split == "calibration":
        least = most = CALIBRATION
    elif source.kind != "prose":
        least = 2 * HELD_LEAST
    text = ""
    for _, document in sorted(found, key=by):
        text += ("\n\n" if text else "") + document
        if len(text) >= least:
            break
    if len(text) < HELD_LEAST:
        raise SystemExit(
            f"[corpus] held source {source.name} is too short; got {len(text)} characters;"
            f" needs {HELD_LEAST}"
        )
    return text[:most]


def pieces(text: str) -> list[str]:
    """Split a long document at empty lines into pieces of about PIECE characters."""
    out = []
    while len(text) > 1.5 * PIECE:
        at = text.find("\n\n", PIECE)
        if at < 0 or at > 1.5 * PIECE:
            at = PIECE
        out.append(text[:at].strip() + "\n")
        text = text[at:]
    return [*out, text.strip() + "\n"]


def fill(offered: dict[str, list[str]], budget: float, cap: float) -> dict[str, list[str]]:
    """Return pieces of each source, the source with least taken next, until the budget is filled."""
    taken: dict[str, list[str]] = {name: [] for name in offered}
    heap = [(0, order(name), name) for name in offered]
    heapify(heap)
    while heap and budget > 0:
        size, key, name = heappop(heap)
        if len(taken[name]) == len(offered[name]):
            continue
        piece = offered[name][len(taken[name])]
        taken[name].append(piece)
        more = len(piece.encode())
        budget -= more
        if size + more < cap - 1.5 * PIECE:
            heappush(heap, (size + more, key, name))
    return taken


def _held(source: Source) -> str:
    return held_text(source, documents(source, 2_000_000))


def _train(work: tuple[Source, int]) -> list[tuple[str, np.ndarray]]:
    found = (piece for _, text in documents(*work) for piece in pieces(text))
    return [(piece, shingles(piece)) for piece in found]


def collect(found: list[Source], total: int, pool) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the held texts by "split/kind-n" and the training pieces by source name."""
    held: dict[str, str] = {}
    names: dict[str, str] = {}
    others = sorted((s for s in found if s.split != "train"), key=lambda s: s.name)
    for source, text in zip(others, pool.imap(_held, others), strict=True):
        n = sum(key.startswith(f"{source.split}/{source.kind}-") for key in held)
        key = f"{source.split}/{source.kind}-{n}"
        held[key], names[key] = text, source.name
    log(f"{len(held)} held texts, {sum(map(len, held.values()))} characters")
    check = Held(held)
    duplicates = Duplicates()
    train: dict[str, list[str]] = {}
    dropped = {"duplicate": 0, "near held text": 0}
    for kind in KINDS:
        budget = SHARES[kind] * total
        mine = [s for s in found if s.split == "train" and s.kind == kind]
        limit = min(1.1 * CAP * total, SPARE[kind] * budget / max(1, len(mine)))
        kept: dict[str, list[str]] = {}
        work = [(source, int(limit)) for source in mine]
        for source, read_pieces in zip(mine, pool.imap(_train, work), strict=True):
            kept[source.name] = out = []
            for piece, hashes in read_pieces:
                if check.is_near(hashes):
                    dropped["near held text"] += 1
                elif not duplicates.is_new(hashes):
                    dropped["duplicate"] += 1
                else:
                    out.append(piece)
        taken = fill(kept, budget, CAP * total)
        train |= taken
        size = sum(len(piece.encode()) for out in taken.values() for piece in out)
        log(f"{kind}: {len(mine)} sources, {size / 1e6:.1f} MB of {budget / 1e6:.1f}")
    log(f"dropped: {dropped}")
    collect.figures = {
        "dropped_pieces": dropped,
        "held_sources": names,
        "held_shingles_in_train": check.figures(),
        "near_held_pairs": list(near_pairs(held)),
    }
    return held, train


def compress(documents: list[str], file: Path, preset: str) -> list[str]:
    """Write the documents, NUL between them, at most XZ_LIMIT compressed; return those written."""
    while True:
        raw = "\x00".join(documents).encode("utf-8")
        xz = shutil.which("xz")
        if xz:
            # Blocks of a quarter of the text each, so that four threads have work.
            block = max(len(raw) // 4 + 1, 1 << 20)
            with file.open("wb") as out:
                command = [xz, preset, "-T4", f"--block-size={block}", "-c"]
                subprocess.run(command, input=raw, stdout=out, check=True)
        else:
            file.write_bytes(lzma.compress(raw, preset=int(preset[1])))
        size = file.stat().st_size
        log(f"{len(raw) / 1e6:.1f} MB become {size / 2**20:.2f} MiB")
        if size <= XZ_LIMIT:
            return documents
        documents = documents[: int(len(documents) * 0.99 * XZ_LIMIT / size)]


def build(options: argparse.Namespace) -> dict:
    """Build the folder and return what corpus.json says."""
    found = sources(options.sources, options.mirror, options.cache)
    log(f"{len(found)} sources, {sum(len(s.files) for s in found)} files")
    total = int(options.megabytes * 1e6)
    with multiprocessing.Pool(options.workers) as pool:
        held, train = collect(found, total, pool)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for key, text in held.items():
        file = out / "held" / f"{key}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    shuffled = [(name, piece) for name in sorted(train) for piece in train[name]]
    Random("corpus").shuffle(shuffled)
    written = compress([piece for _, piece in shuffled], out / "train.xz", options.preset)
    shuffled = shuffled[: len(written)]
    if not options.no_tokenizer:
        make_tokenizer(written, out / "tokenizer")
    by_name: dict[str, list[str]] = {}
    for name, piece in shuffled:
        by_name.setdefault(name, []).append(piece)
    size = sum(len(piece.encode()) for piece in written)
    kinds = dict.fromkeys(KINDS, 0)
    rows = []
    for source in sorted(found, key=lambda s: s.name):
        mine = by_name.get(source.name, [])
        own = sum(len(piece.encode()) for piece in mine)
        kinds[source.kind] += own
        rows.append(
            {
                "name": source.name,
                "kind": source.kind,
                "licence": source.licence,
                "split": source.split,
                "documents": len(mine),
                "bytes": own,
            }
        )
    report = {
        "train_bytes": size,
        "train_documents": len(written),
        "train_sha256": hashlib.sha256("\x00".join(written).encode()).hexdigest(),
        "train_bytes_by_kind": kinds,
        "largest_source_share": max(row["bytes"] for row in rows) / max(1, size),
        **collect.figures,
        "held_sha256": {k: hashlib.sha256(t.encode()).hexdigest() for k, t in held.items()},
        "sources": rows,
    }
    (out / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def make_tokenizer(texts: list[str], folder: Path, vocab_size: int = 16384) -> None:
    """Train the tokenizer on about 17 MB of the corpus and 15 % of generated text."""
    import tokenizer

    share = min(1.0, 17e6 / max(1, sum(map(len, texts))))
    mine = [text for text in texts if order(text[:200])[0] < 256 * share]
    worlds = int(sum(map(len, mine)) * 0.15 / 0.85)
    tokenizer.save(folder, (*mine, *tokenizer.corpus(worlds)), vocab_size)
    log(f"tokenizer of {vocab_size} entries from {len(mine)} documents")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/natural"))
    parser.add_argument("--megabytes", type=float, default=165, help="of training text")
    parser.add_argument("--mirror", type=Path, help="local git repositories: OWNER+NAME or NAME")
    parser.add_argument("--cache", type=Path, default=Path("runs/natural-cache"))
    parser.add_argument("--sources", type=Path, default=Path(__file__).parent / "sources.toml")
    parser.add_argument("--preset", default="-6", help="of xz")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-tokenizer", action="store_true")
    report = build(parser.parse_args(arguments))
    for key in ("train_bytes", "train_documents", "train_bytes_by_kind", "largest_source_share"):
        print(f"{key}: {report[key]}")
    for key, share in sorted(report["held_shingles_in_train"].items()):
        print(
            f"{key} ({report['held_sources'][key]}): {100 * share:.3f} % of its shingles in train"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
