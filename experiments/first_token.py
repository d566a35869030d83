"""Time to the first token of a long prompt in turns: full precision in mlx-lm's own loop, and presets whose
layers are computed as Python builds the next ones, or after it has built all of a chunk.

    python -m experiments.first_token qwen3-4b --bits 4 --contexts 32k

Arms by commas: `fp16`; a preset; `PRESET-` (nothing is computed before a chunk is built whole); `PRESET+` (the
host also waits for the layer before the last, so that its scratch is free again). Every round times all arms one
after the other, and factors are of one round, over the first arm. build ms: in the model's call, added up over chunks.
In full precision and with `-` the GPU waits as long; else it works meanwhile, and the host may wait for it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import median, quantiles

import mlx.core as mx
from mlx_lm.generate import generate_step, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.bench.show import print_machine
from mlxkv.bench.subject import Subject, load_subject, machine_in_use
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch
from mlxkv.models.generate import PREFILL_STEP
from mlxkv.models.seam import attach, detach
from mlxkv.versions import versions

LAZY, FAR = "-", "+"
COLUMNS = (
    "context",
    "arm",
    "first token s",
    "quartiles",
    "of first",
    "quartiles",
    "build ms",
    "peak",
)


class Arm:
    """seconds, builds, peaks: of each turn."""

    def __init__(self, it: Subject, name: str):
        self.it, self.name, self.kv = it, name, name.rstrip(LAZY + FAR)
        self.config = parse_kv(self.kv)
        self.seconds, self.builds, self.peaks, self.token = [], [], [], None

    def turn(self, prompt: mx.array, keep: bool = True) -> None:
        """Read the prompt into a fresh cache until the first token."""
        it, built = self.it, [0.0]
        attach(
            it.model, self.config, calibration=it.calibration if self.config.calibrated else None
        )
        try:
            cache = make_prompt_cache(it.model)
            for one in cache:
                one.lazy = self.name.endswith(LAZY)
            mx.clear_cache()
            mx.reset_peak_memory()
            with (
                wired_limit(it.model),
                far(self.name.endswith(FAR)),
                clocked(type(it.model), built),
            ):
                start = time.perf_counter()
                for token, _ in generate_step(
                    prompt,
                    it.model,
                    max_tokens=1,
                    prompt_cache=cache,
                    prefill_step_size=PREFILL_STEP,
                ):
                    self.token = token
                seconds = time.perf_counter() - start
        finally:
            detach(it.model)
        if keep:
            self.seconds.append(seconds)
            self.builds.append(1e3 * built[0])
            self.peaks.append(mx.get_peak_memory())


@contextmanager
def clocked(kind: type, total: list[float]):
    """Inside, `total[0]` grows by the seconds of calls of this class of models."""
    call = kind.__call__

    def timed(self, *args, **kwargs):
        start = time.perf_counter()
        out = call(self, *args, **kwargs)
        total[0] += time.perf_counter() - start
        return out

    kind.__call__ = timed
    try:
        yield
    finally:
        kind.__call__ = call


@contextmanager
def far(wanted: bool):
    """Inside, if `wanted`, any number of layers may be under way."""
    before = launch.LAYERS
    launch.LAYERS = 1_000_000 if wanted else before
    try:
        yield
    finally:
        launch.LAYERS = before


def rows(it: Subject, context: int, names: list[str], rounds: int) -> list[list]:
    """One row for each arm, the first of which is what factors are of."""
    prompt = it.random_tokens(context)
    mx.eval(prompt)
    arms = [Arm(it, name) for name in names]
    for arm in arms:
        arm.turn(prompt, keep=False)
    for i in range(rounds):
        for arm in arms[:: -1 if i % 2 else 1]:
            arm.turn(prompt)
    for arm in arms:
        for other in arms:
            if other.name != arm.name and other.kv == arm.kv and other.token != arm.token:
                print(f"{arm.name} and {other.name}: other tokens")
    return [_row(context, arm, arms[0]) for arm in arms]


def _row(context: int, arm: Arm, first: Arm) -> list:
    factors = [a / b for a, b in zip(arm.seconds, first.seconds, strict=True)]
    return [
        context,
        arm.name,
        f"{median(arm.seconds):.3f}",
        _quartiles(arm.seconds, 3),
        f"{median(factors):.3f}",
        _quartiles(factors, 3),
        f"{median(arm.builds):.0f}",
        console.human_bytes(max(arm.peaks)),
    ]


def _quartiles(values: list[float], digits: int) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{low:.{digits}f} .. {high:.{digits}f}"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("first_token", __doc__)
    add = parser.add_argument
    add("model", nargs="?", default="qwen3-4b", help="a shape of `mlxkv bench`, or a model")
    add("--bits", type=int, help="of random weights; 16 without")
    add("--contexts", type=words, default=("32k",), help="by commas")
    add("--kv", type=words, default=("fp16", "int4-", "int4", "int4+"), help="arms, by commas")
    add("--rounds", type=int, default=5, help="turns of each arm")
    args = parser.parse_args(arguments)
    contexts = [console.parse_tokens(text, "--contexts") for text in args.contexts]
    at_least("--rounds", args.rounds, 2)
    for name in args.kv:
        parse_kv(name.rstrip(LAZY + FAR))
    it = load_subject(args.model, None, args.bits)
    print_machine(machine_in_use(), versions())
    table = []
    for context in contexts:
        table += rows(it, context, list(args.kv), args.rounds)
        mx.clear_cache()
    title = f"{args.model}, weights of {args.bits or 16} bits, {args.rounds} turns"
    console.print_table(COLUMNS, table, title)


if __name__ == "__main__":
    console.run_tool(main)
