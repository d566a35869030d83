"""Where a decode step over two GPUs spends its time: `python -m experiments.two_gpus [--small] [--seconds N]`.

Starts two processes of this module for each set of MLX's and NCCL's variables in SETTINGS, one GPU each (or
a ring of two processes where there is no CUDA), and prints their tables. Under `mlx.launch` it is one of
the two processes: `mlx.launch -n 2 --backend nccl -- python -m experiments.two_gpus`.

host: ms until a step's graph is built and handed over (`mx.async_eval` has returned). whole: ms until its
result is there, one step at a time. loop: ms a step in a loop that hands over the next step before it reads
the token of the last, as mlx-lm does. All are medians, but `loop`, which is a mean.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

# NVLink multicast is not for sums of some KB, and not every host may use it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import mlx.core as mx
import mlx.nn.layers.distributed as sharded
from mlx_lm.models.cache import make_prompt_cache

from experiments.options import Parser
from mlxkv import console
from mlxkv.bench.subject import Subject, load_subject
from mlxkv.models.compiled.step import SWITCH
from mlxkv.serve.ranks import Ranks

SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_GRAPH_MIXING_SUPPORT": "0"},
    {"MLX_USE_CUDA_GRAPHS": "0"},
    {"NCCL_GRAPH_REGISTER": "0"},
    {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "0"},
    {"NCCL_GRAPH_STREAM_ORDERING": "0"},
    {"MLX_MAX_OPS_PER_BUFFER": "20"},
    {"MLX_MAX_OPS_PER_BUFFER": "2000", "MLX_MAX_MB_PER_BUFFER": "100000"},
)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMALL = LLAMA | {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
SUMS = 64  # of one step of 32 layers
ROUND = 25  # steps between two agreements of the server
BY = {"Python": "0", "traced": "1"}  # SWITCH


class Table:
    """Times steps in both processes; rank 0 prints. steps: of one figure."""

    def __init__(self, ranks: Ranks, steps: int):
        self.ranks, self.steps = ranks, steps

    def say(self, line: str) -> None:
        if self.ranks.rank == 0:
            print(line, flush=True)

    def row(self, name: str, step: Callable, first: mx.array, alone: bool = False) -> None:
        """Time `step`, an array -> the next step's. alone: only in rank 0, while the other waits."""
        self.ranks.least(0)
        if alone and self.ranks.rank:
            self.ranks.least(0)
            return
        try:
            times = [*_one_by_one(step, first, self.steps), _looped(step, first, self.steps)]
            said = " ".join(f"{1e3 * t:9.3f}" for t in times)
        except (RuntimeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        if alone:
            self.ranks.least(0)
        self.say(f"{name:58} {said}")


def _one_by_one(step: Callable, x: mx.array, steps: int) -> tuple[float, float]:
    """Medians: seconds until a step is handed over, and until it is done."""
    host, whole = [], []
    for i in range(steps + 4):
        start = time.perf_counter()
        x = step(x)
        mx.async_eval(x)
        handed = time.perf_counter()
        mx.eval(x)
        if i >= 4:  # the first are traced, and fill the pools of memory
            host.append(handed - start)
            whole.append(time.perf_counter() - start)
    return statistics.median(host), statistics.median(whole)


def _looped(step: Callable, x: mx.array, steps: int) -> float:
    """Seconds a step, with one step under way while the last one's numbers are read."""
    x = step(x)
    mx.async_eval(x)
    start = time.perf_counter()
    for _ in range(steps):
        then = step(x)
        mx.async_eval(then)
        x.tolist()
        x = then
    mx.eval(x)
    return (time.perf_counter() - start) / steps


# -- MLX alone


def sums(table: Table, width: int, apart: bool = False) -> None:
    """Sums of [1, width] as a step has them, between products and alone. apart: those on another stream."""
    group, dtype = table.ranks.group, mx.bfloat16
    weight = (mx.random.normal((width, width)) * width**-0.5).astype(dtype)
    other = mx.new_stream(mx.default_device()) if apart else None
    first = mx.ones((1, width), dtype)
    mx.eval(weight, first)

    def chain(product: bool, total: bool, stream=None, count: int = SUMS):
        def step(x):
            for _ in range(count):
                if product:
                    x = x @ weight
                if total:
                    x = mx.distributed.all_sum(x, group=group, stream=stream) * 0.5
            return x

        return step

    def waiting(x):
        for _ in range(SUMS):
            x = chain(True, True, count=1)(x)
            mx.eval(x)
        return x

    if apart:
        name = f"d  {SUMS} products and sums, sums on another stream"
        table.row(name, chain(True, True, other), first)
        return
    table.row(f"d  {SUMS} products", chain(True, False), first)
    table.row(f"d  {SUMS} sums", chain(False, True), first)
    table.row("d  1 sum", chain(False, True, count=1), first)
    table.row(f"d  {SUMS} products and sums", chain(True, True), first)
    table.row(f"d  {SUMS} products and sums, mx.compile", mx.compile(chain(True, True)), first)
    table.row(f"d  {SUMS} products and sums, each waited for", waiting, first)
    number = mx.zeros((2,), mx.int32)
    table.row("d  1 agreement (a sum of 2 numbers, read)", lambda x: _read(x, group), number)


def _read(x: mx.array, group) -> mx.array:
    mx.distributed.all_sum(mx.array([1, 2]), group=group).tolist()
    return x


def links(table: Table, width: int) -> None:
    """Two steps of products and sums, for what NCCL logs and MLX draws of them."""
    group, weight = table.ranks.group, mx.ones((width, width), mx.bfloat16)
    for _ in range(2):
        x = mx.ones((1, width), mx.bfloat16)
        for _ in range(SUMS):
            x = mx.distributed.all_sum(x @ weight, group=group)
        mx.eval(x)


# -- the model's step


@contextmanager
def replaced(owner, **names):
    """Attributes of `owner` inside a `with` block."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def stepping(subject: Subject, kv: str, by: str, batch: int, context: int):
    """A decode step [B] -> [B] after `context` tokens, and the first tokens."""
    with replaced_variable(SWITCH, BY[by]), subject.attached(kv):
        caches = make_prompt_cache(subject.model)
        mx.random.seed(1)
        prompt = subject.random_tokens(batch, context)
        for i in range(0, context, 256):
            subject.model(prompt[:, i : i + 256], cache=caches)
            mx.eval([cache.state for cache in caches])

        def step(tokens):
            logits = subject.model(tokens[:, None], cache=caches)[:, -1]
            return mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)

        yield step, prompt[:, -1]


@contextmanager
def replaced_variable(name: str, value: str):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def agreeing(ranks: Ranks, step: Callable, every: int) -> Callable:
    """A step with rank 0's tokens, and every so often (0: never) the server's two agreements of a round."""
    count = 0

    def agreed(tokens):
        nonlocal count
        count += 1
        if every and count % every == 0:
            ranks.share([])
            ranks.share(None)
        drawn = step(tokens)
        mx.async_eval(drawn)
        return ranks.tokens(drawn)

    return agreed


def steps_of(table: Table, subject: Subject, args, spread: bool, kinds: list[tuple]) -> None:
    """Rows of the model's steps; spread: whether it has been sharded."""
    ranks = table.ranks
    identity = {"all_sum": lambda x, **_: x}
    plain = {"sum_gradients": lambda group: lambda x: x}
    for kv, by, batch in kinds:
        label = f"{kv}, batch {batch}, by {by}"

        def row(name, wrap=lambda step: step, alone=False, kind=(kv, by, batch), label=label):
            with stepping(subject, *kind, args.context) as (step, first):
                table.row(f"{name}: {label}", wrap(step), first, alone)

        if not spread:
            if ranks.rank == 0:
                row("a  one GPU", alone=True)
            else:
                table.row("", None, None, alone=True)
            continue
        row("b  two GPUs")
        if args.brief:
            continue
        with replaced(mx.distributed, **identity):
            # Its own agreements must stay: `table.row` makes them outside of the steps, by all_gather.
            row("c  two, no sums (wrong numbers)")
            with replaced(sharded, **plain):
                row("c' two, no sums, no sum_gradients")
        with replaced(sharded, **plain):
            row("b' two, no sum_gradients")
        row("e  two, rank 0's tokens", lambda step: agreeing(ranks, step, 0))
        row(f"f  e and agreements, one in {ROUND}", lambda step: agreeing(ranks, step, ROUND))
        row("f' e and agreements in each step", lambda step: agreeing(ranks, step, 1))


def measure(args) -> None:
    """One of the two processes."""
    ranks = Ranks()
    table = Table(ranks, args.steps)
    start = time.perf_counter()
    config = SMALL if args.small else LLAMA
    if args.links:
        links(table, config["hidden_size"])
        return
    table.say(f"{'ms':58} {'host':>9} {'whole':>9} {'loop':>9}")
    if ranks.many:
        sums(table, config["hidden_size"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        subject = load_subject(folder, None, None)
    table.say(f"# model of random weights after {time.perf_counter() - start:.0f} s")
    # fp16 is mlx-lm's own, to which nothing is attached that would trace its steps.
    ways = (("fp16", "Python"), ("int4", "Python"), ("int4", "traced"))
    kinds = [(*way, batch) for batch in (1, 8) for way in ways]
    if args.brief:
        kinds = [(*way, 1) for way in ways]
    else:
        steps_of(table, subject, args, False, kinds)
    if not ranks.many:
        return
    subject.model.shard(ranks.group)
    mx.eval(subject.model.parameters())
    mx.clear_cache()
    steps_of(table, subject, args, True, kinds)
    if not args.brief:
        sums(table, config["hidden_size"], apart=True)
    table.say(
        f"# {time.perf_counter() - start:.0f} s, {mx.get_peak_memory() / 2**30:.1f} GiB at most"
    )


# -- both processes


def environments(folder: Path) -> list[dict[str, str]]:
    """Variables by which two processes of this machine find each other."""
    ports = []
    lines = [socket.socket() for _ in range(2)]
    for line in lines:
        line.bind(("127.0.0.1", 0))
        ports.append(line.getsockname()[1])
    for line in lines:
        line.close()
    if mx.cuda.is_available():
        both = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": "2"}
        # NCCL tells apart the devices that a process sees by their bus, so each may see its own alone.
        return [both | {"MLX_RANK": str(i), "CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)]
    path = folder / "hosts.json"
    path.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    return [{"MLX_RANK": str(i), "MLX_HOSTFILE": str(path)} for i in range(2)]


def start_both(setting: dict[str, str], options: list[str], seconds: float) -> None:
    """Run both processes to their end, for `seconds` at most."""
    print(f"\n== {' '.join(f'{k}={v}' for k, v in setting.items()) or 'as it is'}", flush=True)
    command = [sys.executable, "-m", "experiments.two_gpus", *options]
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(command, env=os.environ | setting | env)
            for env in environments(Path(folder))
        ]
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(one.poll() is None for one in running):
            time.sleep(0.1)
        for one in running:
            try:  # the other ends a moment later
                one.wait(5 if any(o.poll() == 0 for o in running) else 0.1)
            except subprocess.TimeoutExpired:
                one.kill()
        codes = [one.wait() for one in running]
    if codes != [0, 0]:
        print(f"# ended with {codes} after {time.monotonic() - end + seconds:.0f} s", flush=True)


def look_at_links(options: list[str], seconds: float) -> None:
    """Print how NCCL moves the bytes, and what CUDA graphs MLX makes of products with sums between them."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        told = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,TUNING",
            "NCCL_DEBUG_FILE": str(here / "log.%p"),
            "MLX_SAVE_CUDA_GRAPHS_DOT_FILE": str(here / "graph"),
        }
        start_both(told, [*options, "--links"], seconds)
        lines = {
            line.split("NCCL INFO ")[-1].strip()
            for log in here.glob("log.*")
            for line in log.read_text(errors="replace").splitlines()
            if re.search(r" via |NCCL version|set by environment|Using network|Algo", line)
        }
        print("\n".join(sorted(lines)[:40]))
        # Both processes write under the same names, with graphs of the same kinds.
        graphs = sorted(here.glob("graph_*.dot"), key=lambda path: path.stat().st_mtime)
        for path in graphs[-4:]:
            kinds = re.findall(
                r"[A-Z]+(?:_[A-Z]+)*(?= *(?:\||\\n|\n|\"))", path.read_text(encoding="utf-8")
            )
            print(f"# graph of {len(graphs)}: {dict(Counter(kinds).most_common(12))}")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("two_gpus", __doc__)
    parser.add_argument("--small", action="store_true", help="a model of 2 layers")
    parser.add_argument(
        "--brief", action="store_true", help="sums, and batch 1 over two GPUs alone"
    )
    parser.add_argument("--links", action="store_true", help="two steps of sums, and no times")
    parser.add_argument("--steps", type=int, default=30, help="steps of each figure")
    parser.add_argument("--context", type=int, default=1024, help="tokens in the caches")
    parser.add_argument("--seconds", type=float, default=440, help="for all settings together")
    args = parser.parse_args(arguments)
    if "MLX_RANK" in os.environ:
        measure(args)
        return
    end = time.monotonic() + args.seconds
    options = [*(["--small"] * args.small), f"--steps={args.steps}", f"--context={args.context}"]
    if mx.cuda.is_available():
        look_at_links(["--small"] * args.small, 60)
    for setting in SETTINGS:
        brief = ["--brief"] if setting or args.brief else []
        left = end - time.monotonic()
        if left > 20:
            start_both(setting, options + brief, min(left, 70 if brief else 260))


if __name__ == "__main__":
    console.run_tool(main)
