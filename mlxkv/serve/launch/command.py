"""The command `mlxkv launch`. Imports nothing heavy."""

from __future__ import annotations

import shlex
from typing import Annotated

from typer import Argument, Context, Exit, Option

from mlxkv.errors import UserError
from mlxkv.formats.names import complete_kv
from mlxkv.models.catalog.aliases import complete_model, resolve
from mlxkv.serve.launch.tools import TOOLS


def launch(
    ctx: Context,
    tool: Annotated[str, Argument(help=f"{', '.join(TOOLS)}; what stands behind -- is for it.")],
    url: Annotated[
        str | None,
        Option(
            "--url", help="A server that runs. Default: the one at port 8080, or one of its own."
        ),
    ] = None,
    api_key: Annotated[
        str | None, Option("--api-key", help="Key of that server. Or set MLXKV_API_KEY.")
    ] = None,
    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            help="Start a server with this one: an alias, a hub name, a folder or a GGUF file.",
            autocompletion=complete_model,
        ),
    ] = None,
    kv: Annotated[
        str | None,
        Option("--kv", help="Its cache preset. Default: int4.", autocompletion=complete_kv),
    ] = None,
    serve: Annotated[
        str, Option("--serve", help='More options of mlxkv serve: "--kv-memory 8GB".')
    ] = "",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what would be set and started, and start nothing.")
    ] = False,
) -> None:
    """Start a coding agent (claude, opencode, codex) on a model of this machine: its environment is set, and
    a server runs as long as it does. mlxkv launch claude -m qwen3-4b -- --continue"""
    if tool not in TOOLS:
        raise UserError(f"[launch] no such program; got {tool!r}; choose from {', '.join(TOOLS)}")
    try:
        more = shlex.split(serve)
    except ValueError as error:
        raise UserError(f"[--serve] {error}; got {serve[:60]!r}; close its quotes") from None
    options = [*(("--model", model) if model else ()), *(("--kv", kv) if kv else ()), *more]
    if url is not None and options:
        raise UserError("[--url] its server has a model already; got --model, --kv or --serve, too")
    if options and not model:
        raise UserError(
            "[--model] needed to start a server; got --kv or --serve alone; see mlxkv models"
        )
    if model:
        resolve(model)
    from mlxkv.serve.launch.run import run

    raise Exit(run(TOOLS[tool], url, api_key, options, list(ctx.args), dry_run))
