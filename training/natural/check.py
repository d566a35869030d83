"""Judge a trained model in under a minute: needles at 1K to 8K, and the loss on held-out text by kind.

python -m natural.check HUB_FOLDER HELD_PARENT [--questions 64]    # the last line is JSON
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from random import Random

import export
import torch
from evaluate import EXACT, Asker
from gates import PER_STACK, cell
from tokenizers import Tokenizer

from mlxkv.texts.worlds import Needle, stories
from mlxkv.texts.worlds.facts import CODE, ask, four_digits, new_facts
from mlxkv.texts.worlds.needles import scatter
from natural.data import held_texts, pieces_of
from natural.observe import kind_of

SPLIT = "selection"
TOKENS = 8192


def loss_by_kind(asker: Asker, texts: dict[str, str]) -> dict[str, float]:
    """Return the mean loss a token on the first 8192 tokens of the texts, by kind."""
    kinds: dict[str, list[str]] = {}
    for name, text in texts.items():
        kinds.setdefault(kind_of(name), []).append(text[: 6 * TOKENS])
    out = {kind: round(asker.loss(some[:4], EXACT), 4) for kind, some in kinds.items()}
    story = [" ".join(islice(stories(Random(f"loss-{n}")), 60)) for n in range(2)]
    return out | {"worlds": round(asker.loss(story, EXACT), 4)}


def hidden(asker: Asker, texts: dict[str, str], thousands: int, questions: int) -> dict:
    """Return the share of right codes, of facts hidden in the held-out texts, a text after another."""
    right: list[bool] = []
    for n, text in zip(range(max(1, questions // PER_STACK)), cycle(texts.values()), strict=False):
        rng = Random(f"check-hidden-{thousands}-{n}")
        facts = new_facts(rng, replace(CODE, value=four_digits), PER_STACK)
        room = thousands * 1024 - 200 - 20 * len(facts)
        start = text.find("\n", rng.randrange(max(1, len(text) - 8 * room))) + 1
        ids = asker.ids(text[start : start + 8 * room])[:room]
        pieces, places = scatter(rng, pieces_of(asker.tokenizer.decode(ids)), facts)
        for at in places:
            pieces[at] = f" {pieces[at]} "
        past = asker.read("".join(pieces).strip(), EXACT)
        needles = tuple(
            Needle(*ask(rng, fact, "test"), (fact.value,), at / len(pieces), "hidden")
            for fact, at in zip(facts, places, strict=True)
        )
        right += [value for values in asker.score(past, needles, EXACT) for value in values]
    return {"questions": len(right), "values": round(sum(right) / len(right), 4)}


def check(folder: Path, held: Path, questions: int, lengths: tuple[int, ...] = (1, 4, 8)) -> dict:
    """Return shares of right values of single keys by length, and losses."""
    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asker = Asker(export.read(folder, device), Tokenizer.from_file(str(folder / "tokenizer.json")))
    report: dict = {"model": str(folder), "cells": {}}
    for kind, thousands in [("single", n) for n in lengths] + [("multi4", lengths[-1])]:
        name = f"{kind}-{thousands}K"
        report["cells"][name] = cell(asker, kind, thousands, max(PER_STACK, questions))
        print(f"{name:12} {report['cells'][name]}", flush=True)
    texts = held_texts(held, SPLIT)
    for thousands in dict.fromkeys((lengths[0], lengths[-1])):
        name = f"in-text-{thousands}K"
        report["cells"][name] = hidden(asker, texts, thousands, questions)
        print(f"{name:12} {report['cells'][name]}", flush=True)
    report["loss"] = loss_by_kind(asker, texts)
    print(f"loss {report['loss']}", flush=True)
    report["seconds"] = round(time.monotonic() - start, 1)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("held", type=Path, help="folder with held/selection/*.txt")
    parser.add_argument("--questions", type=int, default=64, help="a cell")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    print(json.dumps(check(args.folder, args.held, args.questions)))


if __name__ == "__main__":
    main()
