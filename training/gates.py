"""Test the gates that a trained model must pass; the last line printed is JSON.

python training/gates.py tests/data/tiny              # on a GPU, a minute
python training/gates.py tests/data/tiny --questions 16 --only chat single-1K
"""

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random

import export
import torch
from evaluate import EXACT, Asker, Scheme
from tokenizers import Tokenizer

from mlxkv.texts.worlds import chat_questions, haystack

# (kind, thousands of tokens, least share of right values, or None where it is only reported)
CELLS = (
    ("single", 1, 0.99),
    ("single", 4, 0.98),
    ("single", 8, 0.96),
    ("multi2", 4, None),
    ("multi4", 4, 0.92),
    ("multi4", 8, 0.88),
    ("unseen", 4, 0.90),
    ("unseen", 8, None),
    ("values", 4, None),
    ("mixed", 4, None),
    ("mixed", 8, None),
)
CHAT_GATE = 0.90
PER_STACK = 16


def cell(asker: Asker, kind: str, thousands: int, questions: int, scheme: Scheme = EXACT) -> dict:
    """Return the shares of right values and of questions with every value right."""
    values: list[bool] = []
    every: list[bool] = []
    for n in range(max(1, questions // PER_STACK)):
        rng = Random(f"gate-{kind}-{thousands}-{n}")
        length = thousands * 1024 - 200  # question and answer fit as well
        facts = max(PER_STACK * (3 if kind == "values" else 1), length // 100)
        stack = haystack(kind, rng, length, PER_STACK, facts, measure=asker.measure)
        past = asker.read(stack.text, scheme)
        for right in asker.score(past, stack.needles, scheme):
            values += right
            every.append(all(right))
    return {
        "questions": len(every),
        "values": round(sum(values) / len(values), 4),
        "every": round(sum(every) / len(every), 4),
    }


def chat_cell(asker: Asker, show: bool = False) -> dict:
    """Return the exact match of greedy answers to the held-out chat questions."""
    right = 0
    for messages, answer in (asked := chat_questions("test")):
        reply = asker.reply(messages)
        right += reply == answer
        if reply != answer and show:
            print(
                f"  asked {messages[-1]['content'][-90:]!r}\n  wanted {answer!r}\n  got {reply!r}"
            )
    return {"questions": len(asked), "values": right / len(asked), "every": right / len(asked)}


def verdicts(report: dict) -> dict[str, bool]:
    """Return each gate and whether it passes."""
    out = {}
    for kind, thousands, least in CELLS:
        name = f"{kind}-{thousands}K"
        if least is not None and name in report["cells"]:
            out[f"{name} >= {least:.0%}"] = report["cells"][name]["values"] >= least
    if "chat" in report["cells"]:
        out[f"chat >= {CHAT_GATE:.0%}"] = report["cells"]["chat"]["values"] >= CHAT_GATE
    return out


def run(folder: Path, questions: int, only: list[str] | None, show: bool) -> dict:
    """Test all gates of one model folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = export.read(folder, device)
    asker = Asker(model, Tokenizer.from_file(str(folder / "tokenizer.json")))
    report: dict = {"model": folder.name, "cells": {}}

    def note(name: str, result: dict) -> None:
        report["cells"][name] = result
        print(f"{name:12} {result}", flush=True)

    if not only or "chat" in only:
        note("chat", chat_cell(asker, show))
    for kind, thousands, _ in CELLS:
        name = f"{kind}-{thousands}K"
        if not only or name in only:
            note(name, cell(asker, kind, thousands, questions))
    report["gates"] = verdicts(report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=256, help="a cell")
    parser.add_argument("--only", nargs="*", help="cells, e.g. chat single-4K")
    parser.add_argument("--show", action="store_true", help="print the chat answers that are wrong")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    start = time.time()
    report = run(args.folder, args.questions, args.only, args.show)
    for gate, passed in report["gates"].items():
        print(f"{'pass' if passed else 'FAIL'}  {gate}")
    report["seconds"] = round(time.time() - start, 1)
    print(json.dumps(report))
    sys.exit(0 if all(report["gates"].values()) else 1)


if __name__ == "__main__":
    main()
