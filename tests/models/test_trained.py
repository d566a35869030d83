"""The trained model of tests/data: it loads, and is small."""

import json

import numpy as np
import pytest
from small_models import SOURCE, TINY, decode

from mlxkv.models import detach, load

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")

FILES = (
    "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    """(model in float32, tokenizer)."""
    made = load(TINY, "fp16", dtype="float32")
    detach(made.model)
    return made.model, made.tokenizer


def ids_of(tokenizer, length: int) -> list[int]:
    text = (SOURCE / "stories.txt").read_text(encoding="utf-8")
    return tokenizer.encode(text)[:length]


def test_a_folder_is_complete_and_small():
    for file in FILES:
        assert (SOURCE / file).stat().st_size > 50, file
    assert (SOURCE / "model.safetensors").stat().st_size <= 9_000_000


def test_matrices_are_stored_in_few_bits():
    how = json.loads((SOURCE / "config.json").read_text())["quantization"]
    assert (how["group_size"], how["bits"], how["mode"]) == (64, 8, "affine")
    weights = mx.load(str(SOURCE / "model.safetensors"))
    assert {w.dtype for key, w in weights.items() if key.endswith("norm.weight")} == {mx.float16}
    packed = {key.removesuffix(".weight") for key, w in weights.items() if w.dtype == mx.uint32}
    assert len(packed) == 1 + 7 * decode()[0]["num_hidden_layers"]  # embeddings as well
    assert {key for key in packed if how.get(key, how)["bits"] == 6} == {
        key for key in packed if ".mlp." in key
    }


def test_weights_are_decoded_as_mlx_decodes_them():
    how = json.loads((SOURCE / "config.json").read_text())["quantization"]
    packed = mx.load(str(SOURCE / "model.safetensors"))
    for key, w in decode()[1].items():
        assert w.dtype == np.float16
        stem = key.removesuffix(".weight")
        if packed[key].dtype != mx.uint32:
            np.testing.assert_array_equal(w, np.array(packed[key]))
            continue
        pair = (packed[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        own = how.get(stem, how)
        theirs = mx.dequantize(packed[key], *pair, own["group_size"], own["bits"])
        np.testing.assert_array_equal(w, np.array(theirs.astype(mx.float16)))


def test_shapes_are_those_the_methods_need():
    gemma = decode()[0]
    assert gemma["model_type"] == "gemma3_text" and gemma["sliding_window"] == 512
    assert gemma["head_dim"] == 128 and gemma["sliding_window_pattern"] == 2
    assert gemma["num_attention_heads"] > gemma["num_key_value_heads"]
    assert gemma["max_position_embeddings"] == 8192 and gemma["tie_word_embeddings"]


def test_huggingface_and_mlx_agree(loaded):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, tokenizer = loaded
    ids = ids_of(tokenizer, 700)  # longer than the sliding window
    theirs = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    error = np.array(model(mx.array([ids]))) - expected
    assert np.sqrt((error**2).mean()) / np.sqrt((expected**2).mean()) < 1e-4


def test_huggingface_reads_the_same_tokens(loaded):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    _, tokenizer = loaded
    raw = pytest.importorskip("tokenizers").Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(SOURCE)
    text = "It's 4 o'clock.\n\nThe code of Ada is 50312.<end_of_turn>\n  x_1 = [1, 2]"
    expected = raw.encode(text, add_special_tokens=False).ids
    assert theirs.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert raw.decode(expected, skip_special_tokens=False) == text


def test_the_chat_template_writes_what_training_saw(loaded):
    _, tokenizer = loaded
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "What is 2 plus 3?"},
    ]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written == (
        "<bos><start_of_turn>user\nBe kind.\n\nHello!<end_of_turn>\n"
        "<start_of_turn>model\nHello! How can I help you?<end_of_turn>\n"
        "<start_of_turn>user\nWhat is 2 plus 3?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert set(tokenizer.eos_token_ids) >= {2, 4}
