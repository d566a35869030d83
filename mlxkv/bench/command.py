"""`mlxkv bench` and its subcommands: their options. Frameworks are imported inside the commands."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from mlxkv.errors import UserError
from mlxkv.models.catalog.aliases import DEFAULT

Contexts = Annotated[str | None, typer.Option("--contexts", help="Tokens, by commas: 4k,32k.")]
Kv = Annotated[str, typer.Option("--kv", help="Cache presets, by commas (mlxkv presets).")]
Rounds = Annotated[
    int, typer.Option("--rounds", help="Each round runs all presets twice: A B B A.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="An alias, a folder, a hub name; gemma-3-1b, qwen2.5-1.5b, qwen3-4b, qwen3-8b: random weights.",
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
Bits = Annotated[
    int | None, typer.Option("--bits", help="Quantise random weights, as mlx-lm does.")
]
Json = Annotated[bool, typer.Option("--json", help="Add one JSON document as the last line.")]

SHARE = "--share"


class _Shares:
    """Allow --share without a file name: an empty one is put in its place."""

    def parse_args(self, ctx, args):
        args = list(args)
        for i in [i for i, arg in enumerate(args) if arg == SHARE][::-1]:
            if args[i + 1 : i + 2] == [] or args[i + 1].startswith("-"):
                args.insert(i + 1, "")
        return super().parse_args(ctx, args)


class BenchGroup(_Shares, TyperGroup):
    """The commands of `mlxkv bench`."""


class ShareCommand(_Shares, TyperCommand):
    """A command with --share."""


bench = typer.Typer(
    cls=BenchGroup,
    help="Measure a model's speed and memory here, every preset in a fresh process.",
    add_completion=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    model: Model = DEFAULT,
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            help="Cache presets, by commas (mlxkv presets); fill-3 and fill-2.25 need a calibration.",
        ),
    ] = "int8,int4",
    contexts: Annotated[
        str | None,
        typer.Option("--contexts", help="Tokens, by commas. Default: 4k,16k (on a CPU 1k)."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens to decode. Default: 128 (CPU: 32).")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", help="Each runs all presets twice: A B B A. Default: 2 (CPU: 1)."),
    ] = None,
    cooldown: Annotated[
        float, typer.Option("--cooldown", help="Seconds to rest between two processes.")
    ] = 0.0,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds after which a process is stopped.")
    ] = 3600.0,
    dtype: Dtype = None,
    bits: Bits = None,
    mlx_lm: Annotated[
        bool, typer.Option("--mlx-lm/--no-mlx-lm", help="Also mlx-lm's own quantized caches.")
    ] = True,
    json: Json = False,
    share: Annotated[
        str | None,
        typer.Option(
            SHARE,
            metavar="[FILE]",
            help="Write a JSON file for an issue: no names, no paths. Default: "
            "mlxkv-bench-<chip>-<date>.json here.",
        ),
    ] = None,
) -> None:
    """Measure a model's speed and memory here: first token, prefill, decode, peak, cache, per preset
    and context, each in a fresh process, beside mlx-lm's own caches. Every preset is checked first.

    The commands below measure parts of this, or render shared results.
    """
    if ctx.invoked_subcommand is not None:
        given = [p for p in ctx.params if ctx.get_parameter_source(p).name == "COMMANDLINE"]
        if given:
            name = given[0].replace("_", "-")
            raise UserError(
                f"[bench] --{name} has no effect before a command; got {ctx.invoked_subcommand}; "
                "choose to write it after the command, or leave the command out"
            )
        return
    from mlxkv.bench.whole.plan import make
    from mlxkv.bench.whole.run import run

    plan = make(
        kv=kv,
        contexts=contexts,
        model=model,
        tokens=tokens,
        rounds=rounds,
        cooldown=cooldown,
        timeout=timeout,
        dtype=dtype,
        bits=bits,
        mlx_lm=mlx_lm,
        share=share,
    )
    raise typer.Exit(run(plan, json))


@bench.command()
def kernels(
    shapes: Annotated[
        str | None, typer.Option("--shapes", help="By commas: B1.H32.G8.D128,B1.H4.G1.D256.")
    ] = None,
    contexts: Contexts = None,
    kv: Kv = "int4,fill-2.25",
    calls: Annotated[int, typer.Option("--calls", help="Calls in a timed chain.")] = 64,
    rounds: Rounds = 3,
    encode_tokens: Annotated[
        str | None, typer.Option("--encode-tokens", help="Tokens to encode at once.")
    ] = None,
    encode: Annotated[
        str,
        typer.Option("--encode", help="Ways to encode, by commas: kernel, cpu, cpu-columns."),
    ] = "kernel",
    mlx_lm: Annotated[
        bool, typer.Option("--mlx-lm/--no-mlx-lm", help="Also mlx-lm's quantized attention.")
    ] = True,
    json: Json = False,
) -> None:
    """Time decode attention, encode and unseal, each checked first, beside MLX's own attention."""
    from mlxkv.bench.kernels.run import run

    run(
        shapes=shapes,
        contexts=contexts,
        kv=kv,
        calls=calls,
        rounds=rounds,
        encode_tokens=encode_tokens,
        ways=encode,
        mlx_lm=mlx_lm,
        as_json=json,
    )


@bench.command()
def decode(
    model: Model = DEFAULT,
    contexts: Contexts = None,
    kv: Kv = "fp16,int4",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to decode.")] = 64,
    rounds: Rounds = 2,
    fill: Annotated[
        str,
        typer.Option(
            "--fill",
            help="prefill, direct (random keys and values), auto: direct above 32k (CPU: 1k).",
        ),
    ] = "auto",
    uncompiled: Annotated[
        bool,
        typer.Option("--uncompiled", help="Each preset once more, its steps built by Python."),
    ] = False,
    dtype: Dtype = None,
    bits: Bits = None,
    json: Json = False,
) -> None:
    """Measure first token, prefill, decode and memory quickly, in one process, per preset and context, and
    what host and device take for a token.

    --kv also takes fp16-replayed and fp16-pages: full precision through steps like those of compressed caches.
    """
    from mlxkv.bench.whole.decode import run

    run(
        model=model,
        contexts=contexts,
        kv=kv,
        tokens=tokens,
        rounds=rounds,
        fill=fill,
        uncompiled=uncompiled,
        dtype=dtype,
        bits=bits,
        as_json=json,
    )


Serve = Annotated[
    str, typer.Option("--serve", help='More options of mlxkv serve: "--kv-memory 2GB".')
]
One = Annotated[str, typer.Option("--kv", help="Cache preset (mlxkv presets).")]


@bench.command()
def load(
    model: Model = DEFAULT,
    kv: One = "int4",
    clients: Annotated[int, typer.Option("--clients", help="Streaming clients at once.")] = 16,
    minutes: Annotated[float, typer.Option("--minutes", help="How long to run.")] = 10,
    chats: Annotated[int, typer.Option("--chats", help="Distinct chats, drawn at random.")] = 24,
    shortest: Annotated[int, typer.Option("--shortest", help="Shortest prompt, in tokens.")] = 100,
    longest: Annotated[int, typer.Option("--longest", help="Longest prompt, in tokens.")] = 8000,
    tokens: Annotated[int, typer.Option("--tokens", help="Longest reply, in tokens.")] = 32,
    tie: Annotated[
        float,
        typer.Option("--tie", help="Largest gap of two logits (nats) at which replies may differ."),
    ] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of chats.")] = 0,
    dtype: Dtype = None,
    serve: Serve = "",
    json: Json = False,
) -> None:
    """Start a server and put it under many streaming clients: errors, replies, memory, speed."""
    from mlxkv.bench.server.load import LoadPlan, run

    options = _serve_options(model, kv, dtype, serve)
    plan = LoadPlan(
        options=options,
        clients=clients,
        minutes=minutes,
        chats=chats,
        shortest=shortest,
        longest=longest,
        tokens=tokens,
        tie=tie,
        seed=seed,
    )
    raise typer.Exit(run(plan, json))


@bench.command()
def reuse(
    model: Model = DEFAULT,
    kv: One = "int4",
    batches: Annotated[
        str, typer.Option("--batches", help="Requests at once, by commas.")
    ] = "1,8,16,32",
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of a prompt.")] = 2000,
    tokens: Annotated[int, typer.Option("--tokens", help="Longest reply, in tokens.")] = 32,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Rounds, each with another document.")
    ] = 3,
    picture: Annotated[
        str | None, typer.Option("--picture", help="Write an SVG picture to this file.")
    ] = None,
    dtype: Dtype = None,
    serve: Serve = "",
    json: Json = False,
) -> None:
    """Measure what the prefix cache saves: first token and speed with it off, on, and at replay."""
    from pathlib import Path

    from mlxkv.bench.options import parse_batches
    from mlxkv.bench.server.reuse import ReusePlan, run

    plan = ReusePlan(
        options=_serve_options(model, kv, dtype, serve),
        batches=parse_batches(batches),
        prompt=prompt,
        tokens=tokens,
        rounds=rounds,
        picture=Path(picture) if picture else None,
    )
    raise typer.Exit(run(plan, json))


def _serve_options(model: str, kv: str, dtype: str | None, more: str) -> tuple[str, ...]:
    """Arguments of `mlxkv serve`."""
    own = ("--dtype", dtype) if dtype else ()
    return ("--model", model, "--kv", kv, *own, *shlex.split(more))


@bench.command()
def batch(
    model: Model = DEFAULT,
    batches: Annotated[
        str, typer.Option("--batches", help="Sequences decoded at once, by commas.")
    ] = "1,4,16",
    context: Annotated[
        str | None,
        typer.Option("--context", help="Tokens of each sequence. Default: 16k (on a CPU 1k)."),
    ] = None,
    kv: Kv = "fp16,int4",
    tokens: Annotated[int, typer.Option("--tokens", help="Steps in a round.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds, on the same caches.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Also say how many sequences fit into it, by arithmetic: 40GB."
        ),
    ] = None,
    dtype: Dtype = None,
    bits: Bits = None,
    json: Json = False,
) -> None:
    """Decode many sequences at once: tokens per second together, beside mlx-lm's own batches."""
    from mlxkv.bench.whole.batched import run

    run(
        model=model,
        batches=batches,
        context=context,
        kv=kv,
        tokens=tokens,
        rounds=rounds,
        memory=memory,
        dtype=dtype,
        bits=bits,
        as_json=json,
    )


@bench.command()
def render(
    folder: Annotated[str, typer.Argument(help="Folder of shared files.")] = "docs/results/bench",
) -> None:
    """Print shared results (--share) as one Markdown table."""
    from mlxkv.bench.whole.render import run

    raise typer.Exit(run(folder))
