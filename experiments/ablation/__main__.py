"""Run an ablation: print a table, and a JSON document as the last line or to a file."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from experiments import ablation
from experiments.ablation import bits, deal
from experiments.ablation.asked import Asked
from experiments.fixtures import QWEN
from experiments.options import Parser, check_out, made_on, numbers, pairs, words, write
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv

WHAT = ("parts", "domains", "windows", "search", "bits")


def main(arguments: list[str] | None = None) -> None:
    args = _options(arguments)
    start = time.perf_counter()
    if args.what == "bits":
        data = _bits(args)
    else:
        asked = _asked(args)
        asked.check()
        data = {"model": asked.model, "asked": _plain(vars(asked)), "rows": {}}

        def keep(rows: dict) -> None:
            if args.out:
                write(_document(args.what, {**data, "rows": rows}, start), args.out)

        known = _known(args.out, args.what, data)
        data["rows"] = deal.compute(args.what, asked, args.jobs, known, keep)
        deal.module(args.what).show(asked, data["rows"])
    data = _document(args.what, data, start)
    console.note(f"{data['seconds']:.0f} s")
    write(data, args.out)


def _document(what: str, data: dict, start: float) -> dict:
    return {"what": what, **data, **made_on(start)}


def _plain(asked: dict) -> dict:
    return json.loads(json.dumps(asked))


def _known(out: Path | None, what: str, data: dict) -> dict:
    """Return the rows that an earlier run with the same options left in the file."""
    try:
        before = json.loads(out.read_text(encoding="utf-8")) if out else {}
        alike = {**before["asked"], "only": data["asked"]["only"]} == data["asked"]
        same = (before["what"], before["model"]) == (what, data["model"])
        return before["rows"] if alike and same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("ablation", ablation.__doc__)
    add = parser.add_argument
    add("what", help=", ".join(WHAT))
    add("--model", default=QWEN, help="an alias, a hub name or a folder")
    add("--context", help="tokens; 8192, for bits a list of contexts")
    add("--decode", type=int, default=512, help="tokens decoded one by one after the context")
    add("--questions", type=int, default=16, help="of each kind; 0 means no retrieval (parts)")
    add("--tokens", default=str(Asked.tokens), help="to calibrate on")
    add("--group", default="128", help="values per scale, by commas: 128,64,32 (parts, domains)")
    add("--clip", action="append", help="KEYS,VALUES such as .92,.92; repeatable (parts, domains)")
    add("--only", default="", help="arms to run, by commas: rotations (parts), texts (domains)")
    add("--recipe", default=Asked.recipe, help="of the transforms: full, balanced, ... (domains)")
    add("--sink", default="0,16,64,128", help="tokens, by commas (windows)")
    add("--recent", default="0,64,256", help="tokens, by commas (windows)")
    add("--kv", default=",".join(bits.PRESETS), help="presets, by commas (bits)")
    add("--jobs", type=int, default=1, help="processes; each loads the model")
    add(
        "--out",
        type=Path,
        help="write the JSON document to this file; a stopped run goes on from it",
    )
    args = parser.parse_args(arguments)
    if args.what not in WHAT:
        raise UserError(f"[ablation] unknown; got {args.what!r}; choose from {', '.join(WHAT)}")
    if args.jobs < 1:
        raise UserError(f"[--jobs] must be at least 1; got {args.jobs}; choose 1 or more")
    check_out(args.out)
    return args


def _asked(args: argparse.Namespace) -> Asked:
    usual = Asked()
    return Asked(
        model=args.model,
        context=console.parse_tokens(args.context or str(usual.context), "--context"),
        decode=args.decode,
        questions=args.questions,
        tokens=console.parse_tokens(args.tokens, "--tokens"),
        groups=numbers(args.group, "--group"),
        clips=pairs(args.clip, "--clip") if args.clip else usual.clips,
        sinks=numbers(args.sink, "--sink"),
        recents=numbers(args.recent, "--recent"),
        recipe=args.recipe,
        only=words(args.only),
    )


def _bits(args: argparse.Namespace) -> dict:
    presets = list(words(args.kv))
    for name in presets:
        parse_kv(name)  # a mistake in the last name must not cost the work on the first
    texts = args.context.split(",") if args.context else map(str, bits.CONTEXTS)
    contexts = [console.parse_tokens(text, "--context") for text in texts]
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("bits", total=len(presets) * max(contexts))
        rows = bits.measure(presets, contexts, lambda n: bars.advance(bar, n))
    bits.show(rows)
    return {"kv_heads": bits.HEADS, "dims": bits.DIMS, "rows": rows}


if __name__ == "__main__":
    console.run_tool(main)
