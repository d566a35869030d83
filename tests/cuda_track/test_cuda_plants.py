"""Planted models in transformers compute what they compute in MLX, tied embeddings included."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from cuda_track.models.loader import load
from mlxkv import models
from mlxkv.errors import UserError
from mlxkv.models.catalog.aliases import EMBEDDED
from mlxkv.models.catalog.weights.plant import RECIPROCAL

TEXT = "Mia went to the market.\n\nShe bought a blue crown.\n\nIt was nice."


@pytest.mark.parametrize(
    "name", [n for n, s in EMBEDDED.items() if s.planted not in ("", RECIPROCAL)]
)
def test_planted_models_agree(name):
    ours, theirs = load(name, "fp16", "float32"), models.load(name, "fp16", dtype="float32")
    tokens = theirs.tokenizer.encode(TEXT)
    expected = np.array(theirs.model(mx.array([tokens]))[0])
    with torch.no_grad():
        found = ours.model(torch.tensor([tokens])).logits[0].numpy()
    assert np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()) < 1e-4
    assert ours.fingerprint == theirs.fingerprint


def test_what_cannot_be_planted_is_refused_in_one_line():
    with pytest.raises(UserError, match="offset needs a bias of k_proj"):
        load(f"{EMBEDDED['tiny'].folder}+offset", "fp16", "float32")


def test_eight_bits_of_mlx_are_refused_in_one_line():
    with pytest.raises(UserError, match="tiny-chat is stored in 8 bits as MLX packs them"):
        load("tiny-chat", "fp16")
