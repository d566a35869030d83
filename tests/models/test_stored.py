"""Stored sessions (saved at commit 36566c7) and a stored calibration read the same today."""

import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import stored_model
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.codec import maps
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach, prompt_cache

DATA = Path(__file__).parents[1] / "data"
CALIBRATION = DATA / "calibration.safetensors"


@pytest.fixture(scope="module")
def stored() -> tuple[dict[str, np.ndarray], dict]:
    arrays, metadata = mx.load(str(DATA / "stored.safetensors"), return_metadata=True)
    return {name: np.array(x) for name, x in arrays.items()}, json.loads(metadata["json"])


def test_a_calibration_reads_the_same(stored):
    arrays, said = stored
    made = artifact.read(CALIBRATION)
    assert made.digest == said["digest"]
    assert (made.model, made.tokens, made.text) == ("stored", 512, "random tokens")
    for kind in ("oscar", "balanced"):
        turns = maps.of(made, (kind, kind))["0"]
        for side in ("keys", "values"):
            got = np.array(getattr(turns, side).down)
            np.testing.assert_allclose(got, arrays[f"{kind}.{side}"], atol=1e-6)


@pytest.mark.skipif(version("mlx-lm").split(".")[:2] != ["0", "32"], reason="saved by mlx-lm 0.32")
@pytest.mark.parametrize(
    ("name", "fold"),
    [*stored_model.SESSIONS.items(), ("oscar-folded", ("oscar-int4", False))],
    ids=lambda x: x if isinstance(x, str) else "folded" if x[1] else "plain",
)
def test_a_session_goes_on_as_it_did(stored, name, fold):
    """A session of a folded model goes on in a model that is not folded, too."""
    (arrays, said), (kv, folded) = stored, fold
    model, config = stored_model.stored_model(), stored_model.small(parse_kv(kv))
    attach(model, config, calibration=CALIBRATION, fold=folded)
    try:
        loaded = stored_model.as_loaded(model, kv, config)
        session = prompt_cache.load(str(DATA / f"session-{name}"), loaded)
        assert session.tokens == stored_model.TEXT[: stored_model.HELD]
        assert (session.messages, session.text) == ([{"role": "user", "content": "hi"}], "hi")
        (cache,) = session.cache
        assert type(cache) is type(make_prompt_cache(model)[0])
        assert cache.offset == stored_model.HELD
        logits, tokens = stored_model.reply(model, session.cache)
    finally:
        detach(model)
    want = arrays[f"{name}.logits"].astype(np.float32)
    assert np.sqrt(np.mean((logits - want) ** 2)) < 1e-2 * np.sqrt(np.mean(want**2))
    assert tokens == said[name]
