"""The spec of attention over latents: absorbed weights change nothing, and what an error of a latent costs."""

import numpy as np
import pytest

from mlxkv.spec import affine

HEADS, NEW, TOKENS, DIMS, VALUES, RANK, ROTARY = 3, 2, 40, 16, 24, 32, 8
SCALE = (DIMS + ROTARY) ** -0.5


@pytest.fixture
def given():
    rng = np.random.default_rng(7)
    bias = affine.rotary_scores(
        rng.standard_normal((1, HEADS, NEW, ROTARY)),
        rng.standard_normal((1, 1, TOKENS, ROTARY)),
        SCALE,
    )
    mask = affine.causal_mask(NEW, TOKENS)
    return {
        "q": rng.standard_normal((1, HEADS, NEW, DIMS)),
        "latents": rng.standard_normal((1, 1, TOKENS, RANK)),
        "up_keys": rng.standard_normal((HEADS, DIMS, RANK)) / RANK**0.5,
        "up_values": rng.standard_normal((HEADS, VALUES, RANK)) / RANK**0.5,
        "scale": SCALE,
        "bias": np.where(mask, bias, -1e30),
    }


def test_absorbed_weights_change_nothing(given):
    whole = affine.expanded(**given)
    assert whole.shape == (1, HEADS, NEW, VALUES)
    np.testing.assert_allclose(affine.absorbed(**given), whole, rtol=1e-10, atol=1e-12)


def test_what_an_error_of_a_latent_moves(given):
    """The derivative that `latent_readers` is made of, by finite differences."""
    rng = np.random.default_rng(9)
    token, error, step = 5, rng.standard_normal(RANK), 1e-6
    moved = given["latents"].copy()
    moved[0, 0, token] += step * error
    found = affine.absorbed(**given | {"latents": moved}) - affine.absorbed(**given)
    q, latents = given["q"] @ given["up_keys"], given["latents"][0, 0]
    s = SCALE * (q @ latents.T) + given["bias"]
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    shift = SCALE * (q @ error)[..., None] * (latents[token] - p @ latents) + error
    wanted = p[..., token, None] * (shift @ given["up_values"].swapaxes(-1, -2))
    np.testing.assert_allclose(found / step, wanted, rtol=1e-4, atol=1e-6)
