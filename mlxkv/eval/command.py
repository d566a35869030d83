"""Declare the options of `mlxkv eval`. Heavy imports are inside the command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from mlxkv.models.catalog.aliases import DEFAULT


def evaluate(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="An alias (mlxkv models), a hub name, a folder or a GGUF file."
        ),
    ] = DEFAULT,
    kv: Annotated[
        str, typer.Option("--kv", help="Cache presets, by commas; fp16 is always added.")
    ] = "int8,int4,fill-3,fill-2.25",
    context: Annotated[str, typer.Option("--context", help="Tokens, by commas: 2k,8k.")] = "2k",
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="By commas: divergence (KL, next token), retrieval (answers).",
        ),
    ] = "divergence,retrieval",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="A UTF-8 file, or a folder of .txt and .md files, in place of built-in text; repeatable.",
        ),
    ] = None,
    windows: Annotated[
        str,
        typer.Option("--windows", help="Exact tokens SINK,RECENT of every preset, or own."),
    ] = "64,64",
    decode: Annotated[
        int, typer.Option("--decode", help="Tokens decoded one by one after each context and text.")
    ] = 64,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", help="Texts, and documents with questions, that intervals come from."
        ),
    ] = 8,
    questions: Annotated[
        int | None,
        typer.Option(
            "--questions", help="Questions of each kind and context. Default: 32; 8 on a CPU."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            help="For calibrated presets: a file, or owner/name on the hub. Default: the model's.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the report; a stopped run goes on from it."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Make the last line of stdout one JSON document.")
    ] = False,
) -> None:
    """Show what compressed caches cost: KL divergence, next token, answers about long texts."""
    options = SimpleNamespace(**locals())
    from mlxkv.eval.run import run

    options.text = text or []
    raise typer.Exit(run(options))
