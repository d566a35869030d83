"""What a command line may be given: names that no file can have, odd numbers, odd text, markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.attack._folders import whole
from experiments.attack.frame import Attempt, command
from experiments.fixtures import TINY
from mlxkv.cli import main

RAW = "\x1b]0;owned\x07\x1b[31mred"
LONG = "a" * 300
NAMES = {
    "300 characters": LONG,
    "a folder of 300 characters": f"{LONG}/x",
    "40 characters": "a" * 40,
    "~nouser/x": "~nouser/x",
    "~nouser": "~nouser",
    ".": ".",
    "/": "/",
    "..": "..",
    "empty": "",
    "a space": " ",
    "escapes": RAW,
    "markup": "[/b]",
    "a surrogate": "\udc9b",
    "a line": "a\nb",
    "-": "-",
    "4096 characters": "a/" * 2048,
}
NUMBERS = ["0", "-1", "1e999", "nan", "inf", "x", "", "9" * 400, RAW, "1_0", "0x10", "١"]
OPTIONS = {  # of chat
    "--model": NAMES,
    "--load": NAMES,
    "--calibration": NAMES,
    "--kv": {name: name for name in (*NUMBERS, "int4/", "/", "int4+keep9", "[/b]", LONG)},
    "--dtype": {name: name for name in (*NUMBERS, "float64", "[/b]")},
    "--encode": {name: name for name in (*NUMBERS, "gpu")},
    "--max-tokens": {name: name for name in NUMBERS if name not in ("9" * 400, "1_0", "١")},
    "--temp": {name: name for name in ("-1", "nan", "inf", "x", "1e999", RAW)},
    "--top-p": {name: name for name in ("-1", "nan", "2", "x", RAW)},
    "--seed": {name: name for name in ("-1", "x", "1e5", "9" * 40, RAW)},
    "--keep": {name: name for name in ("-1", "nan", "2", "x", RAW)},
}


def attempts(short: bool) -> Iterator[Attempt]:
    yield from _options(short)
    yield from _commands(short)
    with TemporaryDirectory() as name:
        folder = whole(Path(name) / "a[" / "b]", TINY)
        ran = command("chat", "--model", str(folder), "--prompt", "Hi", "--max-tokens", "2")
        yield Attempt("a model's folder that looks like markup", ran.code == 0, ran.note)


def _options(short: bool) -> Iterator[Attempt]:
    """Every option with every value: refused in one line, mostly in this process, as that is quick."""
    for option, values in OPTIONS.items():
        for name, value in list(values.items())[:: 4 if short else 1]:
            words = ["chat", "--model", TINY, "--prompt", "Hi", option, value]
            label = f"{option} {name[:20]!r}"
            if short or (option, name) not in BY_PROCESS:
                yield _inside(label, words)
                continue
            ran = command(*words)
            yield Attempt(label, ran.one_line, ran.note)


BY_PROCESS = [("--model", "300 characters"), ("--model", "~nouser/x"), ("--load", "~nouser/x")]
BY_PROCESS += [("--load", "."), ("--kv", "[/b]"), ("--model", "escapes"), ("--seed", RAW)]


def _inside(label: str, words: list[str]) -> Attempt:
    """`mlxkv WORDS` in this process, its stderr taken."""
    import io
    from contextlib import redirect_stderr, redirect_stdout

    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        code = main(words)
    lines = said.getvalue().strip().splitlines()
    raw = any(ord(c) < 32 and c not in "\n\t" for c in said.getvalue())
    held = code == 2 and bool(lines) and lines[-1].startswith("[") and not raw
    held = held and "MLXKV_TRACEBACK" not in lines[-1] and len(lines[-1]) < 5000
    return Attempt(label, held, f"exit {code}: {lines[-1][:160] if lines else ''!r}")


def _commands(short: bool) -> Iterator[Attempt]:
    for words in (
        [RAW],
        ["chat", f"--{RAW}"],
        ["fit", "--config", "~nouser/x"],
        ["fit", "--config", LONG],
        ["fit", "--context", "1e999"],
        ["fit", "--memory", "9" * 400],
        ["fit", "--memory", RAW],
        ["calibrate", "--out", "~nouser/x"],
        ["calibrate", "--text", "~nouser/x"],
        ["calibrate", "--text", LONG],
        ["doctor", "--share", "~nouser/x"],
        ["bench", "--share", "~nouser/x"],
        ["serve", "--kv-disk", "~nouser/x"],
        ["serve", "--kv-disk", LONG],
        ["serve", "--port", "99999"],
        ["serve", "--host", RAW],
        ["eval", "--model", LONG],
    ):
        yield _inside(_label(words), words)
    ran = command("chat", RAW, "--model", TINY, "--max-tokens", "2")  # a prompt: anything goes
    yield Attempt(_label(["chat", RAW]), ran.code == 0 and ran.clean, ran.note)


def _label(words: list[str]) -> str:
    return " ".join(words)[:40].replace("\x1b", "ESC").replace("\x07", "BEL")
