"""One of several processes with a share of a model each: `python sharded.py FOLDER PRESET` compares its caches with
those of the whole model; `python sharded.py FOLDER` decodes where both processes trace their steps, neither does,
or one alone does.

MLX_RANK and MLX_HOSTFILE are set, as mlx.launch does it. Prints JSON.
"""

import json
import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from step_twins import steps_of

from mlxkv.calibration.measure import random
from mlxkv.formats.names import parse_kv
from mlxkv.loading.attach import attach
from mlxkv.loading.load import load
from mlxkv.serve.ranks import Ranks

WAYS = ((0, 0), (1, 1), (1, 0), (0, 1))  # who traces
STEPS, PRESET = 12, "int4"


def run(model) -> tuple[mx.array, int]:
    """Logits of tokens decoded behind a prompt, and bytes of the caches."""
    tokens = (mx.arange(300) * 7 % 250)[None]
    caches = make_prompt_cache(model)
    out = [model(tokens[:, :280], cache=caches)[:, -1:]]
    out += [model(tokens[:, i : i + 1], cache=caches) for i in range(280, 300)]
    logits = mx.concatenate(out, axis=1)
    mx.eval(logits)
    return logits, sum(cache.nbytes for cache in caches)


def compared(folder: str, preset: str) -> dict:
    group = mx.distributed.init(strict=True, backend="ring")
    model = load(folder, "fp16").model
    needed = random(model) if parse_kv(preset).calibrated else None
    attach(model, preset, calibration=needed)
    alone, whole = run(model)
    attach(model, preset, calibration=needed, group=group)
    model.shard(group)
    together, part = run(model)
    error = mx.sqrt(mx.mean(mx.square(together - alone)) / mx.mean(mx.square(alone)))
    return {"size": group.size(), "error": error.item(), "bytes": [whole, part]}


def decoded(model, ranks) -> list[int]:
    """Tokens behind a prompt, each agreed on while the next step is under way, as mlx-lm's loop does it."""
    caches, out = make_prompt_cache(model), []
    tokens = (mx.arange(280) * 7 % 250)[None]
    y = ranks.tokens(mx.argmax(model(tokens, cache=caches)[:, -1], axis=-1))
    mx.async_eval(y)
    for _ in range(STEPS):
        then = mx.argmax(model(y[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(then)
        then = ranks.tokens(then)
        mx.async_eval(then)
        out.append(y.item())
        y = then
    return out


def traced(folder: str) -> list[dict]:
    ranks, found = Ranks(), []
    model = load(folder, PRESET, group=ranks.group).model
    for who in WAYS:
        attach(model, PRESET, group=ranks.group)
        steps = steps_of(model)
        steps.off = None if who[ranks.rank] else "not in this process"
        tokens = decoded(model, ranks)
        found.append({"tokens": tokens, "traced": steps.traced, "refused": len(steps.refused)})
    return found


if __name__ == "__main__":
    print(json.dumps((compared if sys.argv[2:] else traced)(*sys.argv[1:])))
