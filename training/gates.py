"""Test the gates that a trained model must pass; the last line printed is JSON.

python training/gates.py mlxkv/models/embedded/tiny              # on a GPU, a minute
python training/gates.py mlxkv/models/embedded/tiny --questions 16 --only chat single-1K
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path
from random import Random

import export
import torch
from evaluate import EXACT, Asker, Scheme, forward, peaks
from mlxkv.models.catalog.weights.plant import plant
from model import Model
from tokenizers import Tokenizer

from mlxkv.texts.worlds import chat_questions, haystack, stories

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
NAIVE4 = Scheme("naive-int4", bits=4)
HADAMARD4 = Scheme("hadamard-int4", bits=4, group=64, hadamard=True)
HADAMARD4S = Scheme("hadamard-int4 symmetric g32", bits=4, group=32, hadamard=True, symmetric=True)
NAIVE2 = Scheme("naive-int2", bits=2)
HADAMARD2 = Scheme("hadamard-int2 g32", bits=2, group=32, hadamard=True)
SCHEMES = (EXACT, NAIVE4, HADAMARD4, HADAMARD4S, NAIVE2, HADAMARD2)
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


def key_statistics(model: Model, asker: Asker) -> dict:
    """Measure how unequal the channels of K are, in the layers whose cache is compressed."""
    text = " ".join(islice(stories(Random("key-statistics")), 40))
    ids = torch.tensor([asker.ids(text)[:2048]], device=asker.device)
    ratio, kurtosis = [], []
    for block, (k, _) in zip(model.model.layers, forward(model, ids)[1], strict=True):
        if block.self_attn.window is None:
            top = k.abs().amax(dim=2)[0]  # [G, D]
            ratio.append((top.amax(-1) / top.median(-1).values).mean().item())
            z = (k - k.mean()) / k.std()
            kurtosis.append((z**4).mean().item() - 3)
    return {
        "channel_max_over_median": round(sum(ratio) / len(ratio), 1),
        "excess_kurtosis": round(sum(kurtosis) / len(kurtosis), 1),
    }


def hard_form(folder: Path, device: str) -> Model:
    """Return the model with planted outliers."""
    model = export.read(folder, device)
    config = json.loads((folder / "config.json").read_text())
    model.load_state_dict(plant(model.state_dict(), config))
    return model


def sensitivity(asker: Asker, questions: int) -> dict:
    """Measure retrieval at 4K and the loss on stories under each scheme."""
    texts = [" ".join(islice(stories(Random(f"loss-{n}")), 60)) for n in range(4)]
    return {
        scheme.name: {
            "single": cell(asker, "single", 4, questions, scheme)["values"],
            "multi4": cell(asker, "multi4", 4, questions, scheme)["values"],
            "loss": round(asker.loss(texts, scheme), 4),
        }
        for scheme in SCHEMES
    }


def verdicts(report: dict) -> dict[str, bool]:
    """Return each gate and whether it passes."""
    out = {}
    for kind, thousands, least in CELLS:
        name = f"{kind}-{thousands}K"
        if least is not None and name in report["cells"]:
            out[f"{name} >= {least:.0%}"] = report["cells"][name]["values"] >= least
    if "chat" in report["cells"]:
        out[f"chat >= {CHAT_GATE:.0%}"] = report["cells"]["chat"]["values"] >= CHAT_GATE
    if hard := report.get("hard"):
        exact = hard[EXACT.name]["single"]
        out["hard: naive int2 loses 50 points"] = exact - hard[NAIVE2.name]["single"] >= 0.5
        for scheme in (HADAMARD4, HADAMARD4S):
            out[f"hard: {scheme.name} within 2 points"] = (
                exact - hard[scheme.name]["single"] <= 0.02
            )
        worse = hard[HADAMARD4.name]["single"] - hard[NAIVE4.name]["single"]
        worse4 = hard[HADAMARD4.name]["multi4"] - hard[NAIVE4.name]["multi4"]
        out["hard: naive int4 visibly worse"] = max(worse, worse4) >= 0.05
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
    if not only or "hard" in only:
        forms = {"plain": asker}
        if not model.config.latent:  # plants scale pairs of keys, which latents are not
            forms["hard"] = Asker(hard_form(folder, device), asker.tokenizer)
            report["keys"] = {name: key_statistics(x.model, x) for name, x in forms.items()}
        for name, each in forms.items():
            report[name] = sensitivity(each, questions)
            for scheme, result in report[name].items():
                print(f"{name:6} {scheme:30} {result}", flush=True)
        text, last = " ".join(islice(stories(Random("peaks")), 60)), list(forms.values())[-1]
        report["peak_activation"] = round(peaks(last.model, lambda: last.loss([text], EXACT)), 1)
    report["gates"] = verdicts(report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=256, help="a cell")
    parser.add_argument("--only", nargs="*", help="cells, e.g. chat single-4K hard")
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
