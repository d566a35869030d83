"""Put our caches, and a model that is at hand, in place inside mlx-lm."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from dataclasses import replace
from functools import wraps
from pathlib import Path

import mlx.core as mx
import mlx_lm.server  # noqa: F401 (all modules that hold what is replaced are imported)
import mlx_lm.utils
from mlx_lm.models import cache

from mlxkv.catalog.reports import LayerReport
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from random_models import write_model  # noqa: E402
from small_models import COPIED, TINY  # noqa: E402

INT4 = PRESETS["int4"]
CONFIGS = {"plain": None, "int4": INT4, "tight": replace(INT4, sink=0, recent=0, page=16)}

models = {"all": 0, "part": 0, "none": 0}  # how much of each model's caches that grow is compressed


def put(kind: str) -> None:
    """Models that tests fetch are one random model; with a kind of ours every model is attached."""
    folder = Path(os.environ["HF_HOME"]) / "model"  # random weights, layers that all see everything
    changes = {"model_type": "qwen2", "hidden_size": 256, "num_attention_heads": 4}
    write_model(folder, num_key_value_heads=2, vocab_size=3072, eos_token_id=[4, 2], **changes)
    for name in COPIED:
        shutil.copyfile(Path(TINY) / name, folder / name)
    _replace(_local(mlx_lm.utils.load, str(folder)))
    if (kv := CONFIGS[kind]) is not None:
        _replace(_attached(cache.make_prompt_cache, kv))


def _attached(make, kv):
    """make_prompt_cache that attaches a model first, and again where a test took its make_cache away."""

    @wraps(make)
    def make_prompt_cache(model, max_kv_size=None):
        if "make_cache" not in vars(model) and "_peer_refused" not in vars(model):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reports = attach(model, kv)
            if not any(report.compressed for report in reports):
                model._peer_refused = True
            _count(reports)
        return make(model, max_kv_size)

    return make_prompt_cache


def _local(load, model_folder: str):
    """load that takes the model in `model_folder` for every name on the hub."""

    @wraps(load)
    def local(name, *args, **kwargs):
        folder = name if Path(name).is_dir() else model_folder
        model, *rest = load(folder, *args, **kwargs)
        model.set_dtype(mx.float32)  # 16 bits are slow on a CPU
        mx.eval(model.parameters())  # here: servers of the tests run it in another thread
        return model, *rest

    return local


def _count(reports: list[LayerReport]) -> None:
    grown = [report.compressed for report in reports if report.grows]
    models["none" if not any(grown) else "all" if all(grown) else "part"] += 1


def _replace(made) -> None:
    """Put `made` in place of what it wraps in every module of mlx-lm."""
    before = made.__wrapped__
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "mlx_lm"]:
        if getattr(module, before.__name__, None) is before:
            setattr(module, before.__name__, made)
