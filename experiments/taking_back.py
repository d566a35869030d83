"""Measure what tokens that are taken back cost: `python -m experiments.taking_back`.

A cut inside a sealed page decodes the tokens of that page which stay, and they are encoded a second time later. Each
column is a cache that holds the same prompt, by other ways; its divergence from full precision over the text behind
it stands there. Several prompts run as one batch, one from each place of the text. By the torch track, whose caches
follow the same rule: a CPU runs a whole model there.
"""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path
from random import Random

import torch

from cuda_track.calibrate import calibrate
from cuda_track.models.handing import handed
from cuda_track.models.layers import CompressedCache
from cuda_track.models.loader import load
from cuda_track.models.seam import attach, new_cache
from experiments.options import Parser, at_least, check_out, made_on, words, write
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.texts.corpus import interleaved

CHUNK = 512  # tokens of a prompt at once
GOES_ON = 100  # tokens of the text behind the prompt that are scored
STEP = 8  # of these at once, which caches take as decode steps
PRESETS = ("int4", "int3", "int2", "fill-2.25", "naive-int4")


def texts(tokenizer, kind: str) -> list[int]:
    return tokenizer("\n\n".join(interleaved(kind)), add_special_tokens=False)["input_ids"]


@torch.no_grad()
def read(model, cache, tokens: torch.Tensor) -> None:
    for part in tokens.split(CHUNK, 1):
        model(part, logits_to_keep=1, **handed(cache))


@torch.no_grad()
def scores(model, cache, tokens: torch.Tensor) -> torch.Tensor:
    """Log probabilities [B, T, V] float32 after each token, read a few at a time."""
    parts = [model(part, **handed(cache)).logits.float() for part in tokens.split(STEP, 1)]
    return torch.cat(parts, 1).log_softmax(-1)


class Ways:
    """Caches of `prompts` [B, T]. replies: other tokens, [B, L]. last: how many of the last tokens cuts end in."""

    def __init__(self, model, prompts: torch.Tensor, replies: torch.Tensor, last: int):
        self.model, self.prompts, self.replies, self.last = model, prompts, replies, last
        self.length = prompts.shape[1]
        layers = new_cache(model).layers
        self.config = next(one.cache.config for one in layers if hasattr(one, "cache"))
        self._fresh = new_cache(model)
        read(model, self._fresh, prompts)

    def fresh(self) -> CompressedCache:
        return deepcopy(self._fresh)

    def answered(self, again: int = 0) -> CompressedCache:
        """A reply is read and taken back, to the last tokens of the prompt, of which `again` are read once more."""
        cache, left = self.fresh(), self.length - again
        read(self.model, cache, self.replies)
        assert cache.cut_back(left)
        if again:
            read(self.model, cache, self.prompts[:, left:])
        return cache

    def cut(self, times: int) -> CompressedCache:
        """The prompt is cut inside a sealed page and read on until what was decoded is sealed again, so many times."""
        cache, dice, c = self.fresh(), Random(8), self.config
        places = range(self.length - self.last, self.length - c.recent - c.page - 1)
        inside = [left for left in places if (left - c.sink) % c.page]
        for _ in range(times):
            left = dice.choice(inside)
            assert cache.cut_back(left)
            read(self.model, cache, self.prompts[:, left:])
        return cache


def row(name: str, model, data: torch.Tensor, args, base: torch.Tensor) -> dict:
    """KL in nats, mean and standard error over the places, by the way of the cache."""
    end = args.prompt + GOES_ON
    ways = Ways(model, data[:, : args.prompt], data[:, end:], args.last)
    behind, recent, out = data[:, args.prompt : end], ways.config.recent, {}
    for column, make in {
        "fresh": ways.fresh,
        "a reply taken back": ways.answered,
        "a reply taken back, `recent` tokens read again": lambda: ways.answered(recent),
        "1 cut": lambda: ways.cut(1),
        f"{args.cuts} cuts": lambda: ways.cut(args.cuts),
    }.items():
        divergence = (base.exp() * (base - scores(model, make(), behind))).sum(-1)
        each = divergence.mean(1).double().numpy()
        out[column] = (float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5))
    return {"preset": name, "kl": out}


def main(arguments: list[str] | None = None) -> None:
    parser, start = Parser("taking_back", __doc__), time.perf_counter()
    add = parser.add_argument
    add("--model", help="a model without sliding windows")
    add("--presets", type=words, default=PRESETS, help=f"by commas; default: {','.join(PRESETS)}")
    add("--cuts", type=int, default=20, help="cuts of the last column")
    add("--prompt", type=int, default=600, help="tokens of each prompt")
    add("--last", type=int, default=300, help="tokens at its end that cuts end in")
    add("--reply", type=int, default=200, help="tokens of each reply")
    add("--places", type=int, default=3, help="prompts")
    add("--tokens", type=int, default=4096, help="tokens of the calibration")
    add("--out", type=Path, help="write the document here")
    add("--show", type=Path, nargs="+", help="only print the table of these documents, in Markdown")
    args = parser.parse_args(arguments)
    if args.show:
        print(markdown([row for file in args.show for row in json.loads(file.read_text())["rows"]]))
        return
    if args.model is None:
        raise UserError("[--model] is needed; name a model without sliding windows")
    check_out(args.out)
    at_least("--places", args.places, 2)
    at_least("--prompt", args.prompt, args.last)
    at_least("--reply", args.reply, 1)
    loaded = load(args.model, "fp16", "float32")
    model, length = loaded.model, args.prompt + GOES_ON + args.reply
    made = calibrate(loaded, texts(loaded.tokenizer, "calibration")[: args.tokens])
    data = torch.tensor(texts(loaded.tokenizer, "evaluation")[: args.places * length])
    data, cache = data.view(args.places, length), new_cache(model)
    read(model, cache, data[:, : args.prompt])
    base = scores(model, cache, data[:, args.prompt : args.prompt + GOES_ON])
    names = ("prompt", "last", "reply", "places", "cuts", "tokens")
    rows: list[dict] = []
    with console.counted("presets", len(args.presets)) as done:
        for name in args.presets:
            attach(model, name, made)
            rows.append(row(name, model, data, args, base))
            asked = {name: getattr(args, name) for name in names}
            document = {"model": Path(args.model).name, **asked, "rows": rows, **made_on(start)}
            if args.out is not None:  # a run that is cut off keeps what it has
                write(document, args.out)
            done()
    columns, cells = table(rows)
    console.print_table(columns, cells, f"KL in nats, {args.model}, {args.places} places")
    if args.out is None:
        write(document, None)


def table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells."""
    columns = list(rows[0]["kl"])
    cells = [[r["preset"], *("{:.2g} ± {:.1g}".format(*r["kl"][n]) for n in columns)] for r in rows]
    return ["preset", *columns], cells


def markdown(rows: list[dict]) -> str:
    """The table."""
    columns, cells = table(rows)
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    console.run_tool(main)
