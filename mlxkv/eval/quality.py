"""A table of quality per preset: `python -m mlxkv.eval.quality --model tiny-qwen --context 8192`.

The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.progress import Progress

from mlxkv import console
from mlxkv.config import parse_kv
from mlxkv.errors import UserError
from mlxkv.eval.perplexity import perplexity, story_tokens
from mlxkv.eval.recall import recall
from mlxkv.shapes import layers_of

SHORTEST = 512  # tokens that hold a few facts, a question and its answer
KINDS = ("single", "multi4")
COLUMNS = ("preset", "bits/value", "of fp16", "perplexity", *KINDS, "log p")


def measure(loaded, context: int, questions: int, progress: Callable[[int], None]) -> dict:
    """Perplexity over the second half of a story text and retrieval, at one context.

    progress: called with the tokens and questions that are done since the last call.
    """
    row: dict = {"preset": loaded.kv_name, "layers": loaded.report()}
    tokens = story_tokens(loaded, context)
    row["perplexity"] = perplexity(loaded, tokens, context // 2, progress).value
    for kind in KINDS:
        found = recall(loaded, kind, context, questions, progress=progress)
        row[kind] = {"values": found.values, "every": found.every, "likelihood": found.likelihood}
    grows = [shape for shape in layers_of(loaded.config) if shape.kind == "full"]
    values = sum(shape.values(found.tokens) for shape in grows)
    row["tokens"], row["kv_bytes"], row["values"] = found.tokens, found.nbytes, values
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--kv", default="fp16,int8,int4,int3,int2", help="presets, by commas")
    parser.add_argument("--context", default="4096", help="tokens, such as 4096 or 8k")
    parser.add_argument("--questions", type=int, default=64, help="of each kind")
    args = parser.parse_args(arguments)
    from mlxkv.models import load

    context = console.parse_tokens(args.context, "--context")
    if context < SHORTEST:
        raise UserError(f"[--context] must be at least {SHORTEST} tokens; got {context}")
    if args.questions < 1:
        raise UserError(f"[--questions] must be at least 1; got {args.questions}")
    names = args.kv.split(",")
    for name in names:
        parse_kv(name)  # a slip in the last one must not cost the work of the first
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        for name in names:
            start = time.perf_counter()
            loaded = load(args.model, name)
            steps = context - context // 2 + len(KINDS) * args.questions
            bar = bars.add_task(name, total=steps)
            row = measure(loaded, context, args.questions, partial(bars.advance, bar))
            row["seconds"] = time.perf_counter() - start
            rows.append(row)
            bars.remove_task(bar)
            bars.console.print(f"{name}: {row['seconds']:.0f} s")
    table = [
        (
            row["preset"],
            f"{8 * row['kv_bytes'] / row['values']:.2f}",
            f"{row['kv_bytes'] / (2 * row['values']):.3f}",
            f"{row['perplexity']:.4f}",
            *(f"{100 * row[kind]['values']:.1f} %" for kind in KINDS),
            f"{row['multi4']['likelihood']:.3f}",
        )
        for row in rows
    ]
    title = f"{args.model}, {context} tokens, {args.questions} questions of each kind"
    console.print_table(COLUMNS, table, title)
    console.print_json({"model": args.model, "context": context, "rows": rows})


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        console.note(str(error))
        sys.exit(2)
