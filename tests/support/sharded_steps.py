"""One of two processes with half of a model each: `python sharded_steps.py FOLDER`.

Decodes where both processes trace their steps, neither does, or one alone does. Prints JSON.
"""

import json
import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.models import attach, load
from mlxkv.serve.ranks import Ranks

WAYS = ((0, 0), (1, 1), (1, 0), (0, 1))  # who traces
STEPS, PRESET = 12, "int4"


def decoded(model, ranks) -> list[int]:
    """Tokens behind a prompt, each agreed on while the next step is under way, as mlx-lm's loop does it."""
    tokens = (mx.arange(280) * 7 % 250)[None]
    caches = make_prompt_cache(model)
    y = ranks.tokens(mx.argmax(model(tokens, cache=caches)[:, -1], axis=-1))
    mx.async_eval(y)
    out = []
    for _ in range(STEPS):
        then = mx.argmax(model(y[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(then)
        then = ranks.tokens(then)
        mx.async_eval(then)
        out.append(y.item())
        y = then
    return out


def main(folder: str) -> None:
    ranks = Ranks()
    model = load(folder, PRESET, group=ranks.group).model
    found = []
    for who in WAYS:
        attach(model, PRESET, group=ranks.group)
        steps = vars(model)["_mlxkv_attachment"].steps
        steps.off = None if who[ranks.rank] else "not in this process"
        tokens = decoded(model, ranks)
        found.append({"tokens": tokens, "traced": steps.traced, "refused": len(steps.refused)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
