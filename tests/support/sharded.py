"""One of several processes with a share of a model each: `python sharded.py FOLDER PRESET`.

MLX_RANK and MLX_HOSTFILE are set, as mlx.launch does it. Prints JSON.
"""

import json
import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, load
from mlxkv.models.calibration.measure import random


def run(model) -> tuple[mx.array, int]:
    """Logits of tokens decoded behind a prompt, and bytes of the caches."""
    tokens = (mx.arange(300) * 7 % 250)[None]
    caches = make_prompt_cache(model)
    out = [model(tokens[:, :280], cache=caches)[:, -1:]]
    out += [model(tokens[:, i : i + 1], cache=caches) for i in range(280, 300)]
    logits = mx.concatenate(out, axis=1)
    mx.eval(logits)
    return logits, sum(cache.nbytes for cache in caches)


def main(folder: str, preset: str) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    model = load(folder, "fp16").model
    needed = random(model) if parse_kv(preset).calibrated else None
    attach(model, preset, calibration=needed)
    alone, whole = run(model)
    attach(model, preset, calibration=needed, group=group)
    model.shard(group)
    together, part = run(model)
    error = mx.sqrt(mx.mean(mx.square(together - alone)) / mx.mean(mx.square(alone)))
    print(json.dumps({"size": group.size(), "error": error.item(), "bytes": [whole, part]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
