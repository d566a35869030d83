"""Generate text with mlx-lm's loop, with counts, times and a check for NaN."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlxkv.errors import MachineError, UserError
from mlxkv.generate.stops import Front
from mlxkv.metal.launch import device_type
from mlxkv.patching.trees import flat

# Prompt tokens per chunk. A CPU is no faster with more, and progress and Ctrl-C are handled between two chunks.
PREFILL_STEP = 2048
PREFILL_STEP_CPU = 512


class Stopped(Exception):
    """`stop()` returned true during the prefill."""


@dataclass
class Stats:
    """Counts and times of one reply.

    prompt_tokens: the whole prompt. read_tokens: its tokens that were not in the cache yet. held: tokens
    of this call that are in the cache now.
    """

    prompt_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    held: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Decode speed without the first token, which belongs to the prefill."""
        if self.generated_tokens < 2 or self.decode_seconds <= 0:
            return 0.0
        return (self.generated_tokens - 1) / self.decode_seconds


@dataclass(frozen=True)
class Piece:
    """One generated token and the text it completed (often "")."""

    token: int
    text: str


class _CheckedSampler:
    """A sampler that also computes, in the same graph, whether the logits were finite.

    A NaN anywhere in the logits makes every log probability NaN, so checking the drawn token's is enough.
    `mx.depends` computes the flag together with the token, so reading it needs no second wait for the GPU. broken: a
    queue of flags, one per token.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array]):
        self.sampler = sampler
        self.broken: deque[mx.array] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:  # logprobs: [1, vocabulary]
        token = self.sampler(logprobs)
        logprob = mx.take_along_axis(logprobs, token[..., None].astype(mx.int32), axis=-1)
        is_bad = mx.logical_not(mx.isfinite(logprob)).any()
        self.broken.append(is_bad)
        return mx.depends([token], [is_bad])[0]

    def is_broken(self) -> bool:
        """Return whether the oldest flag is set."""
        return bool(self.broken) and bool(self.broken.popleft())


def read(
    loaded,
    tokens: Sequence[int],
    cache: list,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> int:
    """Feed `tokens` to the model in chunks, without a reply. Returns how many are in the cache: fewer than all if
    `stop()` was true between two chunks. progress: called with (tokens done, all tokens)."""
    done, total = 0, len(tokens)
    while done < total and not (done and stop and stop()):
        part = mx.array(list(tokens[done : done + prefill_step()]))
        loaded.model(part[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
        done += part.size
        if progress:
            progress(done, total)
    return done


def stream(
    loaded,
    tokens: Sequence[int],
    cache: list,
    sampler: Callable[[mx.array], mx.array] | None = None,
    max_tokens: int = 256,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    stats: Stats | None = None,
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
    prefix: Sequence[int] = (),
) -> Iterator[Piece]:
    """Feed `tokens` to the model and yield the reply token by token.

    loaded: from `mlxkv.load`. cache: from `new_cache`, empty or holding earlier tokens.
    progress: called with (tokens done, all tokens) during the prefill. stop: called after each token
    and each prefill chunk; true ends the reply and leaves the cache consistent. stats: filled in
    place; `stats.held` is right whenever this generator is not running. processors: mlx-lm's logits processors.
    prefix: the last prompt token, if the prompt ends with the start of the reply; else empty.

    Raises UserError for an empty prompt, MachineError when the logits hold NaN or infinity.
    """
    if not tokens:
        raise UserError("[generate] empty prompt")
    if max_tokens < 1:
        raise UserError(f"[--max-tokens] must be at least 1; got {max_tokens}")
    stats = stats if stats is not None else Stats()
    stats.prompt_tokens = stats.read_tokens = len(tokens)
    checked = _CheckedSampler(sampler or make_sampler())
    front = Front(loaded.tokenizer, prefix)

    def on_progress(count: int, total: int) -> None:
        stats.held = count
        if progress:
            progress(count, total)
        if count < total and stop and stop():
            raise Stopped

    start = time.perf_counter()
    options = {"max_tokens": max_tokens, "sampler": checked, "prefill_step_size": prefill_step()}
    if processors:
        options["logits_processors"] = list(processors)
    responses = stream_generate(
        loaded.model,
        loaded.tokenizer,
        list(tokens),
        prompt_cache=cache,
        prompt_progress_callback=on_progress,
        **options,
    )
    try:
        for response in responses:
            clock = time.perf_counter()
            if stats.generated_tokens == 0:
                stats.prefill_seconds, start = clock - start, clock
            stats.decode_seconds = clock - start
            stats.generated_tokens += 1
            stats.held = len(tokens) + stats.generated_tokens
            if checked.is_broken():
                raise _broken_logits(loaded, stats.generated_tokens)
            stats.finish_reason = response.finish_reason or ""
            if response.finish_reason != "stop":  # the token that ends a turn is not text
                front.add(response.token)
            text = front.mended(response.text, response.finish_reason is not None)
            yield Piece(response.token, text)
            if stop and stop():
                stats.finish_reason = stats.finish_reason or "stopped"
                return
    except Stopped:
        stats.finish_reason, stats.read_tokens = "stopped", stats.held
        stats.prefill_seconds = time.perf_counter() - start
    finally:
        responses.close()


def _broken_logits(loaded, step: int) -> Exception:
    """Return the error for NaN or infinity in the logits: a UserError if they come from the weights."""
    for name, x in flat(loaded.model.parameters()):
        if mx.issubdtype(x.dtype, mx.floating) and not mx.isfinite(x).all().item():
            return UserError(
                f"[load] the weights hold NaN or infinity in {name}; got {loaded.name}; fetch the model again"
            )
    advice = (
        "" if loaded.kv_name == "fp16" else "; try --kv fp16 to see whether the cache is the cause"
    )
    return MachineError(
        f"[generate] NaN or infinity in the logits of {loaded.name} at token {step}{advice}"
    )


def new_cache(loaded) -> list:
    """Return an empty cache for each layer, compressed where the model is attached."""
    return make_prompt_cache(loaded.model)


def prefill_step() -> int:
    """Return how many prompt tokens this machine reads per chunk."""
    return PREFILL_STEP_CPU if device_type() == "cpu" else PREFILL_STEP
