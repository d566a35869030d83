"""Tiny models of many families with random float32 weights, for tests of attaching and of
loading. Their configs are tests/data/families.json: of each family what it adds to the base."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "families.json").read_text("utf-8"))
BASE, FAMILIES = CONFIGS["plain"]["base"], CONFIGS["plain"]["families"]
LATENT_BASE, LATENT_FAMILIES = CONFIGS["latent"]["base"], CONFIGS["latent"]["families"]
VOCAB = BASE["vocab_size"]


def config_of(family: str) -> dict:
    """A config.json for a tiny model of `family`."""
    extra = FAMILIES[family]
    if "text_config" in extra:
        text = BASE | {"model_type": family} | extra["text_config"]
        return {"model_type": family, "vocab_size": VOCAB, "text_config": text}
    return BASE | {"model_type": family} | extra


def random_model(family: str, seed: int = 0, **changes):
    """A tiny model of `family` with random float32 weights; `changes` go into its config."""
    return _made(config_of(family) | changes, seed)


def latent_model(family: str, seed: int = 0, **changes):
    """The same of a family with multi-head latent attention (MLA)."""
    config = LATENT_BASE | LATENT_FAMILIES[family]
    if "text_config" in config:
        inner = config["text_config"] | changes
        config, changes = {"text_config": inner | {"model_type": "kimi_linear"}}, {}
    return _made(config | {"model_type": family} | changes, seed)


def _made(config: dict, seed: int):
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    return with_noise(model_class(args_class.from_dict(config)))


def with_noise(model):
    """Add noise to every parameter: biases and norms start as constants, random ones make every path matter."""
    model.update(tree_map(_noise, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _noise(x: mx.array) -> mx.array:
    if x.size == 0 or not mx.issubdtype(x.dtype, mx.floating):
        return x
    return x.astype(mx.float32) + 0.02 * mx.random.normal(x.shape)


def tokens(count: int, seed: int = 1) -> mx.array:
    """[count] random token ids."""
    return mx.random.randint(0, VOCAB, (count,), key=mx.random.key(seed))
