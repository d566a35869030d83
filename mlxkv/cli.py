"""The `mlxkv` command. Heavy imports live inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from mlxkv import __version__
from mlxkv.bench.commands import SHARE, BenchGroup, ShareCommand, bench
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.commands import evaluate
from mlxkv.serve.command import serve


class Commands(TyperGroup):
    """Names the choices when a command does not exist."""

    def resolve_command(self, ctx, args):
        if args and args[0] not in self.commands:
            choices = ", ".join(self.list_commands(ctx))
            raise UserError(
                f"[{ctx.info_name}] no such command; got {args[0]!r}; choose from {choices}"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Local LLMs with a compressed KV cache, on MLX. No --model means the embedded tiny one.",
    add_completion=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Option("--model", help="An alias (mlxkv models), a hub name or a local folder.")
]
Kv = Annotated[
    str, typer.Option("--kv", help="Cache preset (mlxkv presets), or KEYS/VALUES: int8/int4.")
]
CalibrationFile = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="For calibrated presets: a file, or owner/name on the hub. Default: the model's.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Make the last line of stdout one JSON document.")
]


@app.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"mlxkv {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def chat(
    model: Model = "tiny",
    kv: Kv = "int4",
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Answer this and leave (or pipe the text in).")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest reply.")] = 512,
    temp: Annotated[
        float, typer.Option("--temp", help="Temperature; 0 takes the likeliest.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    kv_strict: Annotated[
        bool, typer.Option("--kv-strict", help="Refuse a model with layers that stay uncompressed.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the text as it is.")
    ] = False,
    load: Annotated[str | None, typer.Option("--load", help="Go on with a saved session.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, float16 or bfloat16. Default: as stored."),
    ] = None,
    calibration: CalibrationFile = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="Turn values by the weights, for calibrated presets.")
    ] = False,
    keep: Annotated[
        float | None,
        typer.Option("--keep", help="Share of a prompt's stored tokens that stays (SnapKV)."),
    ] = None,
    encode: Annotated[
        str,
        typer.Option("--encode", help="By what: kernel, or cpu or cpu-columns (matrix products)."),
    ] = "kernel",
    json: Json = False,
) -> None:
    """Talk to a model, in a terminal or in one shot (--prompt, or text on stdin)."""
    from mlxkv.chat import Options, run
    from mlxkv.naming import with_keep

    options = Options(
        *(
            model,
            with_keep(kv, keep),
            prompt,
            system,
            max_tokens,
            temp,
            top_p,
            seed,
            kv_strict,
            raw,
            load,
            dtype,
        ),
        *(json, calibration, fold, encode),
    )
    run(options)


app.command("serve")(serve)


@app.command()
def calibrate(
    model: Model = "tiny",
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="Text files in UTF-8. Default: text that comes with mlxkv."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to read.")] = 8900,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="One rotation for all kv heads of a layer.")
    ] = False,
    target: Annotated[
        str,
        typer.Option("--target", help="attention, or for ablations: surrogate tensor random none."),
    ] = "attention",
    parts: Annotated[
        str, typer.Option("--parts", help="Parts of the rotation: u, h, p; uhp is all of it.")
    ] = "uhp",
    search_clip: Annotated[
        bool, typer.Option("--search-clip", help="Search the clips of each layer on the text.")
    ] = False,
    kv: Annotated[
        str | None,
        typer.Option("--kv", help="Presets to search clips for, with commas. Default: oscar-int2."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option("--calibration", help="With --search-clip: keep the rotations of this file."),
    ] = None,
    learn: Annotated[
        str | None,
        typer.Option(
            "--learn", help="For learned presets: scale, rotation, householder, ...+scale."
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="With --learn, before it: srft (default) or none.")
    ] = None,
    bits: Annotated[
        int | None, typer.Option("--bits", help="With --learn: of the codes. Default: 4.")
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", help="With --learn: of the codes. Default: 64.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="With --learn: of Adam. Default: 300.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", help="File. Default: where calibrated presets look."),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", help="Publish it as owner/name on the hub, too.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository on the hub private.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, float16 or bfloat16. Default: as stored."),
    ] = None,
    json: Json = False,
) -> None:
    """Fit the transforms of the oscar and balanced presets to a model: one pass over a little text."""
    from mlxkv.calibrating import Options, run

    options = Options(
        *(model, tuple(text or ()), tokens, per_layer, target, parts, out, dtype, json),
        *(push_to_hub, private, search_clip, kv, calibration),
        *(learn, base, bits, group, steps),
    )
    run(options)


@app.command()
def presets(json: Json = False) -> None:
    """List the cache presets: what they store, bits per value, windows."""
    from mlxkv.listing import presets as run

    run(json)


@app.command()
def models(json: Json = False) -> None:
    """List the aliases, the embedded models and what the hub cache holds."""
    from mlxkv.listing import models as run

    run(json)


@app.command()
def fit(
    model: Model = "tiny",
    config: Annotated[
        str | None, typer.Option("--config", help="A config.json, instead of --model.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option("--context", help="Tokens: 8192, 128k. Default: 32k, or the model's limit."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="The machine's memory: 16GB. Default: this one's."),
    ] = None,
    kv: Annotated[
        list[str] | None, typer.Option("--kv", help="Only these presets; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what fits in memory: bytes per preset, prefill included, and the longest context."""
    from mlxkv.fit import run

    run(model, config, context, memory, kv or [], json)


@app.command(cls=ShareCommand)
def doctor(
    every: Annotated[
        bool, typer.Option("--all", help="Try every kernel, however long that takes.")
    ] = False,
    share: Annotated[
        str | None,
        typer.Option(
            SHARE,
            metavar="[FILE]",
            help="Write a JSON file for an issue: no names, no paths. Default: "
            "mlxkv-doctor-<chip>-<date>.json here.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine: versions, backends, the golden table, kernels. Exit code 1: not all is right."""
    from mlxkv.doctor import run

    raise typer.Exit(run(json, every, share))


app.command("eval")(evaluate)


class BenchCommands(Commands, BenchGroup):
    """Those of `mlxkv bench`."""


app.add_typer(bench, name="bench", cls=BenchCommands)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _usage_line(error: Exception) -> str:
    """A parser's complaint as one line that names the choices."""
    ctx = getattr(error, "ctx", None)
    where = ctx.command.name if ctx and ctx.parent else "mlxkv"
    text = _one_line(error.format_message()).rstrip(".")
    if hasattr(error, "option_name"):
        names = [opt for param in ctx.command.params for opt in param.opts] if ctx else []
        text = f"no such option; got {error.option_name}; choose from {', '.join(names)}"
    return f"[{where}] {text}"


def main(args: list[str] | None = None) -> int:
    """Runs a command; every failure is one line on stderr and an exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # bytes that are no text must not end a chat
            stream.reconfigure(errors="replace")
    try:
        return app(args=args, prog_name="mlxkv", standalone_mode=False) or 0
    except UserError as error:
        line, code = str(error), 2
    except MachineError as error:
        line, code = str(error), 1
    except (KeyboardInterrupt, typer.Abort):
        line, code = "", 130
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer's parser
            line, code = _usage_line(error), 2
        elif os.environ.get("MLXKV_TRACEBACK"):
            raise
        else:
            name = type(error).__name__
            line, code = f"[mlxkv] {name}: {error}; MLXKV_TRACEBACK=1 shows where", 1
    print(_one_line(line), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
