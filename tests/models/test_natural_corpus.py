"""The natural corpus on tiny sources: what cleaning keeps, what is held apart, what is dropped."""

import argparse
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("tomllib", reason="the list of sources is TOML: Python 3.11")
TRAINING = str(Path(__file__).parents[2] / "training")
sys.path.insert(0, TRAINING)
try:
    from natural import clean, gather, overlap
    from natural import corpus as natural
finally:
    sys.path.remove(TRAINING)

WORDS = [a + b + c for a in ("sto", "li", "wan") for b in ("ne", "ter", "ra") for c in "stmgl"]
COMMON = ("the", "of", "and", "to", "a", "in")


def prose(seed: str, size: int) -> str:
    """Return about `size` characters of sentences that only this seed has."""
    rng, out, length = Random(seed), [], 0
    while length < size:
        words = [w for _ in range(6) for w in (rng.choice(COMMON), rng.choice(WORDS))]
        out.append(" ".join(words).capitalize() + (".\n\n" if rng.random() < 0.2 else ". "))
        length += len(out[-1])
    return "".join(out)


def repository(folder, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    for args in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", folder, *args], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(folder, corpus.json) of a corpus from one git repository of five authors and one package."""
    base = tmp_path_factory.mktemp("corpus")
    shared = prose("both have it", 3000)
    files = {f"{who}/{n}.md": prose(f"{who}{n}", 30_000) for who in "abc" for n in range(3)}
    files["held/1.md"], files["held/2.md"] = prose("h1", 70_000), prose("h2", 5000)
    files["held/1.md"] = shared + files["held/1.md"]
    files["copier/quotes.md"] = shared + prose("own", 3000)
    files["copier/twice.md"] = files["a/1.md"]
    files["copier/short.md"] = "The end of it.\n"
    repository(base / "mirror" / "some+books", files)
    manual = base / "cache" / "unpacked" / "tool-doc" / "usr"
    manual.mkdir(parents=True)
    page = f"<html><head><title>x</title></head><body><p>{prose('manual', 4000)}</p></body></html>"
    (manual / "tool.html").write_text(page)
    (base / "list.toml").write_text(
        '[held.test]\nprose = ["some/books/held"]\n'
        '[[git]]\nname = "some/books"\nkind = "prose"\nlicence = "none"\ngroup = true\n'
        'include = ["*/*.md"]\n'
        '[[deb]]\nname = "tool-doc"\nkind = "manual"\nlicence = "MIT"\ninclude = ["*.html"]\n'
    )
    options = argparse.Namespace(
        sources=base / "list.toml", mirror=base / "mirror", cache=base / "cache",
        out=base / "out", megabytes=2.0, preset="-0", workers=1, no_tokenizer=True,
    )  # fmt: skip
    return base / "out", natural.build(options)


def training_text(folder) -> list[str]:
    return lzma.decompress((folder / "train.xz").read_bytes()).decode("utf-8").split("\x00")


def test_no_document_of_a_held_source_is_in_train(built):
    folder, report = built
    held = (folder / "held" / "test" / "prose-0.txt").read_text(encoding="utf-8")
    assert len(held) >= natural.HELD_LEAST
    rows = {row["name"]: row for row in report["sources"]}
    assert rows["some/books/held"]["documents"] == 0 < rows["some/books/a"]["documents"]
    known = overlap.shingles(held + prose("h2", 5000))
    for text in training_text(folder):
        assert not overlap.shared(overlap.shingles(text), known).any()
    assert report["held_sources"] == {"test/prose-0": "some/books/held"}
    assert report["held_shingles_in_train"] == {"test/prose-0": 0.0}


def test_quoted_copied_and_short_documents_are_dropped(built):
    folder, report = built
    assert report["dropped_pieces"] == {"duplicate": 1, "near held text": 1}
    together = "".join(training_text(folder))
    assert prose("own", 3000)[:200] not in together
    assert together.count(prose("a1", 30_000)[1000:1400]) == 1
    assert "The end of it." not in together


def test_the_report_adds_up(built):
    folder, report = built
    texts = training_text(folder)
    assert report["train_documents"] == len(texts)
    assert report["train_bytes"] == sum(len(text.encode()) for text in texts)
    assert report["train_bytes"] == sum(row["bytes"] for row in report["sources"])
    assert report == json.loads((folder / "corpus.json").read_text())
    kinds = report["train_bytes_by_kind"]
    assert kinds["prose"] > kinds["manual"] > 3000


def test_a_held_source_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "list.toml").write_text('[held.test]\nprose = ["no/such"]\n')
    with pytest.raises(SystemExit, match=r"\[corpus\] held sources are not there.*no/such"):
        gather.sources(tmp_path / "list.toml", None, tmp_path)


def test_fill_takes_evenly_and_keeps_the_cap():
    offered = {"big": ["x" * 100_000] * 50, "small": ["y" * 50_000] * 2}
    taken = natural.fill(offered, budget=3e6, cap=1.2e6)
    assert len(taken["small"]) == 2
    assert sum(map(len, taken["big"])) <= 1.2e6
    assert len(natural.fill(offered, budget=250_000, cap=1e9)["big"]) <= 2


def test_pieces_lose_nothing():
    text = prose("long", 350_000)
    parts = natural.pieces(text)
    assert len(parts) == 3
    assert "".join("".join(parts).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("path", "source", "want"),
    [
        (
            "a.html",
            "<html><head><title>T</title></head><body><script>no()</script><h1>A &amp; B</h1>"
            '<div class="navheader"><a href="x">Next</a></div><p>one\n two</p>'
            "<pre>x = 1\n  y</pre></body></html>",
            "A & B\n\none two\n\nx = 1\n  y\n",
        ),
        (
            "ls.1",
            '.\\" note\n.TH LS 1\n.SH NAME\nls \\- list\n.SH OPTIONS\n.TP\n.BR \\-a ", " \\-\\-all\n'
            "show \\fIall\\fP\n",
            "NAME\n\nls - list\n\nOPTIONS\n\n-a, --all show all\n",
        ),
        (
            "a.info",
            "File: a.info,  Node: Top,  Next: B\n\n1 Intro\n* Menu:\n\n* B::  more\nText.\n\x1f\n",
            "1 Intro\n\nText.\n",
        ),
        ("a.pod", "=head1 NAME\n\nUse C<my $x> and B<I<this>>.\n\n=cut\n", "NAME\n\nUse my $x and this.\n"),
        (
            "a.md",
            "---\ntitle: x\n---\n# Hi\n\nsee [the page](http://a/b) ![p](q.png)\n<!-- c -->end\n",
            "# Hi\n\nsee the page\nend\n",
        ),
        ("a.c", "/* Copyright X\n * licence */\n\nint x;\n", "int x;\n"),
        ("b.py", "# a comment\nx = 1\n", "# a comment\nx = 1\n"),
        ("c.go", "// Code generated by tool. DO NOT EDIT.\npackage x\n", "\n"),
    ],
)  # fmt: skip
def test_cleaning(path, source, want):
    assert clean.clean(path, source.encode()) == want
    assert clean.clean(path + ".gz", gzip.compress(source.encode())) == want


def test_english_is_told_from_other_languages():
    assert clean.is_english(prose("x", 1000))
    assert not clean.is_english("Der Hund und die Katze gehen heute in den Wald. " * 20)


def test_lines_that_a_source_repeats_go():
    texts = [f"Home | Documentation | Bugs\npage {n} says\n" for n in range(8)]
    assert overlap.without_boilerplate(texts) == [f"page {n} says\n" for n in range(8)]


def test_near_copies_are_found_with_a_few_words_changed():
    duplicates = overlap.Duplicates()
    text = prose("near", 20_000)
    changed = text.replace("stones", "pebbles", 3)
    assert duplicates.is_new(overlap.shingles(text))
    assert not duplicates.is_new(overlap.shingles(changed))
    assert duplicates.is_new(overlap.shingles(prose("far", 20_000)))
