"""Replies of mlx-lm's BatchGenerator, and of each prompt alone."""

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

STEP = 64  # tokens of a prompt at once: some prompts take several, some less than one


def alone(model, prompt, count: int) -> list[int]:
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=count,
        prompt_cache=make_prompt_cache(model),
        prefill_step_size=STEP,
    )
    return [token for token, _ in steps]


def together(model, prompts, counts, late: int = 2) -> list[list[int]]:
    """Replies of a batch whose last `late` sequences join when others are under way."""
    batch = BatchGenerator(model, prefill_step_size=STEP, prefill_batch_size=3)
    replies = {}

    def insert(part):
        for uid in batch.insert([p for p, _ in part], max_tokens=[n for _, n in part]):
            replies[uid] = []

    work = list(zip(prompts, counts, strict=True))
    insert(work[:-late])
    for step in range(10_000):
        if step == 9:
            insert(work[-late:])
        read, written = batch.next()
        for response in written:
            replies[response.uid].append(response.token)
        if step > 9 and not read and not written:
            break
    batch.close()
    return list(replies.values())
