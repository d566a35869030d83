"""LoRA adapters of random numbers, in mlx-lm's files."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxkv.catalog.folder import ADAPTER, ADAPTER_CONFIG

LORA = {"rank": 4, "scale": 10.0, "dropout": 0.1}


def write_adapter(path: Path, model, kind: str = "lora", seed: int = 5) -> Path:
    """The files that `mlx_lm.lora` writes, of every linear map of `model`, with random numbers."""
    path.mkdir(parents=True, exist_ok=True)
    keys = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"]
    count, lora = len(model.layers), LORA | {"keys": keys}
    linear_to_lora_layers(model, count, lora, use_dora=kind == "dora")
    mx.random.seed(seed)
    leaves = [(n, x) for n, x in tree_flatten(model.parameters()) if n.endswith(("_a", "_b", ".m"))]
    assert len(leaves) >= 2 * len(keys) * count
    numbers = {name: 0.1 * mx.random.normal(x.shape) for name, x in leaves}
    mx.save_safetensors(str(path / ADAPTER), numbers)
    config = {"fine_tune_type": kind, "num_layers": count, "lora_parameters": lora}
    (path / ADAPTER_CONFIG).write_text(json.dumps(config))
    return path
