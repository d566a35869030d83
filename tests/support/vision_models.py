"""Small random vision models of mlx-vlm."""

from copy import deepcopy
from importlib import import_module

import mlx.core as mx
from random_models import CONFIGS, with_noise


def vision_model(family: str, seed: int = 0):
    """A small vision model with random float32 weights."""
    file, config = (
        import_module(f"mlx_vlm.models.{family}"),
        deepcopy(CONFIGS["vision"][family]),
    )
    whole = file.ModelConfig.from_dict(config)
    for part in ("text", "vision"):
        made = getattr(file, f"{part.title()}Config").from_dict(
            config.get(f"{part}_config", config)
        )
        setattr(whole, f"{part}_config", made)
    mx.random.seed(seed)
    return with_noise(file.Model(whole))


def prompt_with_image(family: str, length: int, seed: int = 1) -> tuple[mx.array, dict]:
    """Token ids [1, length] with four places for an image in front, and what the image's processor gives."""
    key = mx.random.key(seed)
    text = mx.random.randint(0, 256, (length - 6,), key=key).tolist()
    ids = mx.array([[258, *[260] * 4, 259, *text]])
    pixels = mx.random.normal((16, 3 * 2 * 14 * 14), key=key)
    if family == "qwen2_vl":
        return ids, {"pixel_values": pixels, "image_grid_thw": mx.array([[1, 4, 4]])}
    return ids, {"pixel_values": mx.random.normal((1, 3, 28, 28), key=key)}
