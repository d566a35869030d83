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
    keep: Annotated[
        float | None,
        typer.Option("--keep", help="Share of a prompt's stored tokens to keep, for every preset."),
    ] = None,
    context: Annotated[str, typer.Option("--context", help="Tokens, by commas: 2k,8k.")] = "2k",
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="By commas: divergence, retrieval, generation, stages, subspace, lm-eval:NAME.",
        ),
    ] = "divergence,retrieval,generation,stages",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            "--texts",
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
    tokens: Annotated[
        int, typer.Option("--tokens", help="Greedy tokens compared with fp16's, per prompt.")
    ] = 32,
    kinds: Annotated[
        str, typer.Option("--kinds", help="Of questions, by commas.")
    ] = "single,multi-key,multi-query,multi-value",
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
    limit: Annotated[
        int | None, typer.Option("--limit", help="Questions of each lm-eval task.")
    ] = None,
    chunk: Annotated[
        int,
        typer.Option(
            "--chunk",
            help="Tokens of an lm-eval prompt read at once; scores read what is stored. 0: as mlx-lm, exactly.",
        ),
    ] = 512,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the report; a stopped run goes on from it."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Processes at the same time; each loads the model.")
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Also print llama.cpp's block for every preset.")
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with code 1 if any preset is red.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Make the last line of stdout one JSON document.")
    ] = False,
) -> None:
    """Show what compressed caches cost: KL divergence, retrieval, generation, stages by layer."""
    asked = SimpleNamespace(**locals())
    from mlxkv.eval.run import run
    from mlxkv.formats.names import with_keep

    asked.kv, asked.text = with_keep(kv, keep), text or []
    raise typer.Exit(run(asked))
