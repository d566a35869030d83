"""Private files: modes, links, drafts, and what is left after a failure."""

import errno
import os
import stat
from pathlib import Path

import pytest
from small_models import TINY

from mlxkv import files
from mlxkv.errors import UserError


def mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture(autouse=True)
def umask():
    """A mask that hides nothing: what keeps others out is the code."""
    before = os.umask(0)
    yield
    os.umask(before)


def put(path, data: bytes = b"new", **more) -> None:
    with files.written(path, **more) as file:
        file.write(data)


def test_files_and_new_folders_are_nobody_elses(tmp_path):
    folder = tmp_path / "a" / "b" / "c"
    files.make_folder(folder)
    put(folder / "x")
    assert (folder / "x").read_bytes() == b"new"
    made = [tmp_path / "a", tmp_path / "a" / "b", folder]
    assert [mode(path) for path in (*made, folder / "x")] == [0o700] * 3 + [0o600]
    files.make_folder(folder)


def test_a_file_that_was_open_to_all_is_no_more(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "x").chmod(0o666)
    put(tmp_path / "x")
    assert mode(tmp_path / "x") == 0o600 and (tmp_path / "x").read_bytes() == b"new"


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "target").write_bytes(b"of somebody else")
    (tmp_path / "x").symlink_to("target")
    put(tmp_path / "x")
    assert (tmp_path / "target").read_bytes() == b"of somebody else"
    assert not (tmp_path / "x").is_symlink() and (tmp_path / "x").read_bytes() == b"new"


def test_the_draft_is_private_and_in_the_same_folder(tmp_path):
    with files.written(tmp_path / "x"):
        (draft,) = tmp_path.iterdir()
        assert mode(draft) == 0o600
        assert draft.name.startswith(".") and draft.name.endswith(files.DRAFT)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, where):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(files.os, where, fails)
    with pytest.raises(OSError, match="full"):
        put(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_whoever_fails_while_writing_leaves_what_was_there(tmp_path, error):
    with pytest.raises(error), files.written(tmp_path / "x") as file:
        file.write(b"half")
        raise error
    assert os.listdir(tmp_path) == []


def test_a_folder_in_its_place_and_one_that_is_not_there(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError):
        put(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(FileNotFoundError):
        put(tmp_path / "none" / "x")


def test_a_folder_that_is_swapped_gets_nothing(tmp_path):
    """What is held is the folder, not its name."""
    (tmp_path / "theirs").mkdir()
    handle = files.own_folder(tmp_path / "mine", "--kv-disk")
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "mine").symlink_to("theirs")
    put(tmp_path / "mine" / "x", folder=handle)
    os.close(handle)
    assert os.listdir(tmp_path / "theirs") == [] and os.listdir(tmp_path / "moved") == ["x"]


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702, 0o1777])
def test_folders_that_others_may_write_to(tmp_path, bits):
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(bits)
    with pytest.raises(UserError, match=r"^\[--kv-disk\] others may write .*chmod go-w"):
        files.own_folder(tmp_path / "x", "--kv-disk")


def test_folders_that_others_may_read_stay(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o755)
    os.close(files.own_folder(tmp_path / "x", "--kv-disk"))


def test_what_is_no_folder_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("none")
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    names = {"link": "is a link", "loop": "not a folder|is a link", "nothing": "not a folder"}
    names |= {"file": "not a folder", "pipe": "not a folder", "file/below": "not a folder"}
    names |= {"a" * 300: "not a folder"}
    for name, what in names.items():
        with pytest.raises(UserError, match=what) as caught:
            files.own_folder(tmp_path / name, "--kv-disk")
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="another user"):
        files.own_folder(tmp_path / "folder", "--kv-disk")


def test_what_is_kept_for_a_user(tmp_path, monkeypatch):
    from mlxkv import console
    from mlxkv.chat import typed
    from mlxkv.formats.calibration import artifact

    monkeypatch.setattr(console, "cache_dir", lambda: tmp_path / "cache" / "mlxkv")
    typed.Kept(tmp_path / "cache" / "mlxkv" / "chat_history").store_string("hello")
    made = artifact.read_calibration(Path(TINY))
    artifact.write_calibration(tmp_path / "of" / "mine" / "c.safetensors", made)
    assert (
        artifact.read_calibration(tmp_path / "of" / "mine" / "c.safetensors").digest == made.digest
    )
    for path in tmp_path.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "cache" / "mlxkv" / "chat_history").exists()
