"""The commands of a chat: names to save to and load from, markup in them, text that moves a terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from experiments.attack.frame import Attempt
from experiments.fixtures import TINY
from mlxkv.chat.session import Session
from mlxkv.chat.terminal import interactive
from mlxkv.console import one_line
from mlxkv.models import load

RAW = "\x1b]0;owned\x07\x1b[31mred\x9b"
NAMES = {
    "nothing": "",
    ".": ".",
    "/": "/",
    "..": "..",
    "~nouser/x": "~nouser/x",
    "300 characters": "a" * 300,
    "250 characters": "a" * 250,
    "a folder of 300 characters": "a" * 300 + "/x",
    "a folder that is not there": "/nonexistent/x",
    "a zero byte": "a\0b",
    "escapes": RAW,
    "a pipe": "PIPE.safetensors",
    "a folder": "FOLDER.safetensors",
    "text": "TEXT.safetensors",
}
LINES = [
    "/",
    "/nothing",
    f"/{RAW}",
    "/save",
    "/load",
    "/[/b]",
    "/stats x",
    "//",
    "/save \t",
    "[/b]",
]


def attempts(short: bool) -> Iterator[Attempt]:
    loaded = load(TINY, "int4")
    session = Session(loaded, max_tokens=2)
    list(session.ask("Hi"))
    with TemporaryDirectory() as name, _inside(Path(name)):
        os.mkfifo("PIPE.safetensors")
        os.mkdir("FOLDER.safetensors")
        Path("TEXT.safetensors").write_text("text")
        for verb in ("/save", "/load"):
            for label, given in NAMES.items():
                if verb == "/save" and label in ("a pipe", "text"):
                    continue  # a session takes the place of what was there
                saved = label == "escapes"  # a name like any other
                yield _typed(session, f"{verb} {label}", f"{verb} {given}", refused=not saved)
        for line in LINES:
            yield _typed(
                session,
                f"typed {line[:12]!r}",
                line,
                refused=line[:1] == "/" and line[:6] != "/stats",
            )
        for odd in ("a[", "[/b]", "[red]", "[link=file:///]x", "\\"):
            folder = Path(odd)
            folder.mkdir(parents=True, exist_ok=True)
            for verb in ("/save", "/load"):
                yield _typed(
                    session, f"{verb} in a folder {odd}", f"{verb} {folder}/s", refused=False
                )
            before, loaded.name = loaded.name, f"/models/{odd}"
            yield _typed(session, f"/stats of a model in {odd}", "/stats", refused=False)
            loaded.name = before
    loaded.name = RAW
    yield _typed(session, "/stats of a model with escapes", "/stats", refused=False)
    with patch.object(session, "ask", lambda *_: iter([RAW[:3], RAW[3:], "\r\n", "\x9b\x7f\x00"])):
        yield _typed(session, "a reply with escapes", "Hi", refused=False)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _typed(session: Session, label: str, line: str, refused: bool) -> Attempt:
    """A line typed into a chat, and then the end: the chat goes on until then, and shows plain text."""
    rest, out = iter([line]), io.StringIO()

    def typed(prompt: str) -> str:
        if (found := next(rest, None)) is None:
            raise EOFError
        return found

    try:
        with patch("builtins.input", typed), redirect_stdout(out):
            interactive(session)
    except Exception as error:
        return Attempt(label, False, one_line(repr(error))[:160])
    shown = out.getvalue()
    raw = any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    said = any(one.startswith("[") for one in shown.splitlines())
    return Attempt(label, not raw and said == refused, one_line(shown)[-160:])
