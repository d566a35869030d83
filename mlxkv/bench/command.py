"""`mlxkv bench` and its subcommands: their options. Frameworks are imported inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxkv.catalog.aliases import DEFAULT
from mlxkv.errors import UserError
from mlxkv.options import Json

Contexts = Annotated[
    str | None,
    typer.Option(
        "--contexts", help="Tokens, comma-separated: 4k,32k.", rich_help_panel="What to run"
    ),
]
Kv = Annotated[
    str,
    typer.Option("--kv", help="Comma-separated presets (mlxkv presets).", rich_help_panel="Cache"),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="An alias, a folder, a hub name; gemma-3-1b, qwen2.5-1.5b, qwen3-4b, qwen3-8b: random weights.",
        rich_help_panel="Model",
    ),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="An alias, a folder, a hub name; put it after the command, if there is one.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        "--bits", help="Quantise random weights, as mlx-lm does.", rich_help_panel="Model"
    ),
]

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback(invoke_without_command=True)
def quick(context: typer.Context, model: OwnModel = None) -> None:
    """Measure speed and memory here. Without a command: `decode` with one context of 1,024 tokens, two minutes
    on two CPU cores. gemma-3-1b, qwen2.5-1.5b, qwen3-4b and qwen3-8b are made here with random weights; other
    models are loaded."""
    if context.invoked_subcommand is None:
        decode(model or DEFAULT, contexts="1k", tokens=16, rounds=1)
    elif model is not None:
        name = context.invoked_subcommand
        raise UserError(
            f"[--model] belongs after {name}; got it before; write mlxkv bench {name} --model {model}"
        )


@bench.command()
def kernels(contexts: Contexts = None, kv: Kv = "int4,fill-2.25", json: Json = False) -> None:
    """Time decode attention, encode and dequantize, each checked first, beside MLX's own attention."""
    from mlxkv.bench.kernels.run import run_kernels

    run_kernels(contexts, kv, json)


@bench.command()
def decode(
    model: Model = DEFAULT,
    contexts: Contexts = None,
    kv: Kv = "fp16,int4",
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens to decode.", rich_help_panel="What to run")
    ] = 64,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Each round runs all presets twice: A B B A.")
    ] = 2,
    bits: Bits = None,
    json: Json = False,
) -> None:
    """Measure first token, prefill, decode and memory per preset and context, and what host and device take
    for a token.

    --kv also takes mlx-lm-kv8 and mlx-lm-kv4, mlx-lm's own quantized caches, and fp16-replayed and
    fp16-pages, full precision through steps like those of compressed caches.
    """
    from mlxkv.bench.decode import run_decode

    run_decode(model, contexts, kv, tokens, rounds, bits, json)
