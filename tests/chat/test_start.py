"""`mlxkv chat` speaks, and refuses, before anything heavy is imported or read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time

import pytest

from mlxkv.chat.options import ChatOptions
from mlxkv.chat.run import read_prompt
from mlxkv.chat.session import Session
from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.models import load

HEAVY = ("mlx_lm", "transformers", "torch", "mlx")
# Runs a command up to where heavy imports begin.
START = """
import sys, mlxkv.chat.run as start
from mlxkv.cli import main
def stop(what):
    raise SystemExit(77)
start.working = stop
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(code, *({name.split(".")[0] for name in sys.modules} & set(%r)))
"""


def begins(*args, stdin: str = "") -> tuple[list[str], str]:
    """(the exit code, 77 where heavy imports would begin, and the heavy modules that are there), stderr."""
    done = subprocess.run(
        [sys.executable, "-c", START % (HEAVY,), *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
    )
    return done.stdout.split(), done.stderr


def test_the_first_line_comes_before_heavy_imports(with_torch, smollm2):
    found, err = begins("chat", "hello", "--kv", "int2")
    assert found == ["77"] and err == "smollm2 · --kv int2\n"
    assert begins("chat", "hello", "-q") == (["77"], "")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--temp", "-1"),
        ("--top-p", "2"),
        ("--seed", "-1"),
        ("--max-tokens", "0"),
        ("--kv", "int5"),
        ("--kv", "int4", "--fold"),
        ("--kv", "int4+keep2"),
        ("--model", "tinny"),
        ("--dtype", "int8"),
        ("--chat-template-args", "[1]"),
        ("--chat-template-args", '{"tokenize": true}'),
        ("--load", "no-such-session"),
        ("--raw", "--system", "x"),
        ("-p", "twice"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused_before_heavy_imports(wrong):
    found, err = begins("chat", "hello", *wrong)
    assert found == ["2"] and err.startswith("[") and len(err.splitlines()) == 1


def test_a_session_is_looked_at_before_the_model_is_read(model_folder, tmp_path, smollm2):
    session = Session(load(str(model_folder), "int4"), max_tokens=4)
    list(session.ask("hello"))
    path = session.save(str(tmp_path / "talk"))
    own = ("chat", "hi", "-m", model_folder, "--load", path)
    assert begins(*own)[0] == ["77"]
    code, err = begins(*own, "--kv", "int8")
    assert code == ["2"] and "was saved with another cache; got --kv int4" in err
    code, err = begins("chat", "hi", "--load", path)
    assert code == ["2"] and "belongs to another model" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("options", "piped", "prompt"),
    [
        ({"text": ["Sum", "up"]}, "a long text\n", "a long text\n\nSum up"),
        ({"prompt": "Sum up"}, "a long text\n", "a long text\n\nSum up"),
        ({"prompt": "Sum up"}, "", "Sum up"),
        ({}, "a long text\n", "a long text"),
        ({}, "", ""),
        ({"text": ["Sum up"]}, None, "Sum up"),
        ({}, None, None),
    ],
)
def test_stdin_comes_before_the_text_of_the_command_line(options, piped, prompt, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal() if piped is None else io.StringIO(piped))
    assert read_prompt(ChatOptions(**options)) == prompt


def test_a_pipe_that_stays_open_is_waited_for_aloud(monkeypatch, capsys):
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("mlxkv.chat.run.PATIENCE", 0.01)
        from threading import Timer

        Timer(0.5, os.close, [writer]).start()
        assert read_prompt(ChatOptions(prompt="hello")) == "hello"
    assert "waiting for text on stdin" in capsys.readouterr().err


def test_a_file_is_read_with_the_question(model_folder, tmp_path, capfd, monkeypatch):
    """As in a shell: cat FILE | mlxkv chat "..."."""
    file = tmp_path / "notes.txt"
    file.write_text("word " * 100)
    with file.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        options = ["-m", str(model_folder), "--max-tokens", "3", "--json"]
        assert main(["chat", *options, "Summarise"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["prompt_tokens"] > 500
    assert json.loads(out)["finish_reason"] == "length"
    assert "[cut off at 3 tokens; --max-tokens takes more]" in err


def test_a_switch_that_a_template_lacks(loaded, model_folder):
    with pytest.raises(UserError, match="no switch for thinking"):
        Session(loaded, template=ChatOptions(think=False).template)
    session = Session(loaded, template={"colour": "red"}, max_tokens=2)
    assert "".join(session.ask("hello")) is not None


def test_the_template_is_told_whether_to_think(tmp_path):
    from random_model import write_model

    template = (
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n"
        "{% if not enable_thinking %}silent{% endif %}"
    )
    loaded = load(str(write_model(tmp_path / "thinks", template=template)), "fp16")
    for think, seen in ((True, False), (False, True)):
        session = Session(loaded, template=ChatOptions(think=think).template, max_tokens=2)
        list(session.ask("hello"))
        assert ("silent" in loaded.tokenizer.decode(session.tokens)) == seen


def test_what_the_first_line_takes(model_folder):
    """.3 s on a quiet machine; here the machine is shared, so the bound is loose."""
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "mlxkv", "chat", "hi", "-m", str(model_folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as child:
        assert b"--kv int4" in child.stderr.readline()
        first = time.perf_counter() - begun
        child.kill()
    assert first < 10
