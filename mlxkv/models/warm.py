"""Build what decoding needs before the first token is asked for: traces of steps, and the kernels that MLX
makes of them."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import console
from mlxkv.metal.launch import backend
from mlxkv.models.decoders import step_down
from mlxkv.models.generate import prefill_step
from mlxkv.models.hooks.mark import steps_of
from mlxkv.models.loader import Loaded

TOKENS = 3  # decoded: the first trace, a replay, and what is not used before the third


def warm_up(loaded: Loaded) -> None:
    """Decode a few tokens on a GPU, after a prompt that seals a page, with caches that are thrown away; shows
    progress. For the thread that decodes later: traces belong to a thread. Does nothing where no step is
    traced, nor on a CPU, which would take a second or two at every start.

    A fault of the GPU is told, and slower kernels run instead, as in the middle of a reply.
    """
    steps = steps_of(loaded.model)
    if backend() == "cpu" or steps is None or steps.off:
        return
    with console.counted("building decode steps", 1) as step:
        step()
        try:
            _decode(loaded)
        except RuntimeError as error:
            if line := step_down(loaded, error):
                console.warn(line)
        # Without a line the first reply meets the same fault, and ends with it.
    mx.clear_cache()
    loaded.tell_steps()


def _decode(loaded: Loaded) -> None:
    prompt = mx.zeros((loaded.kv.window + loaded.kv.page + 1,), mx.int32)
    options = {"max_tokens": TOKENS, "prefill_step_size": prefill_step()}
    cache = make_prompt_cache(loaded.model)
    for _ in generate_step(prompt, loaded.model, prompt_cache=cache, **options):
        pass
