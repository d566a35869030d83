"""Packs: what was read once is there again, the same, and files that are none are refused in one line."""

import json
import sys
from dataclasses import asdict

import pytest

from mlxkv.chat import pack
from mlxkv.chat.session import Session
from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.formats import session
from mlxkv.loading.load import load

FACTS = "The blue door opens with the copper key. " * 12  # some 500 tokens: several pages


def pdf_of(words: str) -> bytes:
    """A document of one page."""
    drawn = f"BT /F 9 Tf 9 9 Td ({words}) Tj ET"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        f"<</Length {len(drawn)}>>stream\n{drawn}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = "%PDF-1.4\n", []
    for n, text in enumerate(objects, 1):
        places.append(len(out))
        out += f"{n} 0 obj{text}endobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 6\n0000000000 65535 f \n{table}trailer<</Size 6/Root 1 0 R>>\nstartxref\n{len(out)}\n%%EOF\n"
    return (out + end).encode()


PDF = pdf_of("Hello pack")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "facts.md").write_text(FACTS)
    (tmp_path / "more.txt").write_text("And the red door has no lock at all.")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(model_folder, *words: str) -> None:
    assert main(["read", "facts.md", "-m", str(model_folder), "-o", "facts", *words]) == 0


def behind(loaded, name="facts", **options) -> Session:
    chat = Session(loaded, max_tokens=8, **options)
    chat.load(f"{name}.kvpack")
    return chat


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_answers_behind_a_pack_are_those_after_reading(kv, model_folder, here):
    made(model_folder, "--kv", kv)
    loaded = load(str(model_folder), kv)
    text = pack.joined(pack.contents(["facts.md"]))
    fresh = Session(loaded, text, max_tokens=8)
    assert fresh.read()
    start = list(fresh.tokens)
    chat = behind(loaded)
    assert chat.tokens == start and chat.messages == [{"role": "system", "content": text}]
    for question in ("Which key?", "And the door?"):
        assert "".join(chat.ask(question)) == "".join(fresh.ask(question))
        assert chat.stats.read_tokens == fresh.stats.read_tokens < 60
    # Nothing was read before: the same tokens, and in full precision the same answer.
    whole = Session(loaded, text, max_tokens=8)
    again = behind(loaded)
    said = ["".join(each.ask("Which key?")) for each in (whole, again)]
    assert whole.tokens[: len(start)] == start and whole.stats.read_tokens > len(start)
    if kv == "fp16":
        assert said[0] == said[1] and whole.tokens == again.tokens


def test_a_new_conversation_begins_behind_the_pack(model_folder, here):
    made(model_folder)
    chat = behind(load(str(model_folder), "int4"))
    start = list(chat.tokens)
    first = "".join(chat.ask("Which key?"))
    list(chat.ask("Are you sure?"))
    chat.reset()
    assert chat.tokens == start and len(chat.messages) == 1
    assert "".join(chat.ask("Which key?")) == first and chat.stats.read_tokens < 60


def test_a_pack_goes_on(model_folder, here):
    made(model_folder)
    assert main(["read", "more.txt", "--add", "facts.kvpack", "-o", "both"]) == 0
    assert main(["read", "facts.md", "more.txt", "-m", str(model_folder), "-o", "once"]) == 0
    loaded = load(str(model_folder), "int4")
    both, once = behind(loaded, "both"), behind(loaded, "once")
    assert both.tokens == once.tokens and both.messages == once.messages
    heads = [pack.header_of(f"{name}.kvpack") for name in ("both", "once", "facts")]
    names = [[file.name for file in session.files_of(head)] for head in heads]
    assert names == [["facts.md", "more.txt"]] * 2 + [["facts.md"]]
    assert session.files_of(heads[0])[0].size == len(FACTS)


def test_the_commands_say_what_there_is(model_folder, here, capsys):
    made(model_folder, "--kv", "int8")
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("facts.kvpack: 5") and " tokens of facts.md, " in out[0]
    assert out[1] == "mlxkv chat --with facts.kvpack"
    assert main(["info", "facts.kvpack"]) == 0
    shown = capsys.readouterr().out
    assert "kv      int8" in shown and "file    facts.md, 492 B, " in shown
    assert "text    # facts.md The blue door" in shown
    assert main(["info", "facts.kvpack", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (file,) = pack.contents(["facts.md"])
    assert document["files"] == [{"name": "facts.md", "bytes": 492, "sha256": file[0].sha256}]
    # Model and preset are the pack's, unless the command line says others.
    assert main(["chat", "--with", "facts.kvpack", "Which key?", "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert (
        captured.out.strip() and f"after facts.kvpack: {document['tokens']} tokens" in captured.err
    )
    assert main(["chat", "--with", "facts.kvpack", "--kv", "int3", "Which?"]) == 2
    assert "was saved with another cache" in capsys.readouterr().err


def refused(words: list[str], reason: str, capsys) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err.splitlines()
    assert reason in err[-1] and len(err) <= 2, err


def test_what_is_no_text_and_no_pack_is_refused(model_folder, here, capsys, monkeypatch):
    model = ["-m", str(model_folder)]
    (here / "noise.bin").write_bytes(bytes(range(256)) * 4)
    (here / "empty.txt").write_text(" \n")
    (here / "taken.kvpack").write_text("my own notes")
    (here / "cut.pdf").write_bytes(b"%PDF-1.4\n1 0 obj<</Type")
    refused(["read", "nowhere.txt", *model], "[read] cannot read 'nowhere.txt'", capsys)
    refused(["read", "noise.bin", *model], "[noise.bin] not text", capsys)
    refused(["read", "empty.txt", *model], "[read] no text", capsys)
    refused(["read", "cut.pdf", *model], "[read] a damaged PDF", capsys)
    refused(["read", "facts.md", *model, "-o", "taken"], "taken.kvpack' ", capsys)
    assert (here / "taken.kvpack").read_text() == "my own notes"
    refused(["read", "facts.md", *model, "-o", "no/such/folder"], "[--out] no such folder", capsys)
    refused(["read", "facts.md", *model, "--kv", "int5"], "[--kv]", capsys)
    refused(["chat", "--with", "taken.kvpack", "Who?"], "taken.kvpack' ", capsys)
    refused(["chat", "--with", "", "Who?"], "[load] no file name", capsys)
    refused(["chat", "--with", "x", "--load", "y", "Who?"], "[load] no such file", capsys)
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (here / "one.pdf").write_bytes(PDF)
    refused(["read", "one.pdf", *model], "pip install 'mlxkv[pdf]'", capsys)


def test_a_pack_of_a_model_that_is_not_here_downloads_nothing(model_folder, here, capsys):
    loaded = load(str(model_folder), "int4")
    chat = Session(loaded, FACTS)
    assert chat.read()
    for asked in ("somebody/large-model", "qwen3-4b", str(here / "gone")):
        chat.pack(here / "foreign.kvpack", [session.PackedFile("a.md", "0" * 64, 1)], asked)
        refused(["chat", "--with", "foreign.kvpack", "Who?"], f"write -m {asked}", capsys)
    words = [
        "chat",
        "--with",
        "foreign.kvpack",
        "-m",
        str(model_folder),
        "--max-tokens",
        "2",
        "Who?",
    ]
    assert main(words) == 0


def test_a_session_is_no_pack(model_folder, here, capsys):
    chat = Session(load(str(model_folder), "int4"), max_tokens=4)
    list(chat.ask("hello"))
    chat.save("talk")
    refused(["chat", "--with", "talk", "Who?"], "is a session, not a pack", capsys)
    made(model_folder)
    capsys.readouterr()
    words = ["chat", "--with", "facts.kvpack", "--system", "Be brief.", "Who?"]
    refused(words, "[--with] a pack begins the conversation; got --system", capsys)


def test_a_text_longer_than_the_context_is_refused_and_nothing_is_written(
    model_folder, here, capsys
):
    (here / "long.txt").write_text("word " * 40_000)
    assert main(["read", "long.txt", "-m", str(model_folder)]) == 2
    assert "[read] longer than the model's context; got" in capsys.readouterr().err
    assert not (here / "long.kvpack").exists()


def test_a_read_that_is_stopped_writes_nothing(model_folder, here, monkeypatch, capsys):
    monkeypatch.setattr("mlxkv.generate.generation.prefill_step", lambda: 64)
    monkeypatch.setattr(Session, "read", lambda chat, progress, stop: False)
    assert main(["read", "facts.md", "-m", str(model_folder)]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not (here / "facts.kvpack").exists()


def test_a_stop_leaves_whole_chunks(model_folder, monkeypatch):
    monkeypatch.setattr("mlxkv.generate.generation.prefill_step", lambda: 64)
    chat, told = Session(load(str(model_folder), "int4"), FACTS), []
    assert not chat.read(lambda *done: told.append(done), lambda: len(told) == 2)
    assert [done for done, _ in told] == [64, 128] and len(chat.tokens) == 128
    assert chat.read() and len(chat.tokens) == told[0][1]  # it goes on


def test_damaged_packs_are_refused(model_folder, here):
    made(model_folder)
    loaded = load(str(model_folder), "int4")
    whole = (here / "facts.kvpack").read_bytes()
    for name, data in {
        "cut": whole[:-50],
        "changed": whole[:-50] + bytes(50),
        "files": whole.replace(b"sha256", b"sha255"),
        "size": whole.replace(b'\\"size\\": 492', b'\\"size\\": -4.'),
    }.items():
        assert data != whole
        (here / f"{name}.kvpack").write_bytes(data)
        with pytest.raises(UserError, match=rf"\[load\] '.*{name}\.kvpack'"):
            behind(loaded, name)


def test_pdf_is_read_by_pypdf(here):
    (here / "one.pdf").write_bytes(PDF)
    ((file, text),) = pack.contents(["one.pdf"])
    assert text.strip() == "Hello pack"
    assert asdict(file) == {"name": "one.pdf", "sha256": file.sha256, "size": len(PDF)}


def test_plain_text_without_a_template(model_folder, here):
    made(model_folder, "--raw")
    loaded = load(str(model_folder), "int4")
    chat = behind(loaded, raw=True)
    assert loaded.tokenizer.decode(chat.tokens).endswith("copper key.")
    with pytest.raises(UserError, match="with --raw"):
        behind(loaded)
