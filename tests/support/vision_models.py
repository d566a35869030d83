"""Small random vision models of mlx-vlm, and replies of its own loops."""

from copy import deepcopy
from importlib import import_module
from types import SimpleNamespace

import mlx.core as mx
from mlx_vlm.generate.ar import BatchGenerator, generate_step
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


STEP = 64  # tokens of a prompt at once
Prompt = tuple[mx.array, dict]  # token ids [1, T], and what an image processor gives


class _Never:
    """No token ends a reply."""

    def add_eos_token_ids(self, ids) -> None: ...

    def __call__(self, token: int) -> bool:
        return False


def alone(model, prompt: Prompt, count: int) -> tuple[list[int], mx.array]:
    """Tokens, and their log probabilities [count, vocabulary]."""
    ids, more = prompt
    more = dict(more)
    pixels, options = more.pop("pixel_values", None), {"max_tokens": count, "temperature": 0}
    found = list(
        generate_step(
            ids, model, pixels, mx.ones_like(ids), prefill_step_size=STEP, **options, **more
        )
    )
    return [token for token, _ in found], mx.stack([row.astype(mx.float32) for _, row in found])


def together(model, prompts: list[Prompt], counts: list[int], manager=None) -> list[list[int]]:
    """manager: of mlx-vlm's prefix cache."""
    processor = SimpleNamespace(tokenizer=SimpleNamespace(stopping_criteria=_Never()))
    options = {"prefill_batch_size": 3, "prefill_step_size": STEP, "compute_logprobs": False}
    batch = BatchGenerator(model.language_model, processor, apc_manager=manager, **options)
    ids = [prompt[0][0].tolist() for prompt in prompts]
    uids = batch.insert(ids, counts, prompt_kwargs=[_embedded(model, one) for one in prompts])
    replies = {uid: [] for uid in uids}
    while batch.has_work:
        for response in batch.next()[1]:
            replies[response.uid].append(response.token)
    batch.close()
    return [replies[uid] for uid in uids]


def _embedded(model, prompt: Prompt) -> dict:
    ids, more = prompt
    more = dict(more)
    found = model.get_input_embeddings(
        ids, more.pop("pixel_values", None), mask=mx.ones_like(ids), **more
    )
    given = {name: one for name, one in found.to_dict().items() if one is not None}
    # Else the prefix cache would tell prompts apart by all of their embeddings.
    return given | more | {"_apc_semantic_hash": 7}
