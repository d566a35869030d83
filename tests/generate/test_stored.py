"""Stored sessions (saved at commit 36566c7) and a stored calibration read the same today.

Weights come from NumPy's generator, which gives the same numbers on every machine and in every version.
"""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from random_models import CONFIGS

from mlxkv.codec import maps
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.generate import prompt_cache
from mlxkv.loading.attach import attach, detach

DATA = Path(__file__).parents[1] / "data"
CALIBRATION = DATA / "calibration.safetensors"

TEXT = np.random.default_rng(1).integers(0, 64, 600).tolist()
HELD = 150  # tokens in a stored session
REPLY = 8  # tokens that the model goes on with, greedily
# Name of the file, preset, and whether the weights of the model that reads it transform values.
SESSIONS = [
    ("int4", "int4", False),
    ("kivi-int2", "kivi-int2", False),
    ("oja", "oja-0.75+int4", False),
    ("oscar-folded", "oscar-int4", True),
    ("oscar-folded", "oscar-int4", False),
]


def stored_model():
    """A llama of one layer in float16."""
    model = llama.Model(llama.ModelArgs.from_dict(CONFIGS["stored"]))
    random = np.random.default_rng(0)

    def filled(x: mx.array) -> mx.array:
        noise = random.standard_normal(x.shape).astype(np.float32)
        return mx.array(1 + 0.1 * noise if x.ndim == 1 else 0.3 * noise)

    model.update(tree_map(filled, model.parameters()))
    model.set_dtype(mx.float16)
    return model


def reply(model, cache) -> tuple[np.ndarray, list[int]]:
    """Logits [REPLY, vocabulary] float32 and tokens of a greedy reply to one more token of TEXT."""
    token, logits, tokens = TEXT[HELD], [], []
    for _ in range(REPLY):
        logits.append(np.array(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)))
        token = int(logits[-1].argmax())
        tokens.append(token)
    return np.stack(logits), tokens


@pytest.fixture(scope="module")
def stored() -> tuple[dict[str, np.ndarray], dict]:
    arrays, metadata = mx.load(str(DATA / "stored.safetensors"), return_metadata=True)
    return {name: np.array(x) for name, x in arrays.items()}, json.loads(metadata["json"])


def test_a_calibration_reads_the_same(stored):
    arrays, said = stored
    made = artifact.read_calibration(CALIBRATION)
    assert made.digest == said["digest"]
    assert (made.model, made.tokens, made.text) == ("stored", 512, "random tokens")
    for kind in ("oscar", "balanced"):
        layer_maps = maps.of(made, (kind, kind))["0"]
        for side in ("keys", "values"):
            got = np.array(getattr(layer_maps, side).down)
            np.testing.assert_allclose(got, arrays[f"{kind}.{side}"], atol=1e-6)


@pytest.mark.skipif(version("mlx-lm").split(".")[:2] != ["0", "32"], reason="saved by mlx-lm 0.32")
@pytest.mark.parametrize(("name", "kv", "folded"), SESSIONS)
def test_a_session_goes_on_as_it_did(stored, name, kv, folded):
    """A session of a folded model goes on in a model that is not folded, too."""
    (arrays, said), model, preset = stored, stored_model(), parse_kv(kv)
    # Small windows, so that few tokens fill pages.
    config = replace(preset, sink=8, recent=16, page=min(preset.page, 32))
    attach(model, config, calibration=CALIBRATION, fold=folded)
    try:
        loaded = SimpleNamespace(config={}, model=model, name="stored", fingerprint="5" * 16)
        loaded.kv_name, loaded.kv = kv, config
        session = prompt_cache.load(str(DATA / f"session-{name}"), loaded)
        assert session.tokens == TEXT[:HELD]
        assert (session.messages, session.text) == ([{"role": "user", "content": "hi"}], "hi")
        (cache,) = session.cache
        assert type(cache) is type(make_prompt_cache(model)[0])
        assert cache.offset == HELD
        logits, tokens = reply(model, session.cache)
    finally:
        detach(model)
    want = arrays[f"{name}.logits"].astype(np.float32)
    assert np.sqrt(np.mean((logits - want) ** 2)) < 1e-2 * np.sqrt(np.mean(want**2))
    assert tokens == said[name]
