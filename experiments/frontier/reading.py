"""What reading fewer pages costs in the product.

    python -m experiments.frontier.reading --models DIR --texts HELD --out OUT

Caches as `mlxkv` makes them: the prompt is compressed while it is read, then tokens come one by one, each with the
pages of its own. KL of the next token against full precision, a row a preset and text in OUT/rows.jsonl, which a second
run completes. `experiments.frontier.compact` and `.page` read them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from experiments.evidence import rows
from experiments.frontier import corpus
from experiments.frontier.corpus import KL, Held
from experiments.frontier.study import compared, named
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.eval import feed
from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach, load
from mlxkv.models.calibration.measure import bos_of, calibrate

PRESETS = "int2,fill-2.25,int4,fill-3,int4+read0.5,int4+read0.4375,fill-3+read0.64,int4+read0.25"


def read(loaded, tokens: mx.array, context: int) -> mx.array:
    """Log probabilities [B, T - context, vocabulary] after each of tokens [B, T] behind the prompt, one at a time."""
    cache, length = feed.prefill(loaded, tokens[:, :context]), tokens.shape[1]
    steps = (tokens[:, i : i + 1] for i in range(context, length))
    return mx.concatenate([feed.log_probabilities(loaded, cache, one) for one in steps], axis=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("frontier.reading", __doc__)
    parser.add_argument("--models", type=words, required=True, help="folders or names by commas")
    parser.add_argument("--texts", type=Path, help="held-out texts; default: stories")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl")
    parser.add_argument("--kv", type=words, default=words(PRESETS), help="presets by commas")
    parser.add_argument("--context", type=int, default=8064, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=128, help="tokens after it")
    parser.add_argument("--count", type=int, default=8, help="texts")
    parser.add_argument("--together", type=int, default=4, help="texts read at once")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; default: the model's")
    parser.add_argument("--calibrate", type=int, default=16384, help="tokens of calibration")
    args = parser.parse_args(arguments)
    for name in ("decode", "count", "together"):
        at_least(f"--{name}", getattr(args, name), 1)
    at_least("--context", args.context, 512)
    args.out.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        _model(args, model)


def _model(args, model: str) -> None:
    held, file, start = Held(args.texts), args.out / "rows.jsonl", time.perf_counter()
    done = {rows.key(row) for row in rows.read([file])} if file.exists() else set()
    loaded = load(model, "fp16", dtype=args.dtype)
    made = None
    if any(parse_kv(kv).calibrated for kv in args.kv):
        text = held.calibration(loaded, args.calibrate)
        made = calibrate(
            *(loaded.model, text.tokens),
            text=text.name,
            window=min(4096, args.calibrate),
            bos=bos_of(loaded.tokenizer),
        )
    about = {"model": f"{named(model)} in use", "windows": "own"}
    about |= {"split": corpus.TEST, "dtype": str(loaded.dtype).split(".")[-1], "task": KL}
    about |= {"context": args.context}
    heads = getattr(loaded.model, "args", None)
    dims = getattr(heads, "head_dim", None) or heads.hidden_size // heads.num_attention_heads
    names = held.names(corpus.TEST)[: args.count]
    for first in range(0, len(names), args.together):
        some = names[first : first + args.together]
        asked = [
            kv
            for kv in args.kv
            if not all(rows.key(about | {"preset": kv, "text": text}) in done for text in some)
        ]
        if not asked:
            continue
        length = args.context + args.decode + 1
        texts = [held.tokens(loaded, corpus.TEST, text, length) for text in some]
        tokens = mx.array(texts, mx.int32)[:, :-1]
        base = read(loaded, tokens, args.context)
        for kv in asked:
            attach(loaded.model, kv, calibration=made)
            try:
                logs = read(loaded, tokens, args.context)
            finally:
                detach(loaded.model)
            config = parse_kv(kv)
            bits = config.bits_read(dims, dims)
            pages = config.pages_over(args.context - config.sink) * config.page
            cost = {"bits_per_value": bits}
            cost["bits_with_windows"] = (bits * pages + 16 * (args.context - pages)) / args.context
            for i, text in enumerate(some):
                row = {"preset": kv, "text": text, "when": time.time()} | cost
                found = compared(base[i], logs[i], texts[i][args.context + 1 :])
                rows.append(file, about | row | found)
            console.note(f"{kv}: {some[0]} .. {some[-1]}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    console.run_tool(main)
