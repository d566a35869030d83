"""Broken model folders, fingerprints and an unreachable hub: one line each that says what to do."""

# ruff: noqa: F401, F811 (the fixtures `saved` and `folder` are imported)
import json
import os
import time
from fnmatch import fnmatch

import huggingface_hub
import huggingface_hub.errors as hub_errors
import pytest
from random_models import WEIGHTS, error_of, folder, response, saved

from mlxkv.catalog import hub
from mlxkv.catalog.hub import PATTERNS, hub_cache
from mlxkv.errors import MachineError
from mlxkv.loading.load import load


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", b"\xff\xfe{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", "{}", "names no model_type"),
        ("config.json", '{"model_type": "llamma"}', "got model_type 'llamma'"),
        ("config.json", '{"model_type": "llama"}', "do not fit together"),
        ("config.json", '{"model_type": "llama", "model_file": "x.py"}', "never runs code"),
        (WEIGHTS, None, "1 of 1 weight files are missing"),
        (WEIGHTS, "", "no room for its header in 0 bytes"),
        (WEIGHTS, b"\xff" * 100, "no room for its header in 100 bytes"),
        (WEIGHTS, b"\x04\0\0\0\0\0\0\0{{{{", "has a header that is not valid JSON"),
        (WEIGHTS, b"\x02\0\0\0\0\0\0\0[]", "has a header that is not valid"),
        ("model.safetensors.index.json", "nonsense", "is not valid JSON"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}',
            "1 of 2 weight files are missing; got",
        ),
        ("tokenizer.json", None, "the tokenizer is missing"),
        ("tokenizer.json", "{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", '{"model": 3}', "the tokenizer cannot be loaded"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json is not valid JSON"),
    ],
)
def test_broken_files(folder, name, content, expected):
    file = folder / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert expected in error_of(folder)


@pytest.mark.parametrize(
    "other, expected",
    [(None, "no weights at all"), ("pytorch_model.bin", "only pytorch_model.bin")],
)
def test_no_safetensors(folder, other, expected):
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").unlink()
    if other:
        (folder / other).write_bytes(b"x")
    text = error_of(folder)
    assert expected in text and "mlx_lm.convert" in text


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_weights(folder, cut):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-cut])
    text = error_of(folder)
    assert f"promises {len(data)} bytes, it has {len(data) - cut}" in text


def test_edited_weights(folder):
    """A header that names another shape or place than the data has."""
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["model.norm.weight"]
    entry["data_offsets"][1] += 4
    edited = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(edited).to_bytes(8, "little") + edited + data[8 + length :])
    assert "do not fit together" in error_of(folder)


class NetworkError(Exception):
    """Stands for an error of whatever HTTP library huggingface_hub uses."""


NetworkError.__module__ = "httpx"


@pytest.mark.parametrize(
    "error, expected",
    [
        (hub_errors.GatedRepoError("gated", response=response()), "hf auth login"),
        (
            hub_errors.RepositoryNotFoundError("404", response=response()),
            "no such model on the hub",
        ),
        (hub_errors.HFValidationError("bad name"), "no such model on the hub"),
        (hub_errors.LocalEntryNotFoundError("offline"), "HF_HUB_OFFLINE"),
        (hub_errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (hub_errors.HfHubHTTPError("503 busy", response=response()), "503 busy"),
        (NetworkError("no route"), "check the network"),
        (ConnectionResetError("reset"), "fetching failed"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "is damaged"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_failures_say_what_to_do(monkeypatch, error, expected):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    text = error_of("gemma-3-1b")
    assert expected in text and "got " in text and "gemma-3-1b-it-4bit" in text
    assert "hf auth login" in text or "choose a model folder" in text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_reference_of_the_hubs_cache_that_is_no_file(monkeypatch, tmp_path, make):
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "snapshots/abc/config.json").write_bytes(b"{}")
    make(folder / "refs/main")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "refs/main is no file" in error_of("owner/name")
    assert hub_cache() == {"owner/name": 2}


def test_a_full_disk_is_a_fault_of_the_machine(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(MachineError, match="the disk is full"):
        load("gemma-3-1b")


def test_a_fetched_folder_loads(folder, monkeypatch):
    asked = {}

    def download(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load("gemma-3-1b")
    assert (loaded.name, loaded.path) == ("gemma-3-1b", folder)
    assert not any(pattern.endswith(".py") for pattern in asked["mlx-community/gemma-3-1b-it-4bit"])


def test_a_long_download_says_how_far_it_is_without_a_terminal(monkeypatch, tmp_path, capsys):
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "old").write_bytes(bytes(4096))  # was here before

    def download(repo, allow_patterns):
        (blobs / "weights.incomplete").write_bytes(bytes(3 << 20))
        told, end = [], time.monotonic() + 20
        while len(told) < 2 and time.monotonic() < end:
            told += capsys.readouterr().err.splitlines()
            time.sleep(0.01)
        assert set(told) == {"downloading owner/name: 3.0 MiB so far"}
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "MINUTE", 0.05)
    assert hub.fetch("owner/name") == tmp_path
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "it ends with the download"


def test_no_code_is_fetched():
    names = ("modeling_llama.py", "kernel.so", "setup.cfg", "pytorch_model.bin", "model.pkl")
    assert not any(fnmatch(name, pattern) for name in names for pattern in PATTERNS)
    assert all(any(fnmatch(n, p) for p in PATTERNS) for n in ("config.json", "model.safetensors"))


def test_faults_of_our_own_are_not_hidden(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load("gemma-3-1b")
