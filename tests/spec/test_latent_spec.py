"""The spec of attention over latents: absorbed weights change nothing, and what an error of a latent costs."""

from __future__ import annotations

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


def test_rotary_keys_are_a_part_of_each_head_s_key():
    """Eq. 16 to 18 of DeepSeek-V2: one product of [q^C; q^R] with [k^C; k^R], or the sum of two."""
    rng = np.random.default_rng(8)
    q, q_pe = (
        rng.standard_normal((1, HEADS, NEW, DIMS)),
        rng.standard_normal((1, HEADS, NEW, ROTARY)),
    )
    k, k_pe = (
        rng.standard_normal((1, HEADS, TOKENS, DIMS)),
        rng.standard_normal((1, 1, TOKENS, ROTARY)),
    )
    v = rng.standard_normal((1, HEADS, TOKENS, VALUES))
    joined = affine.attention(
        np.concatenate([q, q_pe], -1),
        np.concatenate([k, np.repeat(k_pe, HEADS, 1)], -1),
        v,
        SCALE,
    )
    split = affine.attention(q, k, v, SCALE, affine.rotary_scores(q_pe, k_pe, SCALE))
    np.testing.assert_allclose(split, joined, rtol=1e-10)


def test_one_record_is_read_as_keys_and_as_values(given):
    """The same codes behind both: expanded from what is stored, or absorbed over it."""
    side = {
        "transform": "srft",
        "seed": 0,
        "bits": 4,
        "group": 16,
        "symmetric": True,
        "axis": "token",
    }
    seen = affine.stored_latents(given["latents"], side, 8, 1, 16)
    assert 0 < np.abs(seen - given["latents"]).max() < 1
    np.testing.assert_array_equal(seen[:, :, :8], given["latents"][:, :, :8])
    given["latents"] = seen
    np.testing.assert_allclose(affine.absorbed(**given), affine.expanded(**given), rtol=1e-10)


def test_what_reads_a_latent_measures_what_an_error_costs(given):
    rng = np.random.default_rng(9)
    queries = (given["q"] @ given["up_keys"]).reshape(-1, RANK)
    reads, weight = affine.latent_readers(queries, given["up_values"], SCALE)
    error = rng.standard_normal(RANK)
    scores = SCALE * queries @ error
    assert error @ reads @ error == pytest.approx((scores**2).mean())
    values = given["up_values"] @ error
    assert error @ weight @ error == pytest.approx((values**2).sum())
