"""Decode speed of whole models in turns: full precision in mlx-lm's own loop, and presets by steps that are
replayed or built by Python, in one process, a few tokens each at a time.

    python -m experiments.decode_steps qwen3-4b --bits 4 --contexts 4k,32k,128k

`--operations` times what MLX's host takes to hand over single operations instead, in chains of 200. `--same 2000`
counts the tokens that a trained model says alike, replayed and by Python, instead.

Hosts change their speed within seconds, so every round times all arms one after the other, and factors are
of one round. Caches hold random keys and values; sealing, growth and new traces are part of the times.
"""

from __future__ import annotations

import sys
import time
from statistics import median, quantiles

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import (
    make_prompt_cache,
)

from experiments.decode_steps.operations import operations
from experiments.decode_steps.same import same
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.bench.decode import fill_directly
from mlxkv.bench.show import print_machine
from mlxkv.bench.subject import Subject, load_subject, machine_in_use
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import FULL_PAGES
from mlxkv.models.compiled.step import Steps
from mlxkv.models.seam import attach, detach
from mlxkv.versions import versions

PLAIN = "fp16"
HALVES = "halves"  # full precision in pages of float16 records: the same step without compression
BY_PYTHON = "-"  # behind a preset: its steps are built by Python
WARM = 4  # tokens of a turn before its clock starts
COLUMNS = (
    "context",
    "arm",
    "token ms",
    "quartiles",
    "factor",
    "quartiles",
    "build ms",
    "traces",
    "cache",
)


class Arm:
    """One preset with a cache of its own. turns: mean ms a token, of each turn; builds: of the calls alone.
    tokens: all that were drawn."""

    def __init__(self, subject: Subject, name: str, context: int):
        self.subject, self.name = subject, name
        kv = name.removesuffix(BY_PYTHON)
        config = FULL_PAGES if kv == HALVES else parse_kv(kv)
        attach(
            subject.model, config, calibration=subject.calibration if config.calibrated else None
        )
        mx.random.seed(0)
        self.cache = make_prompt_cache(subject.model)
        fill_directly(self.cache, subject, context - 1)
        detach(subject.model)
        mx.clear_cache()
        self.steps = Steps()
        if name.endswith(BY_PYTHON) or kv == PLAIN:
            self.steps.off = "by Python"
        self.last, self.tokens = mx.array([1]), []
        self.turns, self.builds = [], []

    def _step(self, token: mx.array):
        """As in mlx-lm's loop."""
        with mx.stream(generation_stream):
            logits = self.subject.model(token[None], cache=self.cache)[:, -1, :]
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            return mx.argmax(logprobs, axis=-1), logprobs

    def turn(self, count: int, keep: bool = True) -> None:
        """Decode `count` tokens and note how long they take. The model has to be attached."""
        attachment = vars(self.subject.model)["_mlxkv_attachment"]
        object.__setattr__(attachment, "steps", self.steps)
        token, builds = self.last, []
        with wired_limit(self.subject.model):
            token, logprobs = self._step(token)
            mx.async_eval(token, logprobs)
            for i in range(count + WARM):
                if i == WARM:
                    start = time.perf_counter()
                before = time.perf_counter()
                after, logprobs = self._step(token)
                builds.append(time.perf_counter() - before)
                mx.async_eval(after, logprobs)
                self.tokens.append(token.item())
                token = after
            seconds = time.perf_counter() - start
            mx.eval(token)
        self.last = token
        if keep:
            self.turns.append(1e3 * seconds / count)
            self.builds.append(1e3 * median(builds))


def rows(subject: Subject, context: int, names: list[str], count: int, rounds: int) -> list[list]:
    """One row for each arm, the first of which is what factors are of."""
    arms = [Arm(subject, name, context) for name in names]
    attach(subject.model, next(n.removesuffix(BY_PYTHON) for n in names if n not in (PLAIN, HALVES)),
           calibration=subject.calibration)  # fmt: skip
    for arm in arms:
        arm.turn(count, keep=False)
    for i in range(rounds):
        for arm in arms[:: -1 if i % 2 else 1]:
            arm.turn(count)
    out = []
    for arm in arms:
        factors = [a / b for a, b in zip(arms[0].turns, arm.turns, strict=True)]
        out.append(
            [
                context,
                arm.name,
                f"{median(arm.turns):.2f}",
                _quartiles(arm.turns),
                f"{median(factors):.2f}",
                _quartiles(factors),
                f"{median(arm.builds):.2f}",
                arm.steps.traced if not arm.steps.off else "-",
                console.human_bytes(sum(cache.nbytes for cache in arm.cache)),
            ]
        )
        if arm.steps.refused:
            print(f"{arm.name}: {list(arm.steps.refused.values())[0]}")
    for arm in arms:
        for other in arms:
            if other.name == arm.name + BY_PYTHON:
                same = sum(a == b for a, b in zip(arm.tokens, other.tokens, strict=True))
                print(f"{arm.name}: {same} of {len(arm.tokens)} tokens are the same by Python")
    detach(subject.model)
    return out


def _quartiles(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{low:.2f} .. {high:.2f}"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("decode_steps", __doc__)
    add = parser.add_argument
    add("model", nargs="?", default="qwen3-4b", help="a shape of `mlxkv bench`, or a model")
    add("--bits", type=int, help="of random weights; 16 without")
    add("--contexts", type=words, default=("4k", "32k", "128k"), help="by commas")
    add("--kv", type=words, default=("fp16", "halves", "int4-", "int4", "int2"),
        help="by commas; NAME-: steps by Python; halves: pages of float16")  # fmt: skip
    add("--tokens", type=int, default=32, help="of one turn")
    add("--rounds", type=int, default=12, help="turns of each arm")
    add("--operations", action="store_true", help="time single operations instead")
    add("--same", type=int, help="count equal tokens of so many instead")
    args = parser.parse_args(arguments)
    if args.same:
        print_machine(machine_in_use(), versions())
        same(args.model, list(args.kv), args.same)
        return
    if args.operations:
        print_machine(machine_in_use(), versions())
        operations()
        return
    contexts = [console.parse_tokens(text, "--contexts") for text in args.contexts]
    at_least("--tokens", args.tokens, 1)
    at_least("--rounds", args.rounds, 2)
    for name in args.kv:
        if name != HALVES:
            parse_kv(name.removesuffix(BY_PYTHON))
    if not set(args.kv) - {PLAIN, HALVES}:
        raise UserError(f"[--kv] needs a preset that compresses; got {','.join(args.kv)}")
    subject = load_subject(args.model, None, args.bits)
    print_machine(machine_in_use(), versions())
    title = f"{args.model}, weights of {args.bits or 16} bits, {args.rounds} turns of {args.tokens} tokens"
    for context in contexts:  # a table each, so that a run that is stopped leaves what it has
        console.print_table(
            COLUMNS, rows(subject, context, list(args.kv), args.tokens, args.rounds), title
        )
        sys.stdout.flush()
        mx.clear_cache()


if __name__ == "__main__":
    console.run_tool(main)
