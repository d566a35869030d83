"""The tiny model, the text and the presets of the stored sessions in tests/data.

Weights come from NumPy's generator, which gives the same numbers on every machine and in every
version.
"""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from random_models import CONFIGS

TEXT = np.random.default_rng(1).integers(0, 64, 600).tolist()
HELD = 150  # tokens in a stored session
REPLY = 8  # tokens that the model goes on with, greedily
# Name of the file -> preset, and whether the weights turn values.
SESSIONS = {
    "int4": ("int4", False),
    "kivi-int2": ("kivi-int2", False),
    "oja": ("oja-0.75+int4", False),
    "oscar-folded": ("oscar-int4", True),
}


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


def small(config):
    """The preset with small windows, so that few tokens fill pages."""
    return replace(config, sink=8, recent=16, page=min(config.page, 32))


def as_loaded(model, kv: str, config):
    """What `prompt_cache` reads of a loaded model."""
    return SimpleNamespace(
        config={}, model=model, name="stored", fingerprint="5" * 16, kv_name=kv, kv=config
    )


def reply(model, cache) -> tuple[np.ndarray, list[int]]:
    """Logits [REPLY, vocabulary] float32 and tokens of a greedy reply to one more token of TEXT."""
    token, logits, tokens = TEXT[HELD], [], []
    for _ in range(REPLY):
        logits.append(np.array(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)))
        token = int(logits[-1].argmax())
        tokens.append(token)
    return np.stack(logits), tokens
