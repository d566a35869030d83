"""Declare the options of `mlxkv eval`. Heavy imports are inside the command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from mlxkv.catalog.aliases import DEFAULT
from mlxkv.options import AdapterPath, Calibration, Dtype, Json, Model


def evaluate(
    model: Model = DEFAULT,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv",
            help="Comma-separated presets; fp16 is always added. Default: int4; "
            "--thorough: int8,int4,fill-4,fill-3,fill-2.25.",
            rich_help_panel="Cache",
        ),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="More presets, longer and more texts, and questions about them: half an hour "
            "without a GPU.",
            rich_help_panel="What to run",
        ),
    ] = False,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Tokens, comma-separated: 2k,8k. Default: 1k; --thorough: 2k.",
            rich_help_panel="What to run",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="Comma-separated: divergence (KL, next token), retrieval (answers). Default: divergence; "
            "--thorough: both.",
            rich_help_panel="What to run",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="A UTF-8 file, or a folder of .txt and .md files, in place of built-in text; repeatable.",
            rich_help_panel="Model",
        ),
    ] = None,
    windows: Annotated[
        str,
        typer.Option(
            "--windows",
            help="SINK,RECENT: first and last tokens that every preset keeps exact; or own.",
        ),
    ] = "64,64",
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            help="Number of texts, and of documents with questions. Default: 5; --thorough: 8.",
        ),
    ] = None,
    adapter_path: AdapterPath = None,
    dtype: Dtype = None,
    calibration: Calibration = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Report folder; a stopped run continues from it.",
            rich_help_panel="Output",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure what compressed caches cost on a model: KL divergence, the next token, answers about
    long texts. A few minutes on two CPU cores; a stopped run continues where it was."""
    options = SimpleNamespace(**locals())
    from mlxkv.eval.run import run_eval

    options.text = text or []
    raise typer.Exit(run_eval(options))
