"""Golden tensors of low rank that follows the text: bases, updates, salient and kept tokens, and attention
over two runs of pages with a basis each."""

import numpy as np

from mlxkv.spec import affine as ref
from mlxkv.spec import oja as spec
from mlxkv.spec.cases import OJA_PAGE as PAGE
from mlxkv.spec.cases import OJA_RATES as RATES
from mlxkv.spec.cases import OJA_WINDOW as WINDOW

CASES = ((16, 4, 2, 12), (24, 2, 1, 14))  # D, H, G, R
TOKENS, SALIENT, KEPT = 72, 10, 32


def oja(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return by "D.NAME": float16-exact q [1, H, T, D] and k, v [1, G, T, D]; moment [G, D, D] of k; bases
    [G, D, R]; token positions in int32."""
    out = {}
    for dims, heads, kv_heads, rank in CASES:
        size = np.exp(-0.15 * np.arange(dims))
        q, k, v = (
            _half(rng.standard_normal((1, h, TOKENS, dims)) * size * scale)
            for h, scale in ((heads, 2), (kv_heads, 2), (kv_heads, 1))
        )
        moment = np.einsum("bgtd,bgte->gde", k, k) / TOKENS
        u = spec.basis(moment, rank)
        seen = spec.importance(q[:, :, -WINDOW:], k, dims**-0.5)
        batch = spec.salient(seen, SALIENT)
        x = k[0][:, batch[0]]
        made = {
            "q": q,
            "k": k,
            "v": v,
            "moment": moment,
            "ranks": spec.ranks(moment, 0.95),
            "u": u,
            "salient": batch,
            "kept": spec.kept(spec.votes(seen, kv_heads), KEPT),
            "raw": spec.update(u, x, RATES["pre"], raw=True),
            **{name: spec.update(u, x, rate) for name, rate in RATES.items()},
        }
        new = made["one"]
        made["residual"] = spec.residual(x, u)
        made["overlap"] = spec.overlap(u, new)
        made["moved"] = spec.transported(_half(k[0, :, :PAGE] @ u), u, new)
        made["out"] = _attention(q, k, v, u, new, dims)
        for name, value in made.items():
            kind = np.int32 if value.dtype.kind == "i" else np.float32
            kind = np.float16 if name in "qkv" else kind
            out[f"{dims}.{name}"] = np.ascontiguousarray(value, kind)
    return out


def _attention(q, k, v, old, new, dims):
    """Attend with the last three queries: one page on the basis `old`, one on `new`, the rest exact."""
    whole = []
    for x in (k, v):
        x = x.copy()
        for start, u in ((0, old), (PAGE, new)):
            part = slice(start, start + PAGE)
            x[:, :, part] = _half(x[:, :, part] @ u) @ u.swapaxes(-1, -2)
        whole.append(x)
    mask = ref.causal_mask(3, TOKENS)
    return ref.attention(q[:, :, -3:], *whole, dims**-0.5, mask)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


# name: seed, maker, what the header says beside version and seed
TABLES = {"oja": (20272, oja, {"seed": "20272"})}
