"""The folder of a server's sessions: private, of one server, and not stopped by anything that lies in it."""

from __future__ import annotations

import logging
import os
import stat

import crafted_files
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from read_caches import maker, memory_of, read

from mlxkv.errors import UserError
from mlxkv.models import load
from mlxkv.serve.caches.disk import Disk
from mlxkv.serve.caches.sessions import Sessions

ROOM = 1 << 30


@pytest.fixture
def base(tmp_path):
    return tmp_path / "sessions"


@pytest.fixture(scope="module")
def good(small, tmp_path_factory) -> tuple[str, bytes]:
    """(name, bytes) of a session of 150 tokens."""
    disk = Disk(tmp_path_factory.mktemp("good"), ROOM, small)
    disk.save([3] * 150, read(small.model, 150))
    disk.close()
    return disk.entries[0].path.name, disk.entries[0].path.read_bytes()


def place(base, small):
    disk = Disk(base, ROOM, small)
    disk.close()
    return disk.folder


def test_what_it_writes_is_nobody_elses(small, base):
    disk = Disk(base / "of" / "mine", ROOM, small)
    disk.save([1] * 10, read(small.model, 10))
    paths = [base, base / "of", base / "of" / "mine", disk.folder, disk.entries[0].path]
    modes = [stat.S_IMODE(os.lstat(path).st_mode) for path in paths]
    assert modes == [0o700] * 4 + [0o600]


def test_folders_of_others_are_refused(small, base, tmp_path):
    folder = place(base, small)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"\[--kv-disk\] is a link"):
        Disk(base, ROOM, small)
    folder.unlink()
    base.chmod(0o777)
    with pytest.raises(UserError, match=r"\[--kv-disk\] others may write"):
        Disk(base, ROOM, small)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"\[--kv-disk\] is a link"):
        Disk(tmp_path / "link", ROOM, small)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_second_server_is_refused_until_the_first_has_ended(small, base):
    first = Disk(base, ROOM, small)
    with pytest.raises(UserError, match="another server keeps its sessions there"):
        Disk(base, ROOM, small)
    Disk(base, ROOM, load(str(small.path), "int8")).close()  # another preset has its own folder
    first.save([1] * 10, read(small.model, 10))
    sessions = Sessions(memory_of(small.model), maker(small), first)
    sessions.close()
    again = Disk(base, ROOM, small)
    assert [entry.tokens for entry in again.entries] == [[1] * 10]


def test_odd_files_do_not_stop_a_start(small, base, good, caplog):
    folder, (name, content) = place(base, small), good
    (folder / name).write_bytes(content)
    for i, (_, put) in enumerate(crafted_files.odd_files(folder, "odd.safetensors")):
        put()
        os.rename(folder / "odd.safetensors", folder / f"{i}.safetensors")
    (folder / f".draft{i}.safetensors").mkdir()
    (folder / ".x.safetensors").symlink_to("/dev/zero")
    (folder / "notes.txt").write_text("of the user")
    with caplog.at_level(logging.WARNING):
        disk = Disk(base, ROOM, small)
    assert [entry.path.name for entry in disk.entries] == [name]
    assert disk.failed == i + 1 == sum("left alone" in said for said in caplog.messages)
    assert (folder / "notes.txt").exists() and not (folder / ".x.safetensors").is_symlink()
    assert disk.load(disk.entries[0]) is not None


def test_crafted_files_cost_a_session_and_no_request(small, base, good):
    folder, (name, content) = place(base, small), good
    model = memory_of(small.model)
    for what, data in crafted_files.cases(content, every=23):
        (folder / name).write_bytes(data)
        disk = Disk(base, ROOM, small)
        sessions = Sessions(model, maker(small), disk)
        cache, count = sessions.fetch([3] * 160)
        assert count == 0 and all(one.empty() for one in cache), what
        assert disk.failed == 1 or not disk.entries[0].tokens, what
        sessions.keep([4] * 20, read(small.model, 20))
        assert sessions.fetch([4] * 21)[1] == 20
        disk.close()
        for path in folder.iterdir():
            path.unlink()


def test_a_bad_session_is_removed(small, base, good):
    folder, (name, content) = place(base, small), good
    crafted = crafted_files.Crafted(content)
    crafted.metadata["1.0"] = "nn"
    (folder / name).write_bytes(crafted.file())
    disk = Disk(base, ROOM, small)
    assert disk.load(disk.entries[0]) is None and disk.entries == []
    assert os.listdir(folder) == [] and disk.failed == 1
    disk.save([3] * 150, read(small.model, 150))  # it may come again
    assert disk.load(disk.entries[0]) is not None
    disk.entries[0].tokens = [5] * 150  # the file was replaced by another session
    assert disk.load(disk.entries[0]) is None


def test_windows_that_have_moved_on_keep_their_starts(gemma_folder, base):
    """A sliding layer cannot be cut back: the prompt alone is found again, not only with its reply."""
    loaded = load(str(gemma_folder), "int4")
    prompt = list(range(120))
    disk = Disk(base, ROOM, loaded)
    for tokens in (prompt[:-1], [*prompt, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4]):
        cache = make_prompt_cache(loaded.model)
        loaded.model(mx.array([tokens]), cache=cache)
        disk.save(tokens, cache)
    assert sorted(len(entry.tokens) for entry in disk.entries) == [4, 119, 123]
    disk.close()
    for found in (disk, Disk(base, ROOM, loaded)):
        assert [entry.trims for entry in found.entries] == [False, False, True]
        entry, shared = found.nearest(prompt)
        assert (len(entry.tokens), shared) == (119, 119)
        assert found.nearest([*prompt, 7, 8, 9, 10])[1] == 123
        assert found.nearest([*prompt[:50], 5])[0] is None
        assert found.nearest([1, 2, 9])[1] == 2
    sessions = Sessions(memory_of(loaded.model), maker(loaded), found)
    assert sessions.fetch(prompt)[1] == len(prompt) - 1
