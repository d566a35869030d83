"""What `mlxkv run` takes for a program, and what it refuses before anything is started."""

import sys
from pathlib import Path

import pytest

from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.run.command import Program, check_options, find, is_this

BIN = Path(sys.executable).parent
BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join([*lines, "print('hello')", ""]))
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A PATH of one folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_script_of_this_python_is_found_as_a_shell_finds_it(path):
    here = script(path / "tool", f"#!{sys.executable}")
    assert find(["tool", "-x"]) == Program(str(here), ["-x"])
    assert find([str(here)]) == Program(str(here), [])
    long = script(
        path / "far", "#!/bin/sh", f"'''exec' {sys.executable} \"$0\" \"$@\"", "' '''", "import os"
    )
    assert find(["far"]) == Program(str(long), [])  # as pip writes it for long paths
    quoted = script(path / "quoted", "#!/bin/sh", f'\'\'\'exec\' "{sys.executable}" "$0" "$@"')
    assert find(["quoted"]) == Program(str(quoted), [])


def test_a_program_beside_this_python_needs_no_path(path):
    assert find(["mlx_lm.generate"]) == Program(str(BIN / "mlx_lm.generate"), [])


def test_modules(path, monkeypatch):
    assert find(["-m", "mlx_lm", "chat"]) == Program("mlx_lm", ["chat"], True)
    assert find(["mlx_lm.models.llama"]) == Program("mlx_lm.models.llama", [], True)
    assert find(["json.tool", "x"]) == Program("json.tool", ["x"], True)
    for words in (["-m"], ["-m", "no_such"], ["-m", "mlx_lm.no_such"]):
        with pytest.raises(UserError, match="no such module here"):
            find(words)
    monkeypatch.chdir(path)
    script(path / "mine.py")
    assert find(["-m", "mine"]) == Program("mine", [], True)


def test_python_and_what_follows(path, monkeypatch):
    monkeypatch.setenv("PATH", str(BIN))
    file = str(script(path / "x.py"))
    assert find(["python", file, "a"]) == Program(file, ["a"])
    assert find([file, "a"]) == Program(file, ["a"])
    assert find(["python", "-m", "json.tool"]) == Program("json.tool", [], True)
    for rest in (["-c", "print(1)"], ["-u", file], []):
        with pytest.raises(UserError, match=r"\[run\] Python's own options are not taken; got "):
            find(["python", *rest])


def test_what_is_no_program_of_python_is_refused(path):
    tool = script(path / "tool", "#!/bin/sh")
    with pytest.raises(UserError, match=rf"\[run\] no program of Python; got {tool}"):
        find(["tool", "a"])


def test_a_program_of_another_python_is_refused_by_name(path):
    tool = script(path / "tool", f"#!{BASE}")
    with pytest.raises(UserError, match=r"\[run\] another Python runs this program") as error:
        find(["tool"])
    assert f"{BASE} -m pip install mlxkv" in str(error.value) and str(tool) in str(error.value)
    with pytest.raises(UserError, match="another Python"):
        find([str(BASE), str(tool)])
    assert not is_this(str(BASE))
    # What lies beside this Python has the name, too.
    script(path / "mlx_lm.generate", f"#!{BASE}")
    assert find(["mlx_lm.generate"]).name == str(BIN / "mlx_lm.generate")


@pytest.mark.parametrize(
    "words, line",
    [
        ([], "[run] no program; got nothing"),
        (["--kv", "int4", "--"], "[run] no program; got nothing"),
        (["mlx_lm.chta"], "did you mean mlx_lm.chat"),
        (["--kv", "in4", "mlx_lm.chat"], "[--kv] unknown preset; got 'in4'; did you mean int4"),
        (["mlxkv", "chat"], "leave run out"),
        (["mlx_lm.generate", "--kv-bits", "4"], "[run] --kv-bits has the program compress"),
        (["mlx_lm.generate", "--kv_bits=4"], "[run] --kv-bits has the program compress"),
        (["--strct", "mlx_lm.chat"], "did you mean --strict"),
        (["--kv-strct", "mlx_lm.chat"], "did you mean --kv-strict"),
    ],
)
def test_refusals_are_one_line(words, line, capsys):
    assert main(["run", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and line in said.err


def test_their_own_compression_is_theirs_in_full_precision():
    with pytest.raises(UserError):
        check_options(["--model", "x", "--kv-quant-scheme", "turboquant"], "int4")
    check_options(["--model", "--kv", "kv-bits"], "int4")
