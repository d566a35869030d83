"""Calibrate on one kind of text and judge on another: the loss of a calibration on text of another
kind, beside a rotation that needs no calibration."""

from __future__ import annotations

import numpy as np

from experiments.ablation.asked import Asked
from experiments.ablation.parts import judged, numbers, title
from experiments.ablation.recipes import RECIPES, Kitchen, Recipe
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence
from mlxkv.eval.tasks.part import Progress, Results
from mlxkv.models import load
from mlxkv.models.catalog.shapes import text_config
from mlxkv.texts import corpus
from mlxkv.texts.sources import Text, documentation, story_tokens

# The texts to judge on. For each there is a calibration text of the same kind.
JUDGED = ("stories", "corpus")
# The texts to calibrate on. The kinds of the corpus are short (2600 to 5400 tokens).
DOMAINS = (*JUDGED, *(f"corpus {kind}" for kind in corpus.KINDS), "python help", "random tokens")
USUAL = (*JUDGED, "corpus prose", "corpus code", "python help", "random tokens")
FREE = "hadamard"  # the rotation that needs no text


def names(asked: Asked) -> list[str]:
    domains = asked.chosen(DOMAINS, "--only") if asked.only else list(USUAL)
    return [f"{d}, {label}" for label in asked.configs() for d in (*domains, FREE)]


def steps(asked: Asked) -> int:
    return len(JUDGED) * (asked.context + asked.decode)


def recipe_of(asked: Asked, domain: str) -> Recipe:
    return RECIPES[FREE if domain == FREE else asked.recipe]


def calibration(loaded, domain: str, count: int) -> Text:
    """Return at most `count` tokens of a domain that no evaluation reads, without BOS."""
    if domain == "stories":
        return Text(domain, story_tokens(loaded, count, seed="calibration"))
    if domain == "random tokens":
        vocabulary = int(text_config(loaded.config)["vocab_size"])
        drawn = np.random.default_rng(0).integers(0, vocabulary, count)
        return Text(domain, drawn.tolist())
    if domain == "python help":
        pieces = documentation("calibration")
    elif domain == "corpus":
        pieces = corpus.interleaved("calibration")
    else:
        pieces = corpus.pieces("calibration")[domain.removeprefix("corpus ")]
    return Text(domain, _taken(loaded, pieces, count))


def judged_on(loaded, domain: str, count: int) -> list[int]:
    """Return `count` tokens to judge on. Raises UserError if the corpus has fewer."""
    if domain == "stories":
        return story_tokens(loaded, count)
    tokens = _taken(loaded, corpus.interleaved("evaluation"), count)
    if len(tokens) < count:
        raise UserError(
            f"[--context] longer than the corpus, with --decode; got {count} tokens; choose at "
            f"most {len(tokens)} in all"
        )
    return tokens


def _taken(loaded, pieces: list[str], count: int) -> list[int]:
    tokens: list[int] = []
    for piece in pieces:
        if len(tokens) >= count:
            break
        tokens += loaded.tokenizer.encode(piece + "\n\n", add_special_tokens=False)
    return tokens[:count]


def measure(asked: Asked, names: list[str], progress: Progress) -> Results:
    """Return per arm {"tokens": calibrated on, TEXT: numbers as in `parts`}."""
    loaded = load(asked.model, "fp16")
    texts = {d: judged_on(loaded, d, asked.context + asked.decode + 1) for d in JUDGED}
    configs, calibrations, made = {}, {}, {}
    for name in names:
        domain, label = name.split(", ", 1)
        if domain not in made:
            text = Text("", []) if domain == FREE else calibration(loaded, domain, asked.tokens)
            made[domain] = Kitchen(loaded, text).make(recipe_of(asked, domain))
        configs[name] = recipe_of(asked, domain).applied(asked.configs()[label])
        calibrations[name] = made[domain]
    arms = Arms(loaded, configs, calibrations=calibrations)
    rows: Results = {name: {"tokens": calibrations[name].tokens} for name in names}
    for domain, tokens in texts.items():
        for name, one in divergence.measure(arms, names, tokens, asked.context, progress).items():
            rows[name][domain] = judged(one)
    return rows


def show(asked: Asked, rows: Results) -> None:
    """Print KL on each text, and its ratio to the text's own kind of calibration and to Hadamard."""
    columns = ["calibrated on", "tokens"]
    for domain in JUDGED:
        columns += [f"{domain}: KL mean", "KL 99 %", "to own", f"to {FREE}"]
    for label in asked.configs():
        mine = {n.split(", ")[0]: row for n, row in rows.items() if n.endswith(f", {label}")}
        cells = []
        for name, row in mine.items():
            line = [name, str(row["tokens"] or "-")]
            for domain in JUDGED:
                line += numbers(row[domain])[:2]
                line += [_times(_ratio(mine, domain, name, other)) for other in (domain, FREE)]
            cells.append(line)
        console.print_table(columns, cells, f"{title(asked)}, {label}")
        for domain in JUDGED:
            print(f"{domain}: {loss(mine, domain)}")


def loss(mine: Results, domain: str) -> str:
    """Return a line on the loss of a text by calibrations of other kinds, and by none. mine: rows by
    calibration text."""
    others = {
        name: ratio
        for name in mine
        if name not in (domain, FREE) and (ratio := _ratio(mine, domain, name, domain))
    }
    if not others:
        return "no calibration of its own kind, or of another, to compare with"
    best, worst = min(others, key=others.get), max(others, key=others.get)
    return (
        f"mean KL of other calibrations is {_times(others[best])} ({best}) to "
        f"{_times(others[worst])} ({worst}) that of its own kind, of {FREE} "
        f"{_times(_ratio(mine, domain, FREE, domain))}"
    )


def _ratio(mine: Results, domain: str, name: str, other: str) -> float | None:
    """Return the ratio of mean KL of two calibrations on one text."""
    if name not in mine or other not in mine or not mine[other][domain]["kl_mean"]:
        return None
    return mine[name][domain]["kl_mean"] / mine[other][domain]["kl_mean"]


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f} x" if ratio >= 0.1 else f"{ratio:.1g} x"
