"""Messages of several lines: typed in a terminal of this process' making, and by a replaced input()."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory

from mlxkv.chat.typed import Commands, Kept, Typed

READ = """
import sys, time
from mlxkv.chat.typed import Typed
typed = Typed(("/help",))
while True:
    try:
        message = typed.read()
    except EOFError:
        break
    print("GOT " + ascii(message), flush=True)
    time.sleep(message.startswith("slow"))
assert not {"mlx", "mlx_lm", "rich", "numpy"} & set(sys.modules)
print("light", flush=True)
"""


ASKED, AT = b"\x1b[6n", b"\x1b[5;1R"  # where is the cursor? there
AWAITS = b"\x1b[?2004h"  # a prompt begins: the terminal is asked to mark what is pasted


def typed(*sent: bytes, home: str, ahead: bool = False) -> list[str]:
    """What `Typed.read` returns in a terminal for what is sent, each after the reply to the last, or ahead of its
    end."""
    main, side = pty.openpty()
    own = {"HOME": home, "XDG_CACHE_HOME": home, "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-c", READ], stdin=side, stdout=side, stderr=side, env=os.environ | own
    )
    os.close(side)
    said, answered = b"", 0

    def wait(until) -> None:
        nonlocal said, answered
        end = time.monotonic() + 30
        while not until() and time.monotonic() < end:
            if select.select([main], [], [], 0.1)[0]:
                try:
                    said += os.read(main, 1 << 16)
                except OSError:  # the child has gone
                    return
            if said.count(ASKED) > answered:
                answered += 1
                os.write(main, AT)

    wait(lambda: AWAITS in said)
    for i, text in enumerate(sent):
        os.write(main, text)
        wait(
            lambda i=i: (
                said.count(b"GOT ") > i and (ahead or said.rfind(AWAITS) > said.rfind(b"GOT "))
            )
        )
    wait(lambda: said.count(b"GOT ") == len(sent) and said.rfind(AWAITS) > said.rfind(b"GOT "))
    os.write(main, b"\x04")
    wait(lambda: b"light" in said)
    child.wait(30)
    os.close(main)
    assert b"light" in said, said
    # What is typed during a reply is echoed right behind it.
    return [eval(x) for x in re.findall(r"GOT ('[^']*')", said.decode())]


def pasted(text: str) -> bytes:
    """What a terminal sends for a paste and Enter."""
    return b"\x1b[200~" + text.replace("\n", "\r").encode() + b"\x1b[201~\r"


def test_pasted_lines_are_one_message(tmp_path):
    assert typed(b"one\rtwo\rthree\r", b"alone\r", pasted("four\nfive"), home=str(tmp_path)) == [
        "one\ntwo\nthree",
        "alone",
        "four\nfive",
    ]


def test_a_paste_taller_than_the_screen_is_whole_and_one_entry_of_the_history(tmp_path):
    text = "\n".join(f"make step-{i} \\" for i in range(60)) + "\nend"
    assert typed(pasted(text), home=str(tmp_path)) == [text]
    (file,) = tmp_path.rglob("chat_history")
    assert file.stat().st_mode & 0o777 == 0o600
    assert typed(b"\x1b[A\r", home=str(tmp_path)) == [text]


def test_what_is_typed_during_a_reply_is_the_next_message(tmp_path):
    sent = b"slow\r", b"slow ahead\r", b"slow again\r", b"later\r"
    assert typed(*sent, home=str(tmp_path), ahead=True) == [x.decode().strip() for x in sent]


def test_a_pasted_docstring_keeps_what_follows(tmp_path):
    text = '"""Doc."""\nimport os'
    assert typed(pasted(text), home=str(tmp_path)) == [text]


def full():
    raise OSError(28, "No space left on device")


def test_a_history_forgets_its_oldest_messages(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxkv.chat.typed.MESSAGES", 3)
    file = tmp_path / "chat_history"
    for i in range(5):
        Kept(file).store_string(f"message {i}\nof two lines")
    kept = [f"message {i}\nof two lines" for i in (4, 3, 2)]
    assert list(Kept(file).load_history_strings()) == kept
    assert list(FileHistory(file).load_history_strings()) == kept
    assert file.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [file]
    for i in range(5, 7):
        Kept(file).store_string(f"message {i}")
    before = file.read_bytes()
    monkeypatch.setattr("mlxkv.files.os.fsync", lambda handle: full())
    assert list(Kept(file).load_history_strings()) == ["message 6", "message 5", kept[0]]
    assert file.read_bytes() == before, "a full disk loses nothing"


def test_a_history_that_cannot_be_kept_spoils_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    history = Kept(tmp_path / "file" / "cache" / "chat_history")
    history.store_string("hello")
    assert list(history.load_history_strings()) == []
    assert list(Kept(tmp_path).load_history_strings()) == []


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
    assert Typed().read() == message
    assert next(rest, None) is None


def test_tab_completes_commands_and_files(tmp_path):
    commands = Commands(("/help", "/save", "/stats", "/load"))

    def ends(text: str) -> list[str]:
        found = commands.get_completions(Document(text), CompleteEvent())
        return [text[: len(text) + end.start_position] + end.text for end in found]

    assert ends("/s") == ["/save", "/stats"]
    assert ends("") == ends("s") == []
    (tmp_path / "notes.safetensors").write_text("")
    (tmp_path / "north").mkdir()
    found = ends(f"/load {tmp_path}/no")
    assert found == [f"/load {tmp_path}/north/", f"/load {tmp_path}/notes.safetensors"]
