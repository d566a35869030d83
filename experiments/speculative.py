"""Measure drafts on compressed caches: `python -m experiments.speculative`.

The same greedy replies with a draft model and without, in turn: the share of drafted tokens that are accepted,
the time of both, and where replies first differ. Times on a CPU say how a CPU does: verifying several tokens
there costs nearly as much as saying them one by one.
"""

from __future__ import annotations

import time
from pathlib import Path

from experiments.fixtures import QWEN
from experiments.options import Parser, check_out, made_on, words, write
from mlxkv import console
from mlxkv.models import load
from mlxkv.models.generate import Stats, new_cache, stream
from mlxkv.models.speculative import draft as drafting
from mlxkv.texts.sources import evaluation_texts

COLUMNS = ["cache", "accepted", "of drafted", "share", "time of no draft", "same tokens"]


def measure(args, kv: str) -> dict:
    """One preset: all replies with and without drafts."""
    loaded = load(args.model, kv)
    texts = evaluation_texts(loaded, args.prompt, args.texts)
    draft = drafting.make(loaded, args.draft, args.draft_kv, args.draft_tokens)
    seconds, same, said, drafted, accepted = [0.0, 0.0], 0, 0, 0, 0
    for text in texts:
        replies = []
        for i, helper in enumerate((None, draft)):
            stats = Stats()
            draft.forget()
            pieces = stream(
                loaded,
                text.tokens,
                new_cache(loaded),
                max_tokens=args.tokens,
                stats=stats,
                draft=helper,
            )
            replies.append([piece.token for piece in pieces])
            seconds[i] += stats.decode_seconds
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
        one, other = replies
        said += len(one)
        same += next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one)
        )
        console.note(f"{kv}: {text.name}")
    return {
        "kv": kv,
        "drafted": drafted,
        "accepted": accepted,
        "seconds": [round(x, 3) for x in seconds],
        "tokens": said,
        "same_start": same,
    }


def main(argv: list[str] | None = None) -> None:
    parser = Parser("speculative", __doc__)
    parser.add_argument("--model", default=QWEN)
    parser.add_argument("--draft", default=QWEN)
    parser.add_argument("--draft-kv", default="fp16")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--kv", type=words, default=("fp16", "int4", "int2"))
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a reply")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    check_out(args.out)
    start = time.perf_counter()
    rows = [measure(args, kv) for kv in args.kv]
    cells = [
        [
            row["kv"],
            row["accepted"],
            row["drafted"],
            f"{row['accepted'] / max(1, row['drafted']):.3f}",
            f"{row['seconds'][1] / row['seconds'][0]:.2f}",
            f"{row['same_start']} of {row['tokens']}",
        ]
        for row in rows
    ]
    title = f"{args.model}, drafts of {args.draft} ({args.draft_kv}), {args.draft_tokens} at once"
    console.print_table(COLUMNS, cells, title)
    write({"rows": rows} | made_on(start), args.out)


if __name__ == "__main__":
    console.run_tool(main)
