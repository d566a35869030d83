"""Count equal tokens of a trained model, by replayed steps and by steps that Python builds."""

from __future__ import annotations

import tempfile
from operator import eq
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlxkv import console
from mlxkv.models.hooks.mark import steps_of
from mlxkv.models.loader import load
from mlxkv.models.seam import detach

STORY = "Tell me the whole story of the lighthouse, from its first stone on. "


def same(name: str, presets: list[str], count: int) -> None:
    """Print how many tokens of replies are equal, replayed and by Python: of one sequence of `count`, which is
    taken back by ten tokens, saved and loaded halfway, and of six in a batch, two of which join later."""
    table = []
    for kv in presets:
        loaded = load(name, kv)
        ways, steps = [], steps_of(loaded.model)
        for off in (None, "by Python"):
            steps.off = off
            ways.append((_interrupted(loaded, count), _together(loaded, count // 6)))
        found = [
            f"{sum(map(eq, ours, theirs))} of {len(theirs)}"
            for ours, theirs in zip(*ways, strict=True)
        ]
        refused = "; ".join(steps.refused.values())
        table.append([kv, *found, steps.traced, refused or "-"])
        detach(loaded.model)
    console.print_table(
        ("preset", "one sequence", "six together", "traces", "refused"), table, name
    )


def _interrupted(loaded, count: int) -> list[int]:
    text = mx.array(loaded.tokenizer.encode(STORY))
    caches = make_prompt_cache(loaded.model)
    first = [
        int(t)
        for t, _ in generate_step(text, loaded.model, max_tokens=count // 2, prompt_cache=caches)
    ]
    held = caches[0].offset  # the last token that was drawn has not been read
    trim_prompt_cache(caches, 10)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "cache.safetensors"))
        save_prompt_cache(path, caches)
        caches = load_prompt_cache(path)
    again = [*text.tolist(), *first][held - 10 : held + 1]
    rest = generate_step(
        mx.array(again), loaded.model, max_tokens=count - len(first), prompt_cache=caches
    )
    return first + [int(t) for t, _ in rest]


def _together(loaded, count: int) -> list[int]:
    batch = BatchGenerator(loaded.model, prefill_step_size=512)
    prompts = [loaded.tokenizer.encode(STORY * n) for n in (1, 14, 9, 2, 30, 5)]
    lengths = [count, count // 2, count, count // 3, count // 2, count]
    replies, step = {}, 0
    while step < 4 or any(len(replies[u]) < n for u, n in zip(replies, lengths, strict=True)):
        if step in (0, 40):
            part = slice(0, 4) if step == 0 else slice(4, 6)
            for uid in batch.insert(prompts[part], max_tokens=lengths[part]):
                replies[uid] = []
        for response in batch.next()[1]:
            replies[response.uid].append(response.token)
        step += 1
    batch.close()
    return sum(replies.values(), [])
