"""Tasks `lm-eval:NAME`: lm-evaluation-harness through mlx-lm's adapter, on our caches.

mlx-lm's adapter reads a prompt of up to 2048 tokens at once, and tokens that are read at once see each other
exactly: with most tasks no score would ever come from a compressed cache. Here prompts are read in chunks, their
last token and every answer a few tokens at a time, as in decoding, so that scores read all that is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import mlx.core as mx

from mlxkv.errors import UserError
from mlxkv.eval import feed
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks.part import Part, Progress, Results
from mlxkv.models.generate import new_cache

PREFIX = "lm-eval:"


def check(tasks: Sequence[str]) -> None:
    """Raise UserError if a task of the harness is asked for and the harness is not installed."""
    named = [task for task in tasks if task.startswith(PREFIX)]
    if any(task == PREFIX for task in named):
        raise UserError(f"[--tasks] no name after {PREFIX}; write {PREFIX}hellaswag")
    if named and find_spec("lm_eval") is None:
        raise UserError(f"[--tasks] {named[0]} needs lm-evaluation-harness; pip install lm-eval")


def parts(tasks: Sequence[str], limit: int | None, chunk: int = feed.PREFILL) -> list[Part]:
    """Return one part per task that starts with PREFIX. limit: questions of each; None means all. chunk: as
    for `measure`."""
    out = []
    for task in tasks:
        if task.startswith(PREFIX):
            name = task.removeprefix(PREFIX)

            def run(arms: Arms, names: list[str], progress: Progress, name=name) -> Results:
                return measure(arms, names, name, limit, progress, chunk)

            out.append(Part("lm-eval", name, run, 1, {"limit": limit, "chunk": chunk}))
    return out


def measure(
    arms: Arms,
    names: list[str],
    task: str,
    limit: int | None,
    progress: Progress,
    chunk: int = feed.PREFILL,
) -> Results:
    """Return {"metrics": {name: number}, "questions": n, "stored": share} per arm. task: a name or a YAML file.

    chunk: tokens of a prompt that are read at once; 0 leaves prompts to mlx-lm. "stored": the share of the
    tokens read that scores find in pages; tokens in the windows, and short of a page, are exact.
    """
    import lm_eval

    out = {}
    for name in names:
        with arms.attached(name) as loaded:
            model = adapter(loaded, chunk)
            try:
                found = lm_eval.simple_evaluate(model=model, tasks=[task], limit=limit)
            except (KeyError, ValueError, FileNotFoundError, ConnectionError) as error:
                raise UserError(
                    f"[--tasks] lm-eval cannot run {task} ({type(error).__name__}: {error}); "
                    "choose one of `lm_eval ls tasks` whose data is at hand"
                ) from None
        results = found["results"]
        out[name] = {
            "metrics": {
                (key if len(results) == 1 else f"{one} {key}").removesuffix(",none"): value
                for one, metrics in results.items()
                for key, value in metrics.items()
                if isinstance(value, float | int) and key != "sample_len"
            },
            "questions": sum(n["effective"] for n in found["n-samples"].values()),
            "stored": model.read.share,
        }
        progress(1)
    return out


@dataclass
class Read:
    """Tokens that were read, and those of them that scores found in pages."""

    tokens: int = 0
    stored: int = 0

    def add(self, cache: list) -> None:
        """Count a text, by the first of its caches that compresses."""
        one = next((layer for layer in cache if hasattr(layer, "store")), None)
        if one is not None:
            self.tokens += one.offset
            self.stored += one.store.count * one.config.page if one.store else 0

    @property
    def share(self) -> float:
        return self.stored / self.tokens if self.tokens else 0.0


def read_prompt(loaded, tokens: Sequence[int], chunk: int) -> tuple[mx.array, list]:
    """Return log probabilities [1, vocabulary] after `tokens`, and the cache that holds them. The last token is
    read alone: the only one whose scores count, and it finds all the others as they are stored."""
    cache = new_cache(loaded)
    feed.extend(loaded, cache, tokens[:-1], chunk)
    last = feed.log_probabilities(loaded, cache, tokens[-1:])
    mx.clear_cache()
    return last, cache


def adapter(loaded, chunk: int = feed.PREFILL):
    """Return mlx-lm's adapter for a model that is already loaded, generating one request at a time. chunk: as
    for `measure`."""
    from lm_eval.api.model import LM
    from mlx_lm.evaluate import MLXLM
    from mlx_lm.generate import generate

    class Attached(MLXLM):
        def __init__(self):
            LM.__init__(self)
            self._model, self.tokenizer = loaded.model, loaded.tokenizer
            self._max_tokens, self._batch_size, self._sampler = None, 1, None
            self.use_chat_template = loaded.tokenizer.chat_template is not None
            self.read = Read()

        def _process_prompt(self, prompt, step_size: int = 2048):
            """Return log probabilities [1, vocabulary] after the prompt, and the cache that holds it."""
            if not chunk:
                return super()._process_prompt(prompt, step_size)
            last, cache = read_prompt(loaded, [int(token) for token in prompt], chunk)
            self.read.add(cache)
            return last, cache

        def _score_fn(self, inputs, cache=None, step_size: int = 2048):
            """Score texts that follow `cache`, or stand alone."""
            return super()._score_fn(inputs, cache, feed.DECODE if chunk else step_size)

        def generate_until(self, requests) -> list[str]:
            out = []
            for request in requests:
                prompt, options = request.args
                cache = new_cache(loaded)
                text = generate(
                    self._model,
                    self.tokenizer,
                    list(self._tokenize([prompt])[0]),
                    max_tokens=options.get("max_gen_toks", 256),
                    prompt_cache=cache,
                    **({"prefill_step_size": chunk} if chunk else {}),
                )
                self.read.add(cache)
                ends = [text.find(stop) for stop in options.get("until", []) if stop in text]
                out.append(text[: min(ends)] if ends else text)
            return out

    return Attached()
