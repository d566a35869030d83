"""`mlxkv bench ...`: the options. Heavy imports live inside the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mlxkv import console
from mlxkv.errors import MachineError, UserError

Contexts = Annotated[str | None, typer.Option("--contexts", help="Tokens, by commas: 4k,32k.")]
Kv = Annotated[str, typer.Option("--kv", help="Cache presets, by commas (mlxkv presets).")]
Rounds = Annotated[int, typer.Option("--rounds", help="Each round runs all twice: A B B A.")]
Json = Annotated[bool, typer.Option("--json", help="Add one JSON document as the last line.")]

bench = typer.Typer(
    help="Measure speed here: of the kernels alone, or of a whole model.",
    add_completion=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback(invoke_without_command=True)
def top(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@bench.command()
def kernels(
    shapes: Annotated[
        str | None, typer.Option("--shapes", help="By commas: B1.H32.G8.D128,B1.H4.G1.D256.")
    ] = None,
    contexts: Contexts = None,
    kv: Kv = "int4,int2",
    calls: Annotated[int, typer.Option("--calls", help="Calls in a timed chain.")] = 64,
    rounds: Rounds = 3,
    encode_tokens: Annotated[
        str | None, typer.Option("--encode-tokens", help="Tokens that are encoded at once.")
    ] = None,
    mlx_lm: Annotated[
        bool, typer.Option("--mlx-lm/--no-mlx-lm", help="mlx-lm's quantized attention too.")
    ] = True,
    json: Json = False,
) -> None:
    """Time decode attention, encode and unseal, each checked first, beside MLX's own attention."""
    from mlxkv.bench.kernels import run

    run(shapes, contexts, kv, calls, rounds, encode_tokens, mlx_lm, json)


@bench.command()
def decode(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="tiny, a folder, a hub name; gemma-3-1b, qwen2.5-1.5b, qwen3-4b: random weights.",
        ),
    ] = "tiny",
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
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")
    ] = None,
    bits: Annotated[
        int | None, typer.Option("--bits", help="Quantise random weights, as mlx-lm does.")
    ] = None,
    json: Json = False,
) -> None:
    """Time a model through mlx-lm: first token, prefill, decode, memory, per preset and context."""
    from mlxkv.bench.decode import run

    run(model, contexts, kv, tokens, rounds, fill, dtype, bits, json)


def main(name: str) -> None:
    """One of the commands as `python -m mlxkv.bench.NAME`."""
    try:
        bench([name, *sys.argv[1:]])
    except (UserError, MachineError) as error:
        console.note(str(error))
        sys.exit(2 if isinstance(error, UserError) else 1)
