"""`python -m experiments.latent_kl --model FOLDER --out FOLDER`: what compressed latents cost a trained model.

FOLDER is the model that `training/train.py tiny-mla` writes, or any other with MLA that was trained on the same small
worlds. KL divergence of the decode steps behind held-out stories, with intervals over texts, and retrieval behind as
many tokens, with intervals over documents, for latents of 8, 4 and 3 bits: what `mlxkv eval` measures, on texts that
the model knows. --out takes the texts, the results (a stopped run goes on from them), report.html and table.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

from experiments.options import Parser, at_least, made_on, words
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval import plan, workers
from mlxkv.eval.report import page, report
from mlxkv.eval.tasks.part import TaskOptions
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.models import load
from mlxkv.models.calibration import measure
from mlxkv.models.hooks.latent import modules_of
from mlxkv.texts.sources import BETWEEN, story_tokens
from mlxkv.texts.worlds import stories

PRESETS = ("int8", "int8+rope8", "int4", "int4+rope16", "hadamard-int4", "turbo-int4", "int3")
PRESETS += ("naive-int3", "hadamard-int3", "turbo-int3", "balanced-int3", "hadamard-int3+rope8")
TASKS = ("divergence", "retrieval")
KINDS = ("single", "multi-key", "multi-query", "multi-value")
CALIBRATED = 16384  # tokens of other stories, for calibrated presets
CHARACTERS = 8  # of a story a token, more than any tokenizer needs


def texts(folder: Path, count: int, tokens: int) -> tuple[Path, ...]:
    """Write `count` held-out texts of `tokens` tokens or more; the same ones on every call."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for n in range(count):
        text, source = "", stories(Random(f"latents-{n}"))
        while len(text) < CHARACTERS * tokens:
            text += next(source) + BETWEEN
        files.append(folder / f"stories-{n + 1}.txt")
        files[-1].write_text(text, encoding="utf-8")
    return tuple(files)


def calibrated(model: str, out: Path, dtype: str | None) -> str:
    """Make a calibration on stories that no text here has; the path of its file."""
    path = out / "calibration.safetensors"
    if not path.exists():
        loaded = load(model, "fp16", dtype=dtype)
        tokens = story_tokens(loaded, CALIBRATED, seed="calibration")
        window = min(measure.WINDOW, loaded.context or measure.WINDOW)
        made = measure.calibrate(loaded.model, tokens, text="stories", window=window)
        artifact.write(path, made)
    return str(path)


def table(data: dict) -> str:
    """The table of docs/results/latents.md from a report of `mlxkv eval`."""
    heads = ["preset", "bits per value", "bytes of 16 bits", "KL [95 %]", "same first, %"]
    kinds = [kind for kind in KINDS if kind in data["presets"]["fp16"].get("retrieval", {})]
    lines = [heads + [f"{kind}, % [95 %]" for kind in kinds]]
    for name, row in data["presets"].items():
        share = row["kv_bytes_in_use"] / data["presets"]["fp16"]["kv_bytes_in_use"]
        cells = [name, f"{row['bits_per_value']:.2f}", f"{share:.3f}"]
        cells += [_kl(row), f"{100 * row['top1']:.1f}"] if "kl_mean" in row else ["-", "-"]
        for kind in kinds:
            low, high = row["retrieval_interval"][kind]
            cells.append(f"{100 * row['retrieval'][kind]:.1f} [{100 * low:.0f}, {100 * high:.0f}]")
        lines.append(cells)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _kl(row: dict) -> str:
    low_high = row.get("kl_interval")
    return f"{row['kl_mean']:.2g}" + (
        "" if low_high is None else f" [{low_high[0]:.2g}, {low_high[1]:.2g}]"
    )


def measured(asked: SimpleNamespace) -> dict:
    """The report of an evaluation on `asked.model`: `report.assemble`, with "machine" and "versions"."""
    start, out = time.perf_counter(), asked.out
    options = TaskOptions(
        contexts=(asked.context,),
        decode=asked.decode,
        questions=asked.questions,
        texts=texts(out / "texts", asked.samples, asked.context + asked.decode + 1),
        needles="worlds",
        samples=asked.samples,
        kinds=asked.kinds,
    )
    needs = any(parse_kv(name).calibrated for name in asked.kv)
    spec = plan.Spec(
        model=asked.model,
        names=asked.kv,
        tasks=asked.tasks,
        options=options,
        dtype=asked.dtype,
        calibration=calibrated(asked.model, out, asked.dtype) if needs else None,
    )
    arms, parts = plan.make(spec)
    if not modules_of(arms.loaded.model):
        raise UserError(f"[latent_kl] no latents in this model; got {asked.model}")
    results = workers.compute(spec, arms, parts, out, asked.jobs)
    return report.assemble(arms, options, results, spec.windows) | made_on(start)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("latent_kl", __doc__)
    parser.add_argument("--model", required=True, help="folder of a trained model with MLA")
    parser.add_argument("--out", type=Path, required=True, help="folder of texts and results")
    parser.add_argument("--kv", type=words, default=PRESETS)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--decode", type=int, default=64, help="tokens read one by one")
    parser.add_argument("--samples", type=int, default=16, help="texts, and documents")
    parser.add_argument("--questions", type=int, default=64, help="of each kind")
    parser.add_argument("--kinds", type=words, default=KINDS)
    parser.add_argument("--tasks", type=words, default=TASKS, help="of " + ", ".join(TASKS))
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; the weights' own by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args(arguments)
    for name in ("decode", "samples", "questions", "jobs"):
        at_least(f"--{name}", getattr(asked, name), 1)
    at_least("--context", asked.context, 512)
    if unknown := set(asked.tasks) - set(TASKS):
        raise UserError(
            f"[--tasks] no such task here; got {unknown.pop()!r}; choose from {', '.join(TASKS)}"
        )
    asked.out.mkdir(parents=True, exist_ok=True)
    data = measured(asked)
    page.write(data, asked.out)
    report.show(data, False)
    (asked.out / "table.md").write_text(table(data), encoding="utf-8")
    console.say(table(data))


if __name__ == "__main__":
    console.run_tool(main)
