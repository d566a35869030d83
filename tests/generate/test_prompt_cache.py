"""Saved sessions: they come back the same, and files that must not be read are refused in one line."""

import os

import pytest

from mlxkv import files
from mlxkv.chat.session import Session
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.presets import PRESETS
from mlxkv.generate import prompt_cache
from mlxkv.loading.load import load


@pytest.fixture
def session(loaded) -> Session:
    session = Session(loaded, max_tokens=6)
    list(session.ask('a "quoted" question: ü, {braces}\nand .mlxkv_checksum":"'))
    return session


@pytest.fixture
def saved(session, tmp_path):
    return session.save(str(tmp_path / "talk"))


def test_a_session_comes_back_the_same(session, saved):
    assert saved.name == "talk.safetensors"
    again = Session(session.loaded, max_tokens=6)
    list(again.ask("another"))
    again.load(str(saved))
    assert again.stats.generated_tokens == again.stats.prompt_tokens == 0
    for name in ("tokens", "messages", "text"):
        assert getattr(again, name) == getattr(session, name)
    assert "".join(again.ask("go on")) == "".join(session.ask("go on"))
    assert again.stats.read_tokens == session.stats.read_tokens < again.stats.prompt_tokens


def test_mlx_lm_reads_the_file(session, saved):
    from mlx_lm.models.cache import load_prompt_cache

    cache, metadata = load_prompt_cache(str(saved), return_metadata=True)
    assert metadata["model"] == session.loaded.name
    assert [layer.offset for layer in cache] == [len(session.tokens)] * 2


def refused(session, path, reason: str) -> None:
    """Loading fails with the reason in one line, and the running session is untouched."""
    cache, tokens, messages = session.cache, list(session.tokens), list(session.messages)
    with pytest.raises(UserError, match=reason) as caught:
        session.load(str(path))
    assert "\n" not in str(caught.value)
    assert session.cache is cache and session.tokens == tokens and session.messages == messages


def test_a_calibrated_session_names_its_calibration(model_folder, tmp_path, monkeypatch):
    """It comes back, in another process too, and never with other rotations."""
    from mlxkv.calibration import measure
    from mlxkv.codec import maps
    from mlxkv.formats.calibration import artifact

    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measure, "TOKENS", 600)
    session = Session(load(str(model_folder), "oscar-int2"), max_tokens=6)
    list(session.ask("a long question " * 40))
    saved = session.save(str(tmp_path / "talk"))
    first = [c.layer_maps.digest for c in session.cache]
    monkeypatch.setattr(maps, "_at_hand", {})  # another process
    again = Session(session.loaded, max_tokens=6)
    again.load(str(saved))
    assert [c.layer_maps.digest for c in again.cache] == first
    assert "".join(again.ask("go on")) == "".join(session.ask("go on"))
    artifact.kept_path(session.loaded.fingerprint).unlink()
    monkeypatch.setattr(maps, "_at_hand", {})
    refused(again, saved, f"none with digest {first[0]}")


def test_another_model(session, saved, other_folder):
    other = Session(load(str(other_folder), "fp16"))
    refused(other, saved, "belongs to another model")
    other.loaded.name = session.loaded.name  # two folders may be called the same
    refused(other, saved, "belongs to another model")


def test_another_preset(session, saved):
    session.loaded.kv, session.loaded.kv_name = PRESETS["int4"], "int4"
    refused(session, saved, "got --kv fp16; this session runs --kv int4")


def test_another_format(session, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_cache.session, "FORMAT", "99")
    path = session.save(str(tmp_path / "new"))
    monkeypatch.undo()
    refused(session, path, "session format 99; this version reads 1")


def test_another_mlx_lm(session, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_cache, "version", lambda name: "0.1.2")
    path = session.save(str(tmp_path / "old"))
    monkeypatch.undo()
    refused(session, path, "saved with mlx-lm 0.1.2")


def test_raw_and_chat_do_not_mix(session, saved, tmp_path):
    raw = Session(session.loaded, raw=True, max_tokens=3)
    refused(raw, saved, "without --raw")
    list(raw.ask("abc"))
    path = raw.save(str(tmp_path / "raw"))
    refused(session, path, "was saved with --raw")
    raw.load(str(path))


def test_edited_tensors(session, saved):
    data = bytearray(saved.read_bytes())
    data[-40] ^= 1
    saved.write_bytes(data)
    refused(session, saved, "changed after it was saved")


def test_files_of_others(session, tmp_path):
    import mlx.core as mx
    from mlx_lm.models.cache import save_prompt_cache

    path = tmp_path / "plain.safetensors"
    save_prompt_cache(str(path), session.cache)
    refused(session, path, "not a session saved by mlxkv chat")
    mx.save_safetensors(str(path), {"a": mx.zeros(3)})
    refused(session, path, "not a session saved by mlxkv chat")
    (tmp_path / "notes.txt").write_text("hello")
    refused(session, tmp_path / "notes.txt", "is no safetensors file")
    refused(session, tmp_path / "missing", "no such file")
    refused(session, tmp_path, "no such file|is a folder")


def test_what_cannot_be_saved(session, tmp_path):
    with pytest.raises(UserError, match="no file name"):
        session.save(" ")
    with pytest.raises(UserError, match="no such folder"):
        session.save(str(tmp_path / "missing" / "talk"))
    session.reset()
    with pytest.raises(UserError, match="nothing to save"):
        session.save(str(tmp_path / "talk"))


def test_a_full_disk_keeps_the_old_file(session, saved, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    before, tokens = saved.read_bytes(), list(session.tokens)
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device; nothing was changed"):
        session.save(str(saved))
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]
    assert session.tokens == tokens
    monkeypatch.undo()
    session.save(str(saved))


def test_a_file_cut_short_without_an_error_is_noticed(session, saved, monkeypatch):
    real = prompt_cache.save_prompt_cache

    def short(file, *args):
        real(file, *args)
        file.truncate(file.tell() - 100)

    before = saved.read_bytes()
    monkeypatch.setattr(prompt_cache, "save_prompt_cache", short)
    with pytest.raises(MachineError, match="is the disk full"):
        session.save(str(saved))
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]
