"""Fixtures of the tests of `mlxkv bench`."""

import json

import pytest

from mlxkv.metal import timing

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
}


@pytest.fixture
def bare_folder(tmp_path):
    """A config.json alone: random weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """The bandwidth of a copy, of a small array: only a number is wanted."""
    monkeypatch.setattr(timing, "COPY_BYTES_CPU", 1 << 16)
