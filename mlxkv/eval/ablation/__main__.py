"""The command line of the ablations: a table, and one JSON document as the last line or in a file."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress

from mlxkv import console, doctor
from mlxkv.config import parse_kv
from mlxkv.errors import UserError
from mlxkv.eval import ablation
from mlxkv.eval.ablation import bits, deal
from mlxkv.eval.ablation.asked import Asked, numbers, pairs

WITH_MODEL = ("parts", "domains", "windows", "search")
WHAT = (*WITH_MODEL, "bits")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"[ablation] {message}; --help lists the options")


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
                _write(args.out, _document(args.what, {**data, "rows": rows}, start))

        known = _known(args.out, args.what, data)
        data["rows"] = deal.compute(args.what, asked, args.jobs, known, keep)
        deal.module(args.what).show(asked, data["rows"])
    data = _document(args.what, data, start)
    console.note(f"{data['seconds']:.0f} s")
    if args.out is None:
        console.print_json(data)
    else:
        _write(args.out, data)


def _document(what: str, data: dict, start: float) -> dict:
    used = next(row for row in doctor.backends() if row["used"])
    return {
        "what": what,
        **data,
        "machine": doctor.machine() | {"backend": used["name"], "device": used["device"]},
        "versions": doctor.versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _plain(asked: dict) -> dict:
    return json.loads(json.dumps(asked))


def _known(out: Path | None, what: str, data: dict) -> dict:
    """Rows that an earlier run left in the same file, where it asked the same."""
    try:
        before = json.loads(out.read_text(encoding="utf-8")) if out else {}
        alike = {**before["asked"], "only": data["asked"]["only"]} == data["asked"]
        same = (before["what"], before["model"]) == (what, data["model"])
        return before["rows"] if alike and same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m mlxkv.eval.ablation",
        description=ablation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", help=", ".join(WHAT))
    add("--model", default="tiny-qwen", help="an alias, a hub name or a folder")
    add("--context", help="tokens; 8192, for bits a list of contexts")
    add("--decode", type=int, default=512, help="tokens decoded one by one behind the context")
    add("--questions", type=int, default=16, help="of each kind; 0: no retrieval (parts)")
    add("--tokens", default=str(Asked.tokens), help="to calibrate on")
    add("--group", default="128", help="values per scale, by commas: 128,64,32 (parts, domains)")
    add("--clip", action="append", help="KEYS,VALUES such as .92,.92; repeatable (parts, domains)")
    add("--only", default="", help="some arms, by commas: rotations (parts), texts (domains)")
    add("--recipe", default=Asked.recipe, help="of the transforms: full, balanced, ... (domains)")
    add("--sink", default="0,16,64,128", help="tokens, by commas (windows)")
    add("--recent", default="0,64,256", help="tokens, by commas (windows)")
    add("--kv", default=",".join(bits.PRESETS), help="presets, by commas (bits)")
    add("--jobs", type=int, default=1, help="processes that share the arms; each loads the model")
    add(
        "--out",
        type=Path,
        help="a file for the JSON document, in place of the last line; a run goes on where it was stopped",
    )
    args = parser.parse_args(arguments)
    if args.what not in WHAT:
        raise UserError(f"[ablation] unknown; got {args.what!r}; choose from {', '.join(WHAT)}")
    if args.jobs < 1:
        raise UserError(f"[--jobs] must be at least 1; got {args.jobs}; choose 1 or more")
    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"[--out] no such folder; got {args.out.parent}; make it first")
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
        only=tuple(name.strip() for name in args.only.split(",") if name.strip()),
    )


def _bits(args: argparse.Namespace) -> dict:
    presets = list(dict.fromkeys(name.strip() for name in args.kv.split(",")))
    for name in presets:
        parse_kv(name)  # a slip in the last one must not cost the work of the first
    texts = args.context.split(",") if args.context else map(str, bits.CONTEXTS)
    contexts = [console.parse_tokens(text, "--context") for text in texts]
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("bits", total=len(presets) * max(contexts))
        rows = bits.measure(presets, contexts, lambda n: bars.advance(bar, n))
    bits.show(rows)
    return {"kv_heads": bits.HEADS, "dims": bits.DIMS, "rows": rows}


def _write(file: Path, data: dict) -> None:
    try:
        file.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"[--out] cannot write; got {file}: {error.strerror}") from None


if __name__ == "__main__":
    console.run_tool(main)
