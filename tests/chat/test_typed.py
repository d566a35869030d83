"""Messages of several lines: typed in a terminal of this process' making, and by a replaced input()."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from mlxkv.chat.typed import History, read_message

READ = """
import sys
from mlxkv.chat.typed import History, read_message
with History(("/help",)):
    print("ready", flush=True)
    while True:
        try:
            message = read_message()
        except EOFError:
            break
        print("GOT", ascii(message), flush=True)
assert not {"mlx", "mlx_lm", "rich", "numpy"} & set(sys.modules)
print("light", flush=True)
"""


def typed(*sent: bytes, home: str) -> list[str]:
    """What `read_message` returns in a terminal for what is sent, each after the reply to the last."""
    main, side = pty.openpty()
    own = {"HOME": home, "XDG_CACHE_HOME": home, "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-c", READ], stdin=side, stdout=side, stderr=side, env=os.environ | own
    )
    os.close(side)
    said = b""

    def wait(until) -> None:
        nonlocal said
        end = time.monotonic() + 30
        while not until() and time.monotonic() < end:
            if select.select([main], [], [], 0.1)[0]:
                try:
                    said += os.read(main, 1 << 16)
                except OSError:  # the child has gone
                    return

    wait(lambda: b"ready" in said and said.rstrip().endswith(b">"))
    for i, text in enumerate(sent):
        os.write(main, text)
        wait(lambda i=i: said.count(b"GOT ") > i and said.rstrip().endswith(b">"))
    os.write(main, b"\x04")
    wait(lambda: b"light" in said)
    child.wait(30)
    os.close(main)
    assert b"light" in said, said
    lines = said.decode().replace("\r", "\n").split("\n")
    return [eval(line.partition("GOT ")[2]) for line in lines if "GOT " in line]


def test_pasted_lines_are_one_message(tmp_path):
    pytest.importorskip("readline")
    pasted = b"one\ntwo\nthree\n"
    bracketed = b"\x1b[200~four\nfive\x1b[201~\n"
    assert typed(pasted, b"alone\n", bracketed, home=str(tmp_path)) == [
        "one\ntwo\nthree",
        "alone",
        "four\nfive",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""first', "", 'last""" and more'], "first\n\nlast"),
        (['"""all in one"""'], "all in one"),
        (['"""', "body", '"""'], "body"),
        (['"""never ends', "here"], "never ends\nhere"),
        (['say """ twice'], 'say """ twice'),
        (["a\udcffb"], "a?b"),
    ],
)
def test_messages_of_many_lines(lines, message, monkeypatch):
    rest = iter(lines)

    def type_in(prompt: str = "") -> str:
        if (line := next(rest, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", type_in)
    assert read_message() == message
    assert next(rest, None) is None


def test_tab_completes_commands_and_files(tmp_path):
    history = History(("/help", "/save", "/stats", "/load"))
    assert history.choices("/s") == ["/save", "/stats"]
    assert history.choices("") == history.choices("s") == []
    (tmp_path / "notes.safetensors").write_text("")
    (tmp_path / "north").mkdir()
    found = history.choices(f"/load {tmp_path}/no")
    assert found == [f"/load {tmp_path}/north/", f"/load {tmp_path}/notes.safetensors"]
