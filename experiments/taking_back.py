"""Measure what a reply that is taken back costs: `python -m experiments.taking_back`.

A prompt is read, then a reply is read and taken back, so many times, as `regenerate` and edited messages
do: the cache is cut back (`mlxkv.models.cut_back`) and what it lost is read again. Then the text goes on,
and its divergence from full precision is compared with that of a cache that read only the prompt.
Several prompts run as one batch, one from each place of the text.
"""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from experiments.options import Parser, at_least, check_out, made_on, numbers, words, write
from mlxkv import console
from mlxkv.eval.tasks.exact import divergence
from mlxkv.formats.presets import PRESETS
from mlxkv.models import cut_back, load
from mlxkv.models.generate import new_cache
from mlxkv.texts.corpus import interleaved

CHUNK = 512  # tokens of a prompt at once
GOES_ON = 40  # tokens of the text behind the prompt that are scored, one by one


def places(tokenizer, count: int, length: int) -> mx.array:
    """[count, length] tokens, from places of the text that do not overlap."""
    tokens = tokenizer.encode("\n\n".join(interleaved("evaluation")))[: count * length]
    return mx.array(tokens).reshape(count, length)


def read(model, cache: list, tokens: mx.array) -> None:
    for start in range(0, tokens.shape[1], CHUNK):
        model(tokens[:, start : start + CHUNK], cache=cache)
        mx.eval([layer.state for layer in cache])


def scores(model, cache: list, tokens: mx.array) -> mx.array:
    """Logits [B, T, V] float32 after each token, read one by one as a reply is written."""
    out = []
    for i in range(tokens.shape[1]):
        out.append(model(tokens[:, i : i + 1], cache=cache).astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out, axis=1)


def taken_back(loaded, text: mx.array, prompt: int, replies: mx.array, times: int) -> list:
    """A cache of the first `prompt` tokens of `text`, after so many replies were read and taken back."""
    cache = new_cache(loaded)
    read(loaded.model, cache, text[:, :prompt])
    length = replies.shape[1] // 2
    for turn in range(times):
        start = turn * 7 % length  # another reply each time
        read(loaded.model, cache, replies[:, start : start + length])
        kept = cut_back(cache, prompt + length, prompt)
        cache = cache if kept else new_cache(loaded)
        if kept < prompt:
            read(loaded.model, cache, text[:, kept:prompt])
    return cache


def row(name: str, loaded, data: mx.array, args, base: mx.array) -> dict:
    """KL in nats, mean and standard error over the places, by how often a reply was taken back."""
    end = args.prompt + GOES_ON
    text, replies = data[:, :end], data[:, end:]
    out = {}
    for times in args.times:
        cache = taken_back(loaded, text, args.prompt, replies, times)
        found = divergence(base, scores(loaded.model, cache, text[:, args.prompt :]))
        each = np.array(found.mean(1), np.float64)
        out[str(times)] = (float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5))
    return {"preset": name, "kl": out}


def main(arguments: list[str] | None = None) -> None:
    parser, start = Parser("taking_back", __doc__), time.perf_counter()
    add = parser.add_argument
    add("--model", default="tiny-qwen", help="a model with a calibration of its own")
    add("--presets", type=words, default=tuple(PRESETS), help="by commas; default: all")
    add("--times", default="0,1,10,100", help="replies taken back, by commas")
    add("--prompt", type=int, default=470, help="tokens of each prompt")
    add("--reply", type=int, default=200, help="tokens of each reply")
    add("--places", type=int, default=5, help="prompts")
    add("--out", type=Path, help="write the document here")
    args = parser.parse_args(arguments)
    check_out(args.out)
    args.times = numbers(args.times, "--times")
    at_least("--places", args.places, 2)
    at_least("--prompt", args.prompt, 1)
    at_least("--reply", args.reply, 1)
    plain = load(args.model, "fp16")
    data = places(plain.tokenizer, args.places, args.prompt + GOES_ON + 2 * args.reply)
    cache = new_cache(plain)
    read(plain.model, cache, data[:, : args.prompt])
    base = scores(plain.model, cache, data[:, args.prompt : args.prompt + GOES_ON])
    rows = []
    with console.counted("presets", len(args.presets)) as done:
        for name in args.presets:
            rows.append(row(name, load(args.model, name), data, args, base))
            done()
    shown = [
        [r["preset"], *(f"{r['kl'][str(n)][0]:.2g} ± {r['kl'][str(n)][1]:.1g}" for n in args.times)]
        for r in rows
    ]
    columns = ["preset", *("fresh" if not n else f"{n} taken back" for n in args.times)]
    console.print_table(columns, shown, f"KL in nats, {args.model}, {args.places} places")
    asked = {"prompt": args.prompt, "reply": args.reply, "places": args.places}
    write({"model": args.model, **asked, "rows": rows, **made_on(start)}, args.out)


if __name__ == "__main__":
    console.run_tool(main)
