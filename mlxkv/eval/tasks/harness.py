"""Tasks `lm-eval:NAME`: lm-evaluation-harness through mlx-lm's adapter, on our caches."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from mlxkv.errors import UserError
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks.part import Part, Progress, Results

PREFIX = "lm-eval:"


def check(tasks: Sequence[str]) -> None:
    """Raise UserError if a task of the harness is asked for and the harness is not installed."""
    named = [task for task in tasks if task.startswith(PREFIX)]
    if any(task == PREFIX for task in named):
        raise UserError(f"[--tasks] no name after {PREFIX}; write {PREFIX}hellaswag")
    if named and find_spec("lm_eval") is None:
        raise UserError(
            f"[--tasks] {named[0]} needs lm-evaluation-harness; pip install 'mlxkv[lm-eval]'"
        )


def parts(tasks: Sequence[str], limit: int | None) -> list[Part]:
    """Return one part per task that starts with PREFIX. limit: questions of each; None means all."""
    out = []
    for task in tasks:
        if task.startswith(PREFIX):
            name = task.removeprefix(PREFIX)

            def run(arms: Arms, names: list[str], progress: Progress, name=name) -> Results:
                return measure(arms, names, name, limit, progress)

            out.append(Part("lm-eval", name, run, 1, {"limit": limit}))
    return out


def measure(
    arms: Arms, names: list[str], task: str, limit: int | None, progress: Progress
) -> Results:
    """Return {"metrics": {name: number}, "questions": n} per arm. task: a name or a YAML file.

    mlx-lm's adapter reads prompts in chunks of 2048, so shorter prompts are read exactly and only
    their continuation reads the stored cache.
    """
    import lm_eval

    out = {}
    for name in names:
        with arms.attached(name) as loaded:
            try:
                found = lm_eval.simple_evaluate(model=adapter(loaded), tasks=[task], limit=limit)
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
        }
        progress(1)
    return out


def adapter(loaded):
    """Return mlx-lm's adapter for a model that is already loaded, generating one request at a time."""
    from lm_eval.api.model import LM
    from mlx_lm.evaluate import MLXLM
    from mlx_lm.generate import generate

    class Attached(MLXLM):
        def __init__(self):
            LM.__init__(self)
            self._model, self.tokenizer = loaded.model, loaded.tokenizer
            self._max_tokens, self._batch_size, self._sampler = None, 1, None
            self.use_chat_template = loaded.tokenizer.chat_template is not None

        def generate_until(self, requests) -> list[str]:
            out = []
            for request in requests:
                prompt, options = request.args
                text = generate(
                    self._model,
                    self.tokenizer,
                    list(self._tokenize([prompt])[0]),
                    max_tokens=options.get("max_gen_toks", 256),
                )
                ends = [text.find(stop) for stop in options.get("until", []) if stop in text]
                out.append(text[: min(ends)] if ends else text)
            return out

    return Attached()
