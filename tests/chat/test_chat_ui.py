"""Ctrl-C, the history file and the progress bar of the terminal chat."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from rich.console import Console

from mlxkv.chat.terminal import LONG_PROMPT, History, prefill_bar, stop_on_interrupt


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
    from mlxkv.chat.session import Session

    session, seen = Session(loaded, max_tokens=200), []
    with stop_on_interrupt() as stop:
        for piece in session.ask("hello", stop=stop):
            seen.append(piece)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert session.stats.finish_reason == "stopped" and len(session.messages) == 2
    assert {layer.offset for layer in session.cache} == {len(session.tokens)}


def test_history_is_kept_in_the_cache_folder(tmp_path, monkeypatch):
    readline = pytest.importorskip("readline")
    monkeypatch.setattr("mlxkv.chat.terminal.cache_dir", lambda: tmp_path / "cache")
    with History():
        readline.add_history("hello")
    readline.clear_history()
    with History():
        assert readline.get_history_item(readline.get_current_history_length()) == "hello"
    readline.clear_history()


def test_a_folder_that_cannot_be_written_spoils_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("mlxkv.chat.terminal.cache_dir", lambda: tmp_path / "file" / "cache")
    with History():
        pass


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
