"""The training of `tiny-chat` on a GPU computes the loss that the one on CPUs does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
TRAINING = str(ROOT / "training")
sys.path.insert(0, TRAINING)
try:
    import export
    from chat import gpu, train
finally:
    sys.path.remove(TRAINING)


@pytest.mark.parametrize("length", [train.LENGTH, 600])  # 600: behind the sliding window
def test_the_loss_is_the_same_on_both(length):
    model = export.read(ROOT / "mlxkv" / "models" / "embedded" / "tiny-chat")
    one = gpu.chats(str(ROOT / train.START / "tokenizer.json"), "test", {length})[length]
    ids, weights = train.batch(one, 2)
    with torch.no_grad():
        plain = train.loss_of(model, ids, weights)
        for block in model.model.layers:
            block.self_attn.attend = gpu.attend
        with torch.autocast("cpu", torch.bfloat16):
            fused = gpu.loss_of(model, ids, weights)
    assert abs(plain - fused) < 0.02 * plain


def test_the_rate_falls_to_nothing():
    assert gpu.rate(0, 0.0) < 0.1 and gpu.rate(1000, 0.2) == 1 and gpu.rate(1000, 1.0) == 0
