"""How modules that are started by `python -m` end, and what text may reach a terminal or a log."""

import fcntl
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlxkv import console
from mlxkv.chat import terminal
from mlxkv.cli import main
from mlxkv.errors import MachineError, UserError


def test_a_tool_ends_in_one_line(subtests, capsys):
    for outcome, code, said in [
        (None, 0, ""),
        (3, 3, ""),
        (UserError("[--x] bad; got 1"), 2, "[--x] bad; got 1\n"),
        (MachineError("[disk] full"), 1, "[disk] full\n"),
    ]:
        with subtests.test(outcome=outcome, code=code, said=said):

            def main(outcome=outcome):
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome

            with pytest.raises(SystemExit) as ended:
                console.run_tool(main)
            assert ended.value.code == code and capsys.readouterr().err == said


RAW = "\x1b]0;owned\x07\x1b[31mred\x9b\x7f\r\nnext\tend\u202e\udc9b [/b]"


def test_plain_text_moves_no_terminal():
    shown = console.plain(RAW)
    assert shown == ("\\x1b]0;owned\\x07\\x1b[31mred\\x9b\\x7f\\r\\nnext\\tend\\u202e\\udc9b [/b]")
    assert (
        console.plain("Größe 你好 👩‍👩‍👧 \u200f") == "Größe 你好 👩‍👩‍👧 \u200f"
    )  # letters and joiners stay
    several = console.plain(RAW, lines=True)
    assert several == "\\x1b]0;owned\\x07\\x1b[31mred\\x9b\\x7f\nnext\tend\u202e\\udc9b [/b]"
    assert console.one_line(" a\n\x1b b ") == "a \\x1b b"


def test_nothing_shows_raw_text(subtests, capsys):
    for show in [
        console.say,
        console.note,
        console.warn,
        lambda text: console.print_table(["a", "b"], [["1", text]], text),
        lambda text: console.print_json({"text": text}),
        lambda text: main(["chat", "--prompt", "x", "--model", text]),
        lambda text: main([text]),
        lambda text: main(["chat", "--prompt", "x", "--kv", text]),
    ]:
        with subtests.test(show=show):
            show(RAW)
            said = capsys.readouterr()
            shown = said.out + said.err
            assert "owned" in shown and not set(shown) & set("\x1b\x07\x9b\x7f\r\udc9b")


def test_names_in_a_bar_are_no_markup(monkeypatch, capsys):
    """As of a folder whose name looks like a tag of rich's, or like a place of Python's formats."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    name = f"{RAW} {{0}}"
    with console.working(name) as told:
        told(1, 2)
    shown = capsys.readouterr().err
    assert shown.count("nd\u202e") == 0 and "\x1b]0;owned" not in shown
    assert "[/b] {0}" in shown.replace("\n", "")


def test_a_log_has_plain_lines(capsys):
    handler = logging.StreamHandler()
    handler.setFormatter(console.PlainLog())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("got %s", RAW)
    try:
        raise ValueError(RAW)
    except ValueError:
        logger.exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("got \\x1b]0;owned") and lines[0].endswith("[/b]")
    assert lines[1:3] == ["failed", "Traceback (most recent call last):"]
    assert not set("\n".join(lines)) & set("\x1b\x07\x9b\x7f\r")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_output_that_a_closed_terminal_does_not_take_is_dropped():
    code = "import sys; from mlxkv import console; print(file=sys.stderr, flush=True); "
    code += "sys.stdin.read(); sys.stdout.write('x'); {}"
    codes, env = [], {**os.environ, "PYTHONUNBUFFERED": ""}
    for last in ("", "console.STREAMS.flush()"):
        master, end = os.openpty()
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": end}
        done = subprocess.Popen([sys.executable, "-c", code.format(last)], env=env, **pipes)
        done.stderr.readline()  # it has found a terminal
        os.close(end)
        os.close(master)
        done.communicate()
        codes.append(done.returncode)
    assert codes == [120, 0]


def test_numbers_in_tables_are_not_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [["int4", "39.6 MiB", "a very long text that says what it is good for " * 2]] * 2
    console.print_table(["--kv", "cache", "use"], rows)
    assert capsys.readouterr().out.count("39.6 MiB") == 2


def test_a_table_that_is_too_wide_is_printed_in_parts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    heads, rows = (
        ["--kv", *"abc"],
        [[name, *(["0.0026 [0.001, 0.017]"] * 3)] for name in ("fp16", "int4")],
    )
    console.print_table(heads, rows, "costs")
    shown = capsys.readouterr().out
    assert shown.count("0.0026 [0.001, 0.017]") == 6 and shown.count("costs") == 1
    assert [shown.count(name) for name in ("--kv", "fp16", "int4")] == [3, 3, 3]


def test_rows_of_a_table_are_printed_as_they_come(capsys, monkeypatch):
    heads, rows = ["name", "bits", "use"], [["a", 4, "chats"], ["longer", 16, "to compare"]]
    console.print_table(heads, rows, "costs")
    at_once, seen = capsys.readouterr().out, []

    def come():
        for row in rows:
            seen.append(capsys.readouterr().out)
            yield row

    console.print_table(heads, come(), "costs", widest=["longer", 16, "to compare"])
    head, first, last = *seen, capsys.readouterr().out
    assert (head + first + last).split() == at_once.split()
    assert "costs" in head and "bits" in head and "chats" in first and "to compare" in last
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.print_table(heads, come(), widest=["longer", 16, "to compare"])
    assert "chats" not in "".join(seen[2:]) and "4" in seen[3]
    rest = capsys.readouterr().out  # the last row, and all rows of the second part
    assert rest.count("name") == 1 and rest.count("longer") == 2 and rest.count("chats") == 1


def test_signals_wait_for_a_block():
    came = []
    before = {n: signal.signal(n, lambda n, _: came.append(n)) for n in console.ENDING}
    try:
        with console.hold_signals():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.raise_signal(number)
            assert came == []
        assert came == [signal.SIGTERM]  # the first: it ends what the others would end
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        with console.hold_signals(), terminal.left_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(ZeroDivisionError), console.hold_signals():
            _ = 1 / 0
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_elsewhere_than_in_the_main_thread_nothing_is_held():
    def work() -> str:
        with console.hold_signals():
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == "done"


def test_a_chat_is_left_with_the_number_of_the_signal():
    with pytest.raises(SystemExit) as found, terminal.left_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert found.value.code == 128 + signal.SIGTERM


def test_long_work_without_a_terminal_says_so_once_a_minute(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.progress("reading", 200, "two texts") as step:
        for _ in range(150):
            now += 2.0
            step()
    assert capsys.readouterr().err.splitlines() == [
        "reading: two texts",
        "reading: 15%, about 6 min left",
        "reading: 30%, about 5 min left",
        "reading: 45%, about 4 min left",
        "reading: 60%, about 3 min left",
        "reading: 75%, about 2 min left",
    ]
    with console.progress("reading", 200, "25% was kept", 50) as step:
        for _ in range(2):
            now += 60.0
            step(25)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 25% was kept",
        "reading: 38%, about 5 min left",
        "reading: 50%, about 4 min left",
    ]
    with console.progress("nothing", 0) as step:
        step(5)
    with console.working("quick") as told:
        told(1, 2)
    assert not capsys.readouterr().err


def test_lines_are_broken_between_words_in_a_terminal_alone(monkeypatch, capsys):
    line = "  int4: " + "a word " * 12 + "and /a/long/path/of/a/file-with-hyphens.safetensors"
    console.say(line)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    console.say(f"short\n{line}")
    console.say(line, end="")
    shown = capsys.readouterr().out
    assert shown.endswith(line), "pieces of a line are not folded"
    first, *folded = shown.removesuffix(line).splitlines()
    assert first == "short" and max(map(len, folded)) <= 60 and len(folded) == 3
    assert all(part.startswith("  ") for part in folded)
    assert " ".join(" ".join(folded).split()) == line.strip()


def test_lines_are_as_wide_as_the_terminal_that_they_go_to(monkeypatch):
    """Which is not stdout, where that is a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with open(main, "rb"), open(side, "w") as stream:
        assert max(map(len, console.folded("a word " * 20, stream).splitlines())) in range(34, 41)
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert max(map(len, console.folded("a word " * 20, stream).splitlines())) in range(74, 81)


def test_a_bar_has_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with console.progress("reading \x1b[/b] {0}", 4) as step:
        step(2)
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "reading \\x1b[/b] {0}" in shown and "50% -:--:--" in shown
