"""The trained model of tests/data: it loads, and is small."""

import numpy as np
import pytest
from small_models import SOURCE, TINY

from mlxkv.models import detach, load

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")


@pytest.fixture(scope="module")
def loaded():
    """(model in float32, tokenizer)."""
    made = load(TINY, "fp16", dtype="float32")
    detach(made.model)
    return made.model, made.tokenizer


def ids_of(tokenizer, length: int) -> list[int]:
    text = (SOURCE / "stories.txt").read_text(encoding="utf-8")
    return tokenizer.encode(text)[:length]


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
