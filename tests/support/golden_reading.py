"""Golden tensors of reading fewer pages: summaries, estimates, weights and the chunks that are chosen. Chunks of 8
tokens and heads of 8 dims, to keep the file small."""

from __future__ import annotations

import numpy as np

from mlxkv.spec import reading as ref

CHUNK, CHUNKS, DIMS, ROWS, WINDOW, HEADS = 8, 6, 8, 2, 4, 1
SHARES = (0.01, 0.6)


def reading(rng) -> dict:
    """Keys whose neighbours are alike. Scores in float32, weights too."""
    slow = np.repeat(rng.standard_normal((HEADS, CHUNKS, DIMS)), CHUNK, axis=1)
    keys = (slow + rng.standard_normal((HEADS, CHUNKS * CHUNK, DIMS))).astype(np.float16)
    q = rng.standard_normal((HEADS, ROWS, DIMS)).astype(np.float16)
    window = rng.standard_normal((HEADS, WINDOW, DIMS)).astype(np.float16)
    exact = q.astype(np.float64)
    summaries = ref.summary(keys, CHUNK)
    logs = ref.estimates(exact, summaries, CHUNK)
    beside = np.log(np.exp(exact @ window.astype(np.float64).swapaxes(-1, -2)).sum(-1))
    weights = ref.weights(logs, beside)
    out = {"keys": keys, "q": q, "codes": summaries[0], "steps": summaries[1]}
    out |= {name: x.astype(np.float32) for name, x in (("logs", logs), ("beside", beside))}
    out["weights"] = weights.astype(np.float32)
    for number, share in enumerate(SHARES):
        out[f"{number}.share"] = np.array([share], np.float64)
        out[f"{number}.chosen"] = ref.chosen(weights, share)
    return out


TABLES = {"reading": (20281, reading, {"seed": "20281"})}
