"""docs/reference is what the code says, and the code is all there."""

import re
from functools import cache

import typer.main

from experiments.pages import reference
from mlxkv.cli import app
from mlxkv.doctor.listing import LISTED
from mlxkv.patching.probe import REFUSED

PAGES = cache(reference.pages)  # seconds


def test_the_pages_are_what_the_code_writes():
    for name, text in PAGES().items():
        kept = (reference.FOLDER / name).read_text(encoding="utf-8")
        assert kept == text, f"{name} is not what the code says; make reference"


def test_nothing_is_left_out():
    made = PAGES()
    for name, command in reference.walk(typer.main.get_command(app), "mlxkv"):
        section = made["commands.md"].partition(f"## {name}\n")[2].partition("\n## ")[0]
        for param in command.params if name != "mlxkv" else ():
            assert (
                param.name == "help"
                or f"`{param.opts[0]}`" in section
                or (f"`{param.opts[0].upper()}`" in section)
            ), (name, param.name)
    for name in LISTED:
        assert re.search(
            rf"^\|.*`{re.escape(name)}`[,| ].*\|$", made["presets.md"], re.MULTILINE
        ), name
    for name in REFUSED:
        assert f"| `{name}` |" in made["families.md"]
