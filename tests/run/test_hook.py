"""`MLXKV=int4` by the import hook: nothing unless asked for, never in the way of a start, and out again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mlxkv import hook
from mlxkv.errors import UserError
from mlxkv.models.hosts import watch, wrap
from mlxkv.run.start import SITE

ROOT = Path(__file__).parents[2]
BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
# A host without a framework, where `load` calls `load_model` and others have imported both.
UTILS = """
def load_model(path, lazy=False):
    "Read."
    return "model of " + str(path), {}
def load(path):
    return load_model(path)[0], "tokenizer"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder for PYTHONPATH with an mlx_lm of a few lines."""
    package = tmp_path / "site" / "mlx_lm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from mlx_lm.utils import load\n")
    (package / "utils.py").write_text(UTILS)
    for name in (watch.KV, watch.STRICT, "PYTHONPATH", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return package.parent


def python(*words: str, folders=(), **environment) -> subprocess.CompletedProcess:
    path = os.pathsep.join(map(str, folders))
    env = os.environ | {"PYTHONPATH": path} | environment
    words = [str(BASE), *words]
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=120, cwd="/")


def test_a_line_that_python_runs_as_it_starts(tmp_path):
    path = tmp_path / hook.NAME
    assert "not installed" in hook.told(path)
    path.write_text(hook.LINE)
    assert hook.LINE.startswith("import ") and hook.LINE.count("\n") == 1
    assert "another version" not in hook.told(path) and str(path) in hook.told(path)
    path.write_text("import os\n")
    assert "another version" in hook.told(path)
    hook.remove(path)
    hook.remove(path)  # is no error
    assert not path.exists()


def test_it_goes_into_virtual_environments_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    with pytest.raises(UserError, match="goes into a virtual environment"):
        hook.install(tmp_path / hook.NAME)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "base_prefix", "/elsewhere")
    hook.install(tmp_path / hook.NAME)
    assert (tmp_path / hook.NAME).read_text() == hook.LINE


@pytest.mark.parametrize("words", [[], ["instal"], ["install", "now"]])
def test_other_words_are_refused(words):
    with pytest.raises(UserError, match=r"\[hook\] one of install, remove, status"):
        hook.main(words)


def test_the_file_is_that_of_this_environment(capsys):
    assert hook.main(["status"]) == 0
    assert str(sys.prefix) in capsys.readouterr().out
    assert hook.place().parent == Path(sys.prefix, *hook.place().parent.parts[-3:])


def installed(tmp_path: Path, *paths: Path) -> Path:
    """A virtual environment with the hook, which finds `paths`."""
    subprocess.run([BASE, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    place = next((tmp_path / "env" / "lib").glob("*/site-packages"))
    (place / "_paths.pth").write_text("".join(f"{path}\n" for path in paths))
    (place / hook.NAME).write_text(hook.LINE)
    return tmp_path / "env" / "bin" / "python"


def test_the_hook_in_an_environment(tmp_path, fake):
    tool = installed(tmp_path, fake, ROOT)

    def call(code: str, **environment) -> subprocess.CompletedProcess:
        env = os.environ | environment
        words = [str(tool), "-c", code]
        return subprocess.run(words, capture_output=True, text=True, env=env, cwd="/")

    show = "import mlx_lm, sys; print(hasattr(mlx_lm.load, '__mlxkv_original__'), 'mlxkv' in sys.modules)"
    for off in ({}, {"MLXKV": ""}, {"MLXKV": "0"}, {"MLXKV": "off"}):
        done = call(show, **off)
        assert done.stdout.split()[0] == "False" and done.stderr == ""
    assert call(show).stdout == "False False\n"  # nothing of mlxkv was imported
    done = call(show, MLXKV="int4")
    assert (done.stdout, done.stderr) == ("True True\n", "")
    done = call("import mlx_lm.utils as u, inspect; print(u.load_model.__doc__, u.load_model.__name__)\n"
                "print(inspect.getsource(u).splitlines()[1])", MLXKV="int4")  # fmt: skip
    assert done.stdout == "Read. load_model\ndef load_model(path, lazy=False):\n"
    # No mlxkv any more, and one that is broken: a line, and Python starts.
    place = next((tmp_path / "env" / "lib").glob("*/site-packages"))
    (place / "_paths.pth").write_text(f"{fake}\n")
    done = call("print('starts')", MLXKV="int4")
    assert done.stdout == "starts\n" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("[mlxkv] no hook: ModuleNotFoundError")
    assert call("print('starts')").stderr == ""


def test_an_environment_without_mlxkv_hears_of_it_when_a_model_could_be_loaded(fake):
    done = python("-c", "print(1)", folders=(SITE, fake), MLXKV="int4")
    assert (done.stdout, done.stderr) == ("1\n", "")
    code = "import mlx_lm; print(mlx_lm.load('x'))"
    done = python("-c", code, folders=(SITE, fake), MLXKV="int4")
    assert done.stdout == "('model of x', 'tokenizer')\n" and done.returncode == 0
    assert done.stderr.startswith("[mlxkv] MLXKV=int4 has no effect: ")
    assert "has no mlxkv of this version" in done.stderr and len(done.stderr.splitlines()) == 1
    done = python("-c", code, folders=(SITE, fake), MLXKV="int4", MLXKV_STRICT="1")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_sitecustomize_that_ours_hides_is_run(fake, tmp_path):
    (fake / "sitecustomize.py").write_text("import sys; sys.flag = 'theirs'\n")
    code = "import sys, sitecustomize; print(sys.flag, sitecustomize.__file__)"
    for kv in ("int4", ""):
        done = python("-c", code, folders=(SITE, fake), MLXKV=kv)
        assert done.stdout == f"theirs {fake / 'sitecustomize.py'}\n", done.stderr


@pytest.fixture
def host(monkeypatch):
    """A host in this process, and a module that imported from it before."""
    module, other = ModuleType("mlx_lm.utils"), ModuleType("imported_before")
    exec(UTILS, vars(module))
    other.load, other.load_model, other.mine = module.load, module.load_model, module.load
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", module)
    monkeypatch.setitem(sys.modules, "imported_before", other)
    return module, other


def test_names_that_were_imported_before_are_wrapped_and_go_back(host, monkeypatch):
    module, other = host
    before = dict(vars(other))
    given = []
    monkeypatch.setenv(watch.KV, "int4")
    monkeypatch.setattr(wrap, "_compress", lambda found, name: given.append((found, name)))
    wrap.wrap(module)
    wrap.wrap(module)  # twice changes nothing
    assert other.load is module.load is not before["load"]
    assert other.load("x") == ("model of x", "tokenizer")
    assert given == [(("model of x", "tokenizer"), "x")]  # once, of the outermost call
    assert other.load_model(Path("y"))[0] == "model of y" and given[1][1] == "y"
    assert wrap._call.folder == Path("y")
    assert (
        other.load_model(lazy=True, path="y") and wrap._call.folder is None
    )  # a host of other names
    given.pop()
    with pytest.raises(TypeError):
        module.load()
    assert module.load("z") and len(given) == 3  # an error leaves nothing behind
    wrap.unwrap(module)
    assert {name: vars(other)[name] for name in before} == before


def test_without_mlxkv_set_nothing_waits(monkeypatch):
    monkeypatch.delenv(watch.KV, raising=False)
    before = list(sys.meta_path)
    watch.start()
    assert sys.meta_path == before
    monkeypatch.setenv(watch.KV, "int4")
    monkeypatch.setattr(watch, "HOSTS", ())
    watch.start()
    watch.start()
    assert len(sys.meta_path) == len(before) + 1
    watch.stop()
    assert sys.meta_path == before


def test_a_start_without_mlxkv_costs_microseconds():
    """The line of the .pth, as `site` runs it; 1 ms is a hundred times what it takes."""
    environment = {name: value for name, value in os.environ.items() if name != watch.KV}
    code = (
        "import sys, time\nline = sys.stdin.read()\nbegun = time.perf_counter()\nexec(line)\n"
        "print(time.perf_counter() - begun)"
    )
    words = [BASE, "-I", "-c", code]
    took = min(
        float(subprocess.run(words, input=hook.LINE, capture_output=True, text=True, env=environment).stdout)
        for _ in range(3)
    )  # fmt: skip
    assert took < 1e-3
