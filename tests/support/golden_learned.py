"""Golden tensors of learned transforms: parameters, the maps made from them, the loss of codes."""

import numpy as np

from mlxkv.spec import learned as spec

CASES = (  # variant, base, D, G
    ("scale", "none", 16, 2),
    ("rotation+scale", "srft", 16, 2),
    ("householder", "srft", 24, 1),
    ("householder+scale", "none", 18, 1),  # an odd number of halves
)
ROWS, BITS, GROUP = 24, 3, 16


def learned(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return, by "VARIANT.BASE.D.NAME" and in float32: float16-exact parameters [G, ...] and x [G, N, D];
    down, up [G, D, D]; loss [G]."""
    out = {}
    for variant, base, dims, heads in CASES:
        shapes = {
            "rotation": (heads, dims, dims),
            "householder": (heads, spec.reflectors(dims), dims),
            "scale": (heads, dims),
        }
        free = {
            name: rng.standard_normal(shapes[name]).astype(np.float16).astype(np.float64)
            for name in variant.split("+")
        }
        if "scale" in free:
            free["scale"][:, 0] = 20  # clamped
        x = (3 * rng.standard_normal((heads, ROWS, dims))).astype(np.float16).astype(np.float64)
        pairs = [maps({k: v[g] for k, v in free.items()}, base, dims) for g in range(heads)]
        down, up = (np.stack(one) for one in zip(*pairs, strict=True))
        losses = [spec.loss(*three, BITS, GROUP) for three in zip(x, down, up, strict=True)]
        made = {**free, "x": x, "down": down, "up": up, "loss": np.array(losses)}
        key = f"{variant}.{base}.{dims}"
        for name, value in made.items():
            out[f"{key}.{name}"] = np.ascontiguousarray(value, np.float32)
    return out


def maps(free: dict[str, np.ndarray], base: str, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Make (down, up), each [D, D], of one kv head."""
    turn = np.eye(dims)
    if "rotation" in free:
        turn = spec.exponential(free["rotation"])
    if "householder" in free:
        turn = spec.householder(free["householder"])
    return spec.pair(base, turn, spec.scale(free["scale"]) if "scale" in free else np.ones(dims))
