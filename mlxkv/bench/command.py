"""`mlxkv bench` and its subcommands: their options. Frameworks are imported inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

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

bench = typer.Typer(
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
) -> None:
    """Measure a model's speed and memory here: first token, prefill, decode, peak, cache, per preset
    and context, each in a fresh process, beside mlx-lm's own caches. Every preset is checked first.

    The commands below measure parts of this.
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


One = Annotated[str, typer.Option("--kv", help="Cache preset (mlxkv presets).")]


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
