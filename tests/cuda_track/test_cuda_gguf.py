"""GGUF files by transformers' own reader: the numbers, the name and the calibrations of `mlxkv`."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf_files import tensors, write_gguf

import mlxkv
from cuda_track import calibrate
from cuda_track.models.loader import load
from mlxkv.corpora import corpus
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact

torch.set_num_threads(1)


@pytest.mark.parametrize("arch", ("llama", "qwen2", "qwen3", "gemma3"))
def test_logits_and_names_are_those_of_mlx(tmp_path, arch):
    file = write_gguf(tmp_path / "blob", arch, tensors(arch, ["Q8_0", "Q4_1"]))
    ours, theirs = (
        load(str(file), "fp16", "float32"),
        mlxkv.load(str(file), "fp16", dtype="float32"),
    )
    assert ours.fingerprint == theirs.fingerprint
    assert ours.tokenizer.bos_token_id == theirs.tokenizer.bos_token_id
    for text in corpus.passages("evaluation").values():  # transformers 5.17 split Gemma's words
        mine = ours.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert mine == theirs.tokenizer.encode(text, add_special_tokens=False)
    tokens = ours.tokenizer("A page of numbers.", add_special_tokens=False)["input_ids"]
    assert tokens == theirs.tokenizer.encode("A page of numbers.", add_special_tokens=False)
    with torch.no_grad():
        logits = ours.model(torch.tensor([tokens])).logits[0].numpy()
    right = np.array(theirs.model(mx.array([tokens]))[0])
    assert np.abs(logits - right).max() < 2e-3 * np.abs(right).max()


def test_a_calibration_of_a_file_serves_both(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama", tensors("llama", ["Q8_0"]))
    loaded = load(str(file), "fp16", "float32")
    text = "\n\n".join(corpus.interleaved("calibration")[:8])
    tokens = loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:640]
    artifact.write_calibration(tmp_path / "c", calibrate.calibrate(loaded, tokens, "a text"))
    for loader in (load, mlxkv.load):
        found = loader(str(file), "fill-2.25", "float32", calibration=tmp_path / "c")
        assert all(layer.compressed for layer in found.layers)


def test_a_damaged_file_says_so(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama", tensors("llama", ["Q8_0"]))
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(UserError, match=r"^\[load\] model.gguf .*; got .*; "):
        load(str(file), "fp16")
