"""Measure what a reply that is taken back costs: `python -m experiments.taking_back`.

A prompt is read, then a reply is read and taken back, so many times, as `regenerate` and edited messages
do: the cache is cut back (`mlxkv.models.cut_back`) and what it lost is read again. Then the text goes on,
and its divergence from full precision stands beside the divergence of a cache that read only the prompt.
Several prompts run as one batch, one from each place of the text.
"""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path

import mlx.core as mx
import numpy as np

from experiments.fixtures import QWEN
from experiments.options import Parser, at_least, check_out, made_on, numbers, words, write
from mlxkv import console
from mlxkv.eval.tasks.exact import divergence
from mlxkv.formats.presets import PRESETS
from mlxkv.models import cut_back, load
from mlxkv.models.generate import new_cache
from mlxkv.texts.corpus import interleaved

CHUNK = 512  # tokens of a prompt at once
SHORT = 128  # tokens: about what is read again after a cut
CHUNKED = f"in chunks of {SHORT}"
GOES_ON = 40  # tokens of the text behind the prompt that are scored, one by one


def places(tokenizer, count: int, length: int) -> mx.array:
    """[count, length] tokens, from places of the text that do not overlap."""
    tokens = tokenizer.encode("\n\n".join(interleaved("evaluation")))[: count * length]
    return mx.array(tokens).reshape(count, length)


def read(model, cache: list, tokens: mx.array, chunk: int = CHUNK) -> None:
    for start in range(0, tokens.shape[1], chunk):
        model(tokens[:, start : start + chunk], cache=cache)
        mx.eval([layer.state for layer in cache])


def scores(model, cache: list, tokens: mx.array) -> mx.array:
    """Logits [B, T, V] float32 after each token, read one by one as a reply is written."""
    out = []
    for i in range(tokens.shape[1]):
        out.append(model(tokens[:, i : i + 1], cache=cache).astype(mx.float32))
        mx.eval(out[-1])
    return mx.concatenate(out, axis=1)


class Talk:
    """A cache of prompts, and replies that are read and taken back."""

    def __init__(self, loaded, prompts: mx.array, replies: mx.array):
        self.loaded, self.prompts, self.replies = loaded, prompts, replies
        self.cache, self.turns, self.kept = new_cache(loaded), 0, 0
        read(loaded.model, self.cache, prompts)

    def turn(self) -> None:
        held, length = self.prompts.shape[1], self.replies.shape[1] // 2
        start = self.turns * 7 % length  # another reply each time
        read(self.loaded.model, self.cache, self.replies[:, start : start + length])
        self.kept = cut_back(self.cache, held + length, held)
        if not self.kept:
            self.cache = new_cache(self.loaded)
        read(self.loaded.model, self.cache, self.prompts[:, self.kept :])
        self.turns += 1


def row(name: str, loaded, data: mx.array, args, base: mx.array) -> dict:
    """KL in nats, mean and standard error over the places: of a fresh cache, of one that read the prompt in
    short chunks, whose first tokens see codes close behind them, and by how often a reply was taken back."""
    end = args.prompt + GOES_ON
    prompts, behind = data[:, : args.prompt], data[:, args.prompt : end]
    talk, out = Talk(loaded, prompts, data[:, end:]), {}

    def score(column: str, cache: list) -> None:
        found = divergence(base, scores(loaded.model, deepcopy(cache), behind))
        each = np.array(found.mean(1), np.float64)
        out[column] = (float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5))

    for times in args.times:
        while talk.turns < times:
            talk.turn()
        score(str(times), talk.cache)
    cache = new_cache(loaded)
    read(loaded.model, cache, prompts, SHORT)
    score(CHUNKED, cache)
    return {"preset": name, "kl": out}


def main(arguments: list[str] | None = None) -> None:
    parser, start = Parser("taking_back", __doc__), time.perf_counter()
    add = parser.add_argument
    add("--model", default=QWEN, help="a model with a calibration of its own")
    add("--presets", type=words, default=tuple(PRESETS), help="by commas; default: all")
    add("--times", default="0,1,10,100", help="replies taken back, by commas")
    add("--prompt", type=int, default=470, help="tokens of each prompt")
    add("--reply", type=int, default=200, help="tokens of each reply")
    add("--places", type=int, default=5, help="prompts")
    add("--out", type=Path, help="write the document here")
    add("--show", type=Path, nargs="+", help="only print the table of these documents, in Markdown")
    args = parser.parse_args(arguments)
    if args.show:
        print(markdown([row for file in args.show for row in json.loads(file.read_text())["rows"]]))
        return
    check_out(args.out)
    args.times = sorted(numbers(args.times, "--times"))
    at_least("--places", args.places, 2)
    at_least("--prompt", args.prompt, 1)
    at_least("--reply", args.reply, 1)
    plain = load(args.model, "fp16")
    data = places(plain.tokenizer, args.places, args.prompt + GOES_ON + 2 * args.reply)
    cache = new_cache(plain)
    read(plain.model, cache, data[:, : args.prompt])
    base = scores(plain.model, cache, data[:, args.prompt : args.prompt + GOES_ON])
    asked = {"prompt": args.prompt, "reply": args.reply, "places": args.places}
    rows: list[dict] = []
    with console.counted("presets", len(args.presets)) as done:
        for name in args.presets:
            rows.append(row(name, load(args.model, name), data, args, base))
            document = {"model": args.model, **asked, "rows": rows, **made_on(start)}
            if args.out is not None:  # a run that is cut off keeps what it has
                write(document, args.out)
            done()
    show(rows, args)
    if args.out is None:
        write(document, None)


def show(rows: list[dict], args) -> None:
    columns, shown = table(rows)
    console.print_table(columns, shown, f"KL in nats, {args.model}, {args.places} places")


def table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: fresh caches first, then by how often a reply was taken back."""
    taken = sorted((n for n in rows[0]["kl"] if n.isdigit() and n != "0"), key=int)
    names = {"0": "fresh", CHUNKED: f"fresh, {CHUNKED}"} | {n: f"{n} taken back" for n in taken}
    columns = [n for n in names if n in rows[0]["kl"]]
    cells = [[r["preset"], *("{:.2g} ± {:.1g}".format(*r["kl"][n]) for n in columns)] for r in rows]
    return ["preset", *(names[n] for n in columns)], cells


def markdown(rows: list[dict]) -> str:
    """The table, presets in their order."""
    order = list(PRESETS)
    columns, cells = table(sorted(rows, key=lambda r: order.index(r["preset"])))
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    console.run_tool(main)
