"""The OSCAR paper's ablation: leave one thing at a time out of the rotations, with the same codes,
clips and windows. Arms are judged by decoding after a context and by retrieval from it."""

from __future__ import annotations

from experiments.ablation.asked import Asked
from experiments.ablation.recipes import RECIPES, Kitchen
from experiments.fixtures import QWEN, TINY
from mlxkv import console
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import divergence, retrieval
from mlxkv.eval.tasks.part import Progress, Results, TaskOptions
from mlxkv.models import load
from mlxkv.texts.sources import calibration_tokens, evaluation_tokens

KINDS = {"single": "single", "multi-query": "four"}  # of retrieval: one key, four keys
COLUMNS = ("KL mean", "KL 99 %", "perplexity", "same top", "prompt KL")
ASKED = ("one key", "log p", "four keys", "log p")


def names(asked: Asked) -> list[str]:
    """Return the arms, "RECIPE, LABEL of the codes", full precision first."""
    recipes = asked.chosen(list(RECIPES), "--only")
    return [BASELINE, *(f"{r}, {label}" for label in asked.configs() for r in recipes)]


def steps(asked: Asked) -> int:
    """Return the sum of progress of one arm."""
    return asked.context + asked.decode + len(KINDS) * asked.questions


def arms_of(asked: Asked, names: list[str]) -> Arms:
    """Load the model, calibrate each recipe and return the arms."""
    loaded = load(asked.model, "fp16")
    kitchen = Kitchen(loaded, calibration_tokens(loaded, asked.tokens))
    configs, calibrations, made = {}, {}, {}
    for name in names:
        if name == BASELINE:
            continue
        recipe, label = name.split(", ", 1)
        if recipe not in made:
            made[recipe] = kitchen.make(RECIPES[recipe])
        configs[name] = RECIPES[recipe].applied(asked.configs()[label])
        calibrations[name] = made[recipe]
    return Arms(loaded, configs, calibrations=calibrations)


def measure(asked: Asked, names: list[str], progress: Progress) -> Results:
    """Return a row of numbers per arm. prompt: of the second half of the context, as it is read."""
    return judge(asked, arms_of(asked, names), names, progress)


def judge(asked: Asked, arms: Arms, names: list[str], progress: Progress) -> Results:
    """Return the same as `measure` for arms that exist."""
    text = evaluation_tokens(arms.loaded, asked.context + asked.decode + 1)
    found = divergence.measure(arms, names, text.tokens, asked.context, progress)
    rows = {name: judged(result) for name, result in found.items()}
    if asked.questions:
        needles = "worlds" if arms.loaded.name in (TINY, QWEN) else "plain"
        options = TaskOptions(
            (asked.context,),
            questions=asked.questions,
            needles=needles,
            kinds=tuple(KINDS),
            samples=1,  # document, as docs/results/oscar.md was measured
        )
        done = retrieval.parts(arms, options)
        raw = {f"{part.task}-{part.name}": part.run(arms, names, progress) for part in done}
        for by_name in retrieval.pooled(raw).values():
            for name, one in by_name.items():
                short = KINDS[one["kind"]]
                rows[name] |= {
                    f"{short}_right": one["values"],
                    f"{short}_every": one["every"],
                    f"{short}_log_p": one["likelihood"],
                }
    return rows


def judged(result: dict) -> dict:
    """Return what tables show of a result of `divergence.measure`, in nats and shares."""
    decode, prompt = result["legs"]["decode"], result["legs"]["prompt"]
    return {
        "kl_mean": decode["kl"]["mean"],
        "kl_error": decode["kl"]["error"],
        "kl_p99": decode["kl"]["p99"],
        "ppl": decode["ppl"],
        "ppl_base": decode["ppl_base"],
        "top1": decode["same_top"],
        "prompt_kl_mean": prompt["kl"]["mean"],
        "kv_bytes": result["kv_bytes"],
        "values": result["values"],
    }


def show(asked: Asked, rows: Results) -> None:
    asks = bool(asked.questions)
    columns = ("rotation", *COLUMNS, *(ASKED if asks else ()))
    for label in asked.configs():
        cells = []
        for name, row in rows.items():
            recipe, _, codes = name.partition(", ")
            if codes not in ("", label):
                continue
            cells.append([recipe, *of_row(row)])
        console.print_table(columns, cells, f"{title(asked)}, {label}")


def of_row(row: dict) -> list[str]:
    """Return the cells of COLUMNS, and of ASKED if retrieval was measured."""
    line = [*numbers(row), f"{row['top1']:.4f}", f"{row['prompt_kl_mean']:.7f}"]
    for short in KINDS.values():
        if f"{short}_right" in row:
            line += [f"{row[f'{short}_right']:.3f}", f"{row[f'{short}_log_p']:.4f}"]
    return line


def numbers(row: dict) -> list[str]:
    """Return the cells KL mean with its standard error, KL 99 % and perplexity."""
    mean = f"{row['kl_mean']:.6f} ± {row['kl_error']:.6f}"
    return [mean, f"{row['kl_p99']:.5f}", f"{row['ppl']:.4f}"]


def title(asked: Asked) -> str:
    return f"{asked.model}, {asked.decode} tokens after {asked.context}, 2 bits"
