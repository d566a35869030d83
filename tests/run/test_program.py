"""What `mlxkv run` takes for a program, and what it refuses before anything is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.run import program
from mlxkv.run.command import check_options
from mlxkv.run.program import ELSEWHERE, HERE, MODULE, Program, find

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
    assert find(["tool", "-x"]) == Program(HERE, str(here), ["-x"])
    assert find([str(here)]) == Program(HERE, str(here), [])
    long = script(
        path / "far", "#!/bin/sh", f"'''exec' {sys.executable} \"$0\" \"$@\"", "' '''", "import os"
    )
    assert find(["far"]) == Program(HERE, str(long), [])  # as pip writes it for long paths
    quoted = script(path / "quoted", "#!/bin/sh", f'\'\'\'exec\' "{sys.executable}" "$0" "$@"')
    assert find(["quoted"]) == Program(HERE, str(quoted), [])


def test_a_program_beside_this_python_needs_no_path(path):
    assert find(["mlx_lm.generate"]) == Program(HERE, str(BIN / "mlx_lm.generate"), [])


def test_modules(path, monkeypatch):
    assert find(["-m", "mlx_lm", "chat"]) == Program(MODULE, "mlx_lm", ["chat"])
    assert find(["mlx_lm.models.llama"]) == Program(MODULE, "mlx_lm.models.llama", [])
    assert find(["json.tool", "x"]) == Program(MODULE, "json.tool", ["x"])
    for words in (["-m"], ["-m", "no_such"], ["-m", "mlx_lm.no_such"]):
        with pytest.raises(UserError, match="no such module here"):
            find(words)
    monkeypatch.chdir(path)
    script(path / "mine.py")
    assert find(["-m", "mine"]) == Program(MODULE, "mine", [])


def test_python_and_what_follows(path, monkeypatch):
    monkeypatch.setenv("PATH", str(BIN))
    file = str(script(path / "x.py"))
    assert find(["python", file, "a"]) == Program(HERE, file, ["a"])
    assert find([file, "a"]) == Program(HERE, file, ["a"])
    assert find(["python", "-m", "json.tool"]) == Program(MODULE, "json.tool", [])
    for rest in (["-c", "print(1)"], ["-u", file], []):
        assert find(["python", *rest]) == Program(ELSEWHERE, str(BIN / "python"), rest)


def test_what_is_no_python_is_left_to_the_system(path):
    tool = script(path / "tool", "#!/bin/sh")
    assert find(["tool", "a"]) == Program(ELSEWHERE, str(tool), ["a"])


def test_a_python_without_mlxkv_is_refused_by_name(path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    tool = script(path / "tool", f"#!{BASE}")
    with pytest.raises(UserError, match="has no mlxkv of this version") as error:
        find(["tool"])
    assert f"{BASE} -m pip install mlxkv" in str(error.value) and str(tool) in str(error.value)
    assert not program.has_mlxkv(str(BASE)) and not program.is_this(str(BASE))
    # What lies beside this Python has the name, too.
    script(path / "mlx_lm.generate", f"#!{BASE}")
    assert find(["mlx_lm.generate"]).name == str(BIN / "mlx_lm.generate")


def test_another_python_with_mlxkv_is_started_as_it_is(path, monkeypatch):
    tool = script(path / "tool", f"#!{BASE}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert find(["tool", "a"]) == Program(ELSEWHERE, str(tool), ["a"])


def test_a_script_that_shuts_the_environment_out_is_refused(path):
    for option in ("-I", "-sE"):
        script(path / "tool", f"#!{sys.executable} {option}")
        with pytest.raises(UserError, match="switches PYTHONPATH off"):
            find(["tool"])
    script(path / "tool", f"#!{sys.executable} -s")
    assert find(["tool"]).how == HERE


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
        (["--kv-windows", "0", "mlx_lm.chat"], "[--kv-windows] must be at least 1 token; got 0"),
        (["--strct", "mlx_lm.chat"], "did you mean --strict"),
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


def test_a_refused_command_leaves_the_environment(monkeypatch, capsys):
    monkeypatch.delenv("MLXKV", raising=False)
    before = dict(os.environ)
    assert main(["run", "no-such-program"]) == 2
    assert dict(os.environ) == before and "no such program" in capsys.readouterr().err
