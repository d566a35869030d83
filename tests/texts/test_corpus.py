"""The corpus: two splits that share nothing, clean files, and contents that can be checked."""

import ast
import doctest
import json
import re
import sqlite3
from hashlib import sha256
from importlib.resources import files
from itertools import combinations
from types import ModuleType

import pytest

from mlxkv.errors import UserError
from mlxkv.texts import corpus

CASES = [(split, kind) for split in corpus.SPLITS for kind in corpus.KINDS]
CODE = [(split, index) for split in corpus.SPLITS for index in range(7)]
SHARED_LINE = 40  # characters; what is longer may stand in one split only
SHARED_WORDS = 8  # nor may so many words in a row: the idioms of code and of letters are shorter
SHARED_SIGNS = 12  # nor so many Chinese or Japanese signs, which have no spaces between words
SIGNS = re.compile("[\u3040-\u30ff\u4e00-\u9fff]+")


def content(split: str, kind: str) -> bytes:
    return (files("mlxkv.texts") / "corpora" / split / f"{kind}.txt").read_bytes()


def words(text: str, count: int) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+", text.lower())
    return {tuple(found[i : i + count]) for i in range(len(found) - count + 1)}


def signs(text: str) -> set[str]:
    found = "".join(SIGNS.findall(text))
    return {found[i : i + SHARED_SIGNS] for i in range(len(found) - SHARED_SIGNS + 1)}


def long_lines(text: str) -> set[str]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return {line for line in lines if len(line) > SHARED_LINE}


def whole(split: str) -> str:
    return "\n".join(corpus.passages(split).values())


def test_files_are_clean(subtests):
    for split, kind in CASES:
        with subtests.test(split=split, kind=kind):
            data = content(split, kind)
            text = data.decode("utf-8")
            assert 6_000 <= len(data) <= 8_500
            assert text.endswith("\n") and not text.endswith("\n\n")
            assert not text.startswith("\ufeff") and "\r" not in text and "\t" not in text
            trailing = [line for line in text.split("\n") if line != line.rstrip()]
            assert not trailing
            # Words that many tokenizers take for control tokens would not be read as text.
            assert not re.search(r"<\||\|>|</?s>|\[/?INST\]|<(start|end)_of_turn>|<[be]os>", text)


def test_a_split_is_as_long_as_it_says():
    for split in corpus.SPLITS:
        assert 40_000 <= sum(len(content(split, kind)) for kind in corpus.KINDS) <= 48_000


def test_splits_share_nothing():
    """The splits share no line of more than 40 characters, no 8 words in a row and no 12 signs."""
    first, second = (whole(split) for split in corpus.SPLITS)
    assert long_lines(first) and not long_lines(first) & long_lines(second)
    assert not words(first, SHARED_WORDS) & words(second, SHARED_WORDS)
    assert signs(first) and not signs(first) & signs(second)


def test_the_rule_finds_a_copied_sentence():
    """A sentence moved into the other split is found, also with other line breaks and capitals."""
    sentence = "Sow the beans\nwhen the soil has warmed to about"
    assert words(sentence.upper(), SHARED_WORDS) & words(whole("evaluation"), SHARED_WORDS)
    copied = corpus.pieces("evaluation")["languages"][5][20:40]
    assert signs(copied) & signs(whole("evaluation"))


def test_no_passage_stands_twice(subtests):
    for split in corpus.SPLITS:
        with subtests.test(split=split):
            pieces = corpus.interleaved(split)
            for one, other in combinations(pieces, 2):
                assert not words(one, 20) & words(other, 20)


def test_passages_lose_nothing(subtests):
    for split in corpus.SPLITS:
        with subtests.test(split=split):
            pieces = corpus.pieces(split)
            assert tuple(pieces) == tuple(corpus.passages(split)) == corpus.KINDS
            for kind, found in pieces.items():
                assert len(found) >= 7 and all(piece == piece.strip("\n") != "" for piece in found)
                assert "\n%\n".join(found) + "\n" == content(split, kind).decode()
                assert corpus.passages(split)[kind] == "\n\n".join(found)
            mixed = corpus.interleaved(split)
            assert sorted(mixed) == sorted(piece for found in pieces.values() for piece in found)
            assert mixed[: len(pieces)] == [found[0] for found in pieces.values()]
            assert len(pieces["languages"]) == 10


def test_the_digest_is_of_names_and_bytes():
    total = sha256()
    for kind in corpus.KINDS:
        data = content("evaluation", kind)
        total.update(f"evaluation/{kind}.txt {len(data)}\n".encode() + data)
    assert corpus.digest("evaluation") == total.hexdigest()
    assert corpus.digest("calibration") != corpus.digest("evaluation")


def test_an_unknown_split_is_refused(subtests):
    for ask in [corpus.passages, corpus.digest]:
        with subtests.test(ask=ask):
            with pytest.raises(
                UserError, match=r"no such split; got 'train'; choose from calibration"
            ):
                ask("train")


def test_code_is_right(subtests):
    """Python runs with its assertions and doctests, SQL and JSON are read. (C, JavaScript and shell
    were compiled and run when they were written.)"""
    for split, index in CODE:
        with subtests.test(split=split, index=index):
            piece = corpus.pieces(split)["code"][index]
            if piece.startswith("{"):
                assert json.loads(piece)
            elif "CREATE TABLE" in piece:
                sqlite3.connect(":memory:").executescript(piece)
            elif "#include" in piece or "const " in piece or piece.startswith("#!"):
                assert piece.count("{") == piece.count("}")
            else:
                module = ModuleType("piece")
                exec(compile(ast.parse(piece), "piece", "exec"), module.__dict__)
                assert doctest.testmod(module).failed == 0


def test_tool_calls_are_json():
    lines = corpus.pieces("calibration")["tables"][2].splitlines()
    messages = [json.loads(line) for line in lines]
    calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
    assert [json.loads(call["arguments"])["from"] for call in calls] == ["2029-08-12"] * 2
    assert len(json.loads(corpus.pieces("evaluation")["tables"][2])["messages"]) == 8
