"""Where evaluation text comes from: files, the corpus, Python's documentation."""

import re
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxkv.corpora import corpus, sources
from mlxkv.corpora.sources import (
    calibration_text,
    documentation,
    evaluation_texts,
    evaluation_tokens,
    python_topics,
)
from mlxkv.errors import UserError

BOS = -1
TOPICS = cache(python_topics)  # seconds to read


class Characters:
    """A tokenizer whose tokens are code points."""

    def __init__(self, bos: int | None = BOS):
        self.bos_token_id = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        before = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return before + [ord(c) for c in text]


def model(bos: int | None = BOS) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=Characters(bos))


def decode(tokens: list[int]) -> str:
    return "".join(chr(token) for token in tokens)


def sizes() -> int:
    """Characters of the whole evaluation corpus as it is read."""
    return sum(len(piece) + 2 for piece in corpus.interleaved("evaluation"))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((BOS,), (), [BOS]),
        ((), (), []),
        ((7, 8), (), [7, 8]),
        ((BOS,), (9,), [BOS]),
        ((), (9,), []),
    ],
)
def test_texts_begin_as_the_tokenizer_begins_them(before, after, expected):
    """A tokenizer that has a BOS token and puts none, as Qwen's; two tokens, as GLM's; an EOS token behind."""
    made = Characters()
    made.encode = lambda text, add_special_tokens=True: (
        [*before, *map(ord, text), *after] if add_special_tokens else [*map(ord, text)]
    )
    loaded = SimpleNamespace(tokenizer=made)
    assert sources.start_of(loaded) == expected
    assert evaluation_tokens(loaded, 20).tokens[: len(expected) + 1][:-1] == expected
    assert not {7, 8, 9} & set(evaluation_tokens(loaded, 20).tokens[len(expected) :])


def test_a_tokenizer_without_some_letters_begins_texts_all_the_same():
    made = Characters()
    known = made.encode
    made.encode = lambda text, add_special_tokens=True: known(
        text.replace("a", "").replace("A", ""), add_special_tokens
    )
    assert sources.start_of(SimpleNamespace(tokenizer=made)) == [BOS]


@pytest.fixture(autouse=True)
def documentation_is_read_once(monkeypatch):
    monkeypatch.setattr(sources, "python_topics", TOPICS)


@pytest.fixture
def no_documentation(monkeypatch):
    def refuse():
        raise AssertionError("Python's documentation was read where the corpus is enough")

    monkeypatch.setattr(sources, "python_topics", refuse)


def test_models_read_the_corpus_in_turn(no_documentation):
    text = evaluation_tokens(model(), sizes() + 1)
    assert text.name == "corpus evaluation"
    assert text.tokens[0] == BOS
    whole = decode(text.tokens[1:])
    assert whole == "".join(piece + "\n\n" for piece in corpus.interleaved("evaluation"))
    firsts = [whole.index(found[0]) for found in corpus.pieces("evaluation").values()]
    assert firsts == sorted(firsts) and firsts[-1] < len(whole) / 5


def test_longer_texts_go_on_with_the_documentation():
    text = evaluation_tokens(model(), sizes() + 5000)
    assert re.fullmatch(r"corpus evaluation \+ pydoc \d+\.\d+\.\d+\S*", text.name)
    assert len(text.tokens) == sizes() + 5000
    tail = decode(text.tokens[1 + sizes() :])
    assert "\n\n".join(documentation("evaluation")).startswith(tail)
    shorter = evaluation_tokens(model(), 3000)
    assert text.tokens[:3000] == shorter.tokens


def test_too_much_is_refused_with_what_there_is(monkeypatch):
    monkeypatch.setattr(sources, "python_topics", lambda: {})
    there = sizes() + 1
    assert len(evaluation_tokens(model(), there).tokens) == there
    with pytest.raises(UserError, match=rf"got {there} of {there + 1}; choose a shorter"):
        evaluation_tokens(model(), there + 1)


def test_files_are_joined_in_order(tmp_path, no_documentation):
    one, two = tmp_path / "b.txt", tmp_path / "a.txt"
    one.write_text("Grüße aus B", encoding="utf-8-sig")  # the mark at the start is not text
    two.write_text("and from A", encoding="utf-8")
    text = evaluation_tokens(model(), 20, [one, two])
    assert text.name == "b.txt, a.txt"
    assert decode(text.tokens[1:]) == "Grüße aus B\n\nand from A"[:19]
    with pytest.raises(UserError, match=r"in b.txt, a.txt .*got 24 of 25"):
        evaluation_tokens(model(), 25, [one, two])


def test_long_files_are_cut_without_loss(subtests, tmp_path, monkeypatch):
    for line in ["x", "two lines\n", "longer than one part " * 20 + "\n"]:
        with subtests.test(line=line):
            monkeypatch.setattr(sources, "PART", 64)
            file = tmp_path / "long.txt"
            file.write_text(line * 150, encoding="utf-8", newline="\n")
            text = evaluation_tokens(model(bos=None), len(line) * 150, [file])
            assert decode(text.tokens) == line * 150


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n ", "the file is empty"),
        (b"good \xff\xfe bad", "byte 5 is not UTF-8"),
        (b"text\x00text", "zero bytes are not text"),
        (None, "no such file"),
    ],
)
def test_bad_files_are_refused(tmp_path, data, message):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("good")
    if data is not None:
        bad.write_bytes(data)
    with pytest.raises(UserError, match=rf"^\[text\] {message}.*; got \S*bad\.txt; "):
        evaluation_tokens(model(), 3, [good, bad])


def test_a_folder_stands_for_its_texts(tmp_path):
    with pytest.raises(UserError, match="no .txt or .md file in this folder"):
        evaluation_tokens(model(), 5, [tmp_path])
    for name in ("b.txt", "a.md", "ignored.json"):
        (tmp_path / name).write_text(name[0] * 9)
    assert decode(evaluation_tokens(model(bos=None), 12, [tmp_path]).tokens) == "a" * 9 + "\n\nb"
    sources.check_sources([tmp_path])


def test_texts_of_files_are_stretches_in_turn(tmp_path):
    for name, text in (("one", "abcdefghij"), ("two", "0123456"), ("short", "xy")):
        (tmp_path / f"{name}.txt").write_text(text)
    files = [tmp_path / f"{name}.txt" for name in ("one", "two", "short")]
    found = evaluation_texts(model(bos=None), 3, 5, files)
    assert [(text.name, decode(text.tokens)) for text in found] == [
        ("one.txt", "abc"),
        ("two.txt", "012"),
        ("one.txt, part 2", "def"),
        ("two.txt, part 2", "345"),
    ]
    assert len(evaluation_texts(model(bos=None), 3, 2, files)) == 2
    first = evaluation_texts(model(), 3, 1, files)[0]
    assert first.tokens[0] == BOS and decode(first.tokens[1:]) == "ab"
    (joined,) = evaluation_texts(model(bos=None), 12, 5, files)
    assert decode(joined.tokens) == "abcdefghij\n\n"


def test_built_in_texts_have_nothing_in_common():
    count = 9000  # characters: longer than any kind of the corpus
    found = evaluation_texts(model(bos=None), count, 8)
    assert [text.name for text in found] == [*corpus.KINDS, "pydoc", "pydoc"]
    texts = [decode(text.tokens) for text in found]
    assert all(len(text) == count for text in texts)
    parts = [part for text in texts for part in text.split("\n\n")[:-1] if len(part) > 120]
    assert len(set(parts)) > 0.97 * len(parts) > 20  # topics of Python repeat some paragraphs
    for kind, text in zip(corpus.KINDS, texts, strict=False):
        assert text.startswith(corpus.passages("evaluation")[kind][:500])


def test_calibration_and_evaluation_share_no_topic():
    topics = TOPICS()
    shares = {split: documentation(split) for split in corpus.SPLITS}
    of = {text: name for name, found in topics.items() for text in found}
    names = {split: {of[text] for text in found} for split, found in shares.items()}
    assert not names["calibration"] & names["evaluation"]
    assert len(names["calibration"]) > 20 and len(names["evaluation"]) > 80
    paragraphs = {split: sources._paragraphs(found) for split, found in shares.items()}
    assert not paragraphs["calibration"] & paragraphs["evaluation"]
    assert not set(shares["calibration"]) & set(shares["evaluation"])


def test_calibration_text_is_the_other_split():
    text = calibration_text()
    assert text.startswith("\n\n".join(corpus.interleaved("calibration")))
    assert text.endswith(documentation("calibration")[-1])
    assert not any(piece in text for piece in corpus.interleaved("evaluation"))
    assert len(text) > 100_000


def test_the_same_text_in_every_process():
    """The text does not depend on the seed of Python's hashes, which differs between processes."""
    code = "from mlxkv.corpora.sources import *; print(sha256(calibration_text().encode()).hexdigest());"
    code += "import sys; assert 'mlx' not in sys.modules"
    root = Path(__file__).parents[2]
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=env)
    assert done.stdout.strip() == sha256(calibration_text().encode()).hexdigest()
