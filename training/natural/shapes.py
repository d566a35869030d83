"""Shapes of the two models, the schedule of lengths, and what a token costs."""

from configs import Config

# Qwen2's shape has heads * head_dim = width: mlx-lm and transformers both divide the width by the heads.
SHAPES = {
    "natural-qwen": Config(
        "qwen2",
        vocab=16384,
        width=768,
        layers=12,
        ff=1792,
        heads=6,
        kv_heads=2,
        head_dim=128,
        dtype="bfloat16",
        gain=1.0,
        offsets=False,
    ),
    "natural-gemma": Config(
        "gemma3_text",
        vocab=16384,
        width=640,
        layers=12,
        ff=2048,
        heads=4,
        kv_heads=1,
        head_dim=256,
        window=512,
        pattern=3,
        dtype="bfloat16",
        gain=1.0,
        offsets=False,
    ),
}

# From this progress (share of the time budget) on: sequence lengths with their shares of the steps.
SCHEDULE = (
    (0.00, {1024: 1.0}),
    (0.32, {1024: 0.15, 2048: 0.85}),
    (0.63, {2048: 0.10, 8192: 0.90}),
)

PEAK = 989e12  # dense bfloat16 operations a second of an H100 or H200, by their datasheets


def operations(config: Config, length: int) -> float:
    """Count the operations of forward and backward, a token: 6 a weight, and attention's two products."""
    c = config
    attention = 2 * c.width * c.head_dim * (c.heads + c.kv_heads)
    weights = c.vocab * c.width + c.layers * (attention + 3 * c.width * c.ff)
    seen = 0.0
    for layer in range(c.layers):
        window = min(c.window, length) if c.local(layer) else length
        seen += window - window**2 / (2 * length)  # tokens that a query sees, on average
    return 6.0 * weights + 12.0 * c.heads * c.head_dim * seen
