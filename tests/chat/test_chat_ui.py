"""Ctrl-C, files and the progress bar of the terminal chat."""

import os
import re
import signal
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from mlxkv.chat.session import Session
from mlxkv.chat.terminal import LONG_PROMPT, interactive, prefill_bar, stop_on_interrupt
from mlxkv.console import plain
from mlxkv.loading.load import load


def test_the_first_interrupt_asks_the_second_insists():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_stops_the_reply_and_keeps_the_session(loaded):
    session, seen = Session(loaded, max_tokens=200), []
    with stop_on_interrupt() as stop:
        for piece in session.ask("hello", stop=stop):
            seen.append(piece)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert session.stats.finish_reason == "stopped" and len(session.messages) == 2
    assert {layer.offset for layer in session.cache} == {len(session.tokens)}


def test_only_long_prompts_show_a_bar_and_only_in_a_terminal(capfd, monkeypatch):
    with prefill_bar() as progress:
        progress(0, LONG_PROMPT)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("mlxkv.chat.terminal.Console", partial(Console, force_terminal=True))
    with prefill_bar() as progress:
        progress(0, LONG_PROMPT - 1)
        progress(LONG_PROMPT - 1, LONG_PROMPT - 1)
    assert capfd.readouterr().err == ""
    with prefill_bar() as progress:
        progress(0, LONG_PROMPT)
        progress(512, LONG_PROMPT)
    said = capfd.readouterr()
    assert "512/1024 tokens" in said.err and said.out == ""


def talk(session, lines: list[str], monkeypatch) -> None:
    """`interactive`, with `lines` typed."""
    rest = iter(lines)

    def typed(prompt: str = "") -> str:
        if (line := next(rest, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    interactive(session)


@pytest.mark.parametrize("odd", ["x[/b]", "a[", "[red]", "\x1b[31m", "\\"])
def test_names_are_no_markup(loaded, odd, tmp_path, monkeypatch, capsys):
    session = Session(replace(loaded, name=f"/models/{odd}"), max_tokens=4)
    folder = tmp_path / odd
    folder.mkdir(parents=True)
    talk(session, ["hello", "/stats", f"/save {folder}/s", f"/load {folder}/s", odd], monkeypatch)
    shown = capsys.readouterr().out.replace("\n", "")
    assert shown.count(plain(odd)) >= 3 and "\x1b" not in shown
    assert "saved" in shown and "continues" in shown


def test_a_reply_moves_no_terminal(loaded, monkeypatch, capsys):
    session = Session(loaded, max_tokens=4)
    pieces = ["a\x1b", "]0;owned\x07\n", "\tb\x9b", "\r\nc"]

    def ask(prompt, progress, stop):
        yield from pieces

    monkeypatch.setattr(session, "ask", ask)
    talk(session, ["hello"], monkeypatch)
    assert "a\\x1b]0;owned\\x07\n\tb\\x9b\nc" in capsys.readouterr().out


def test_the_whole_context_is_told_once_a_session(model_folder, monkeypatch, capsys):
    session = Session(load(str(model_folder), "int4"), max_tokens=4)
    talk(session, ["hello", "and now?", "/reset", "again"], monkeypatch)
    out = capsys.readouterr().out
    assert out.count("\n4 tokens · ") == 3
    words = " ".join(out.split())
    told = re.findall(r"nothing compressed yet .*?; at 2,048 tokens .*? saves \d+ %", words)
    assert len(told) == words.count("saves") == 1


def test_save_asks_before_it_replaces_a_file(loaded, tmp_path, monkeypatch, capsys):
    session, file = Session(loaded, max_tokens=4), tmp_path / "talk.safetensors"
    talk(session, ["hello", f"/save {tmp_path}/talk"], monkeypatch)
    before = file.read_bytes()
    assert "saved" in capsys.readouterr().out
    talk(session, ["and now?", f"/save {tmp_path}/talk", "n"], monkeypatch)
    assert "nothing was saved" in capsys.readouterr().out and file.read_bytes() == before
    talk(session, [f"/save {tmp_path}/talk"], monkeypatch)  # the input ends: no answer is no
    assert "nothing was saved" in capsys.readouterr().out and file.read_bytes() == before
    talk(session, [f"/save {tmp_path}/talk", "y"], monkeypatch)
    assert "saved" in capsys.readouterr().out and file.read_bytes() != before


def test_load_shows_the_last_turn(loaded, tmp_path, monkeypatch, capsys):
    session = Session(loaded, max_tokens=4)
    talk(session, ["hello", "what was first?", f"/save {tmp_path}/talk", "/reset"], monkeypatch)
    assert capsys.readouterr().out.count("\n4 tokens · ") == 2
    talk(session, [f"/load {tmp_path}/talk"], monkeypatch)
    out = capsys.readouterr().out
    assert "user: what was first?" in out and "assistant: " in out and "user: hello" not in out


@pytest.mark.parametrize("word", ["exit", "quit", "q", "/exit", "/quit", "/bye"])
def test_words_that_leave(loaded, word, monkeypatch, capsys):
    session = Session(loaded, max_tokens=4)
    talk(session, [word, "hello"], monkeypatch)
    assert session.messages == []


def test_what_was_read_before_a_stop_is_counted(loaded, monkeypatch):
    monkeypatch.setattr("mlxkv.generate.generation.PREFILL_STEP_CPU", 64)
    session = Session(loaded, max_tokens=4)
    asked = iter([False, True])
    assert list(session.ask("x" * 500, stop=lambda: next(asked, True))) == []
    assert session.stats.finish_reason == "stopped"
    assert session.stats.read_tokens == len(session.tokens) < 200
