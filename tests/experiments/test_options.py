"""Every experiment is a command: --help works, and a mistake is one line with exit code 2."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from small_models import TINY

from mlxkv import console

HOME = Path(__file__).parents[2] / "experiments"
COMMANDS = sorted(
    ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__main__")
    for path in HOME.rglob("*.py")
    if "console.run_tool(main)" in path.read_text(encoding="utf-8")
)
NEEDED = {
    "evidence.pretrained": [TINY],
    "kernels_before": ["x"],
    "peer_tests": ["--tests", "x"],
    "papers.humaneval": ["x"],
    "codes_by_triton": ["x"],
}
NEEDED |= {f"papers.{name}": [TINY] for name in ("ojakv", "oscar", "polarquant", "srft")}


def main_of(name):
    file = HOME.joinpath(*name.split("."))
    return import_module(f"experiments.{name}{'.__main__' if file.is_dir() else ''}").main


def test_help_names_the_command(subtests, capsys):
    for name in COMMANDS:
        with subtests.test(name=name):
            with pytest.raises(SystemExit) as ended:
                main_of(name)(["--help"])
            assert ended.value.code == 0
            assert f"usage: python -m experiments.{name} " in capsys.readouterr().out


def test_an_unknown_option_is_one_line(subtests, capsys):
    for name in COMMANDS:
        with subtests.test(name=name):
            check_an_unknown_option_is_one_line(capsys, name)


def check_an_unknown_option_is_one_line(capsys, name):
    with pytest.raises(SystemExit) as ended:
        console.run_tool(lambda: main_of(name)([*NEEDED.get(name, []), "--bogus"]))
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert re.fullmatch(rf"\[{name}\] .*--bogus; --help lists the options\n", printed.err)


def test_the_readme_lists_every_command():
    text = (HOME / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`python -m experiments\.([\w.]+)", text)) == set(COMMANDS)
