"""Clips that a calibration has for a layer: caches use them. Files of earlier versions may hold some."""

import dataclasses
from functools import cache

import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model

from mlxkv.formats.calibration import artifact
from mlxkv.models import attach, detach
from mlxkv.models.calibration import measure

TOKENS = np.random.default_rng(0).integers(0, 64, 700).tolist()


@cache
def llama():
    return random_model("llama")


def test_one_pass_of_attach_gives_each_layer_its_own():
    made = measure.calibrate(llama(), TOKENS)
    layers, wanted = {}, [(0.8, 0.9), (0.7, 1.0)]
    for (name, layer), pair in zip(made.layers.items(), wanted, strict=True):
        sides = {
            side: dataclasses.replace(getattr(layer, side), clips={"int2 g64": clip})
            for side, clip in zip(artifact.SIDES, pair, strict=True)
        }
        layers[name] = dataclasses.replace(layer, **sides)
    made = dataclasses.replace(made, layers=layers)

    def used(kv):
        reports = attach(llama(), kv, calibration=made)
        caches = make_prompt_cache(llama())
        detach(llama())
        pairs = [(c.config.keys.quantizer.clip, c.config.values.quantizer.clip) for c in caches]
        return pairs, [r.clips for r in reports]

    assert used("oscar-int2") == (wanted, wanted)
    assert used("oscar-int2+g64") == (wanted, wanted)  # the same format, for heads of 64
    assert used("oscar-int2+g32") == ([(0.96, 0.92)] * 2, [None] * 2)  # not searched
    assert used("oscar-int3") == ([(1.0, 1.0)] * 2, [None] * 2)
    assert used("oscar-int2+clip.92") == ([(0.92, 0.92)] * 2, [None] * 2)  # keeps its own
    pairs, _ = used("oscar-int2/oscar-int4")
    assert pairs == [(0.8, 1.0), (0.7, 1.0)]
    reports = attach(llama(), "oscar-int2/fp16", calibration=made)
    detach(llama())
    assert [r.clips for r in reports] == [(0.8, 1.0), (0.7, 1.0)]
