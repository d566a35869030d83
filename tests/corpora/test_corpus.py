"""The corpus: its files are those that were checked, in pieces that lose nothing."""

from hashlib import sha256
from importlib.resources import files

import pytest

from mlxkv.corpora import corpus
from mlxkv.errors import UserError

# Of the files that were checked: the splits share no line of more than 40 characters, no 8 words in a row and no
# 12 signs; code runs, JSON is read, nothing looks like a control token (tests/corpora at commit 4023461).
DIGESTS = {"calibration": "481beec0fe0a519a", "evaluation": "f3560e97367d98fc"}


def content(split: str, kind: str) -> bytes:
    return (files("mlxkv.corpora") / "texts" / split / f"{kind}.txt").read_bytes()


def test_the_files_are_those_that_were_checked():
    for split, digest in DIGESTS.items():
        total = sha256()
        for kind in corpus.KINDS:
            data = content(split, kind)
            total.update(f"{split}/{kind}.txt {len(data)}\n".encode() + data)
        assert total.hexdigest()[:16] == digest, "check the texts as that tag does, then note it"


def test_passages_lose_nothing():
    for split in corpus.SPLITS:
        pieces = corpus.pieces(split)
        assert tuple(pieces) == tuple(corpus.passages(split)) == corpus.KINDS
        for kind, passages in pieces.items():
            assert len(passages) >= 7 and all(
                piece == piece.strip("\n") != "" for piece in passages
            )
            assert "\n%\n".join(passages) + "\n" == content(split, kind).decode()
            assert corpus.passages(split)[kind] == "\n\n".join(passages)
        mixed = corpus.interleaved(split)
        assert sorted(mixed) == sorted(piece for some in pieces.values() for piece in some)
        assert mixed[: len(pieces)] == [some[0] for some in pieces.values()]


def test_an_unknown_split_is_refused():
    for ask in (corpus.passages, corpus.pieces):
        with pytest.raises(UserError, match=r"no such split; got 'train'; choose from calibration"):
            ask("train")
