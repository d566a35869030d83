"""Turn the results of an evaluation into one tree of plain data; print it as tables, and write it to files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import exp
from pathlib import Path

from mlxkv import __version__, console
from mlxkv.errors import MachineError
from mlxkv.eval import divergence, intervals, plots, retrieval, verdict
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.engine import Part, Results, TaskOptions
from mlxkv.eval.intervals import Interval
from mlxkv.eval.questions import KINDS


def assemble(
    arms: Arms, options: TaskOptions, results: list[tuple[Part, Results]], windows: tuple | None
) -> dict:
    """Return everything in one tree. results: of each part, by arm.

    Stable keys: "model", "context" (the longest) and "presets", which holds the rows at that
    context: "bits_per_value", "ppl", "kl_mean", "kl_p99", "top1", "retrieval" {kind: share}. Intervals have keys such
    as "kl_interval" [low, high].
    """
    contexts = sorted(options.contexts)
    pooled = {k: v for context in contexts for k, v in _pooled(arms, results, context).items()}
    rows = {
        context: {name: _row(arms, pooled, name, context) for name in arms.names}
        for context in contexts
    }
    for by_name in rows.values():
        for row in by_name.values():
            full = row is by_name[BASELINE]
            row["verdict"], row["reason"] = (None, "") if full else verdict.judge(row)
    return {
        "mlxkv": __version__,
        "model": arms.loaded.name,
        "fingerprint": arms.loaded.fingerprint,
        "dtype": str(arms.loaded.dtype).split(".")[-1],
        "context": contexts[-1],
        "contexts": contexts,
        "windows": {name: [c.sink, c.recent, c.page] for name, c in arms.configs.items()},
        "windows_equal": windows is not None,
        "options": {
            "decode": options.decode,
            "questions": options.questions,
            "samples": options.samples,
            "text": [path.name for path in options.texts],
        },
        "presets": rows[contexts[-1]],
        "rows": {str(context): by_name for context, by_name in rows.items()},
        "parts": pooled,
    }


def _pooled(arms: Arms, results: list[tuple[Part, Results]], context: int) -> dict[str, Results]:
    """Return the results of all texts at a context as one, "divergence-2048", and those of all documents, by kind of
    question: "retrieval-single-2048"."""

    def of(task: str, name: str) -> list[dict]:
        return [x[name] for part, x in results if (part.task, part.context) == (task, context)]

    out = {}
    if of("divergence", BASELINE):
        out[f"divergence-{context}"] = {
            name: divergence.pooled(of("divergence", name)) for name in arms.names
        }
    documents = {name: of("retrieval", name) for name in arms.names}
    for kind in documents[BASELINE][0]["kinds"] if documents[BASELINE] else ():
        out[f"retrieval-{kind}-{context}"] = {
            name: retrieval.pooled(kind, context, found) for name, found in documents.items()
        }
    return out


def _row(arms: Arms, results: dict, name: str, context: int) -> dict:
    """Return the numbers of a preset at a context, without those that no task measured."""
    row = arms.bits(name, context)
    if part := results.get(f"divergence-{context}"):
        legs = part[name]["legs"]
        decode, prompt = legs["decode"], legs["prompt"]
        row |= {
            "ppl": decode["ppl"],
            "kl_mean": decode["kl"]["mean"],
            "kl_p99": decode["kl"]["p99"],
            "top1": decode["same_top"],
            "prompt_ppl": prompt["ppl"],
            "prompt_kl_mean": prompt["kl"]["mean"],
            "prompt_kl_p99": prompt["kl"]["p99"],
            "kv_bytes": part[name]["kv_bytes"],
            **_divergence_intervals(part[name]["texts"]),
        }
    parts = {
        kind: results[key] for kind in KINDS if (key := f"retrieval-{kind}-{context}") in results
    }
    if parts:
        ours = {kind: part[name] for kind, part in parts.items()}
        row["retrieval"] = {kind: part["values"] for kind, part in ours.items()}
        row["retrieval_likelihood"] = {kind: part["likelihood"] for kind, part in ours.items()}
        answers = {kind: part["documents"] for kind, part in ours.items()}
        row["retrieval_values"] = {kind: sum(map(len, of)) for kind, of in answers.items()}
        row["documents"] = len(next(iter(answers.values())))
        shares = {kind: intervals.found(of) for kind, of in answers.items()}
        row["retrieval_interval"] = {kind: share.as_list() for kind, share in shares.items()}
        if name != BASELINE:
            full = {kind: part[BASELINE]["documents"] for kind, part in parts.items()}
            gaps = {kind: intervals.lost(of, full[kind]) for kind, of in answers.items()}
            row["retrieval_lost"] = {kind: [x.value, x.low, x.high] for kind, x in gaps.items()}
    return row


def _divergence_intervals(texts: list[dict]) -> dict:
    """Return how many texts there are, and intervals of a pooled result of `divergence`: [low, high], or None
    with too few texts."""
    by_name = {name: [text[name] for text in texts] for name in texts[0] if name != "name"}
    ratio = intervals.share(by_name["ppl_log_ratio"])
    limits_of = {
        "kl": intervals.mean(by_name["kl"]),
        "prompt_kl": intervals.mean(by_name["prompt_kl"]),
        "top1": intervals.share(by_name["top1"]),
    }
    return {
        "texts": len(texts),
        **{f"{key}_interval": interval.as_list() for key, interval in limits_of.items()},
        "ppl_ratio": exp(ratio.value),
        "ppl_ratio_interval": [exp(limit) for limit in ratio.limits] if ratio.known else None,
    }


def _limits(ends: list[float] | None, form: str = ".2g", scale: float = 1.0) -> str:
    """Format an interval for a table: ' [1, 2]', or "" if unknown."""
    return "" if ends is None else f" [{', '.join(format(scale * x, form) for x in ends)}]"


def brief(data: dict) -> dict:
    """Return what `--json` prints: all but the parts, which are in `report.json`."""
    return {key: value for key, value in data.items() if key != "parts"}


def table(data: dict, context: int) -> tuple[list[str], list[list[str]]]:
    """Return column names, and a row of cells per preset, at a context."""
    rows = data["rows"][str(context)]
    first = rows[BASELINE]
    columns = ["preset", "bits", "in all"]
    makers = [lambda r: f"{r['bits_per_value']:.2f}", lambda r: f"{r['bits_with_windows']:.2f}"]
    if "kv_bytes_in_use" in first:
        columns.append("MiB")
        makers.append(lambda r: verdict.mebibytes(r["kv_bytes_in_use"]))
    if "ppl" in first:
        columns += ["ppl", "KL mean [95 %]", "KL 99 %", "top %", "prompt KL"]
        makers += [
            lambda r: f"{r['ppl']:.4f}",
            lambda r: f"{r['kl_mean']:.2g}{_limits(r.get('kl_interval'))}",
            lambda r: f"{r['kl_p99']:.2g}",
            lambda r: f"{100 * r['top1']:.1f}{_limits(r.get('top1_interval'), '.1f', 100)}",
            lambda r: f"{r['prompt_kl_mean']:.2g}{_limits(r.get('prompt_kl_interval'))}",
        ]
    for kind in first.get("retrieval", {}):
        columns.append(kind.replace("multi", "m"))
        makers.append(lambda r, kind=kind: _found(r, kind, r is first))
    columns.append("verdict")
    makers.append(lambda r: r["verdict"] or "-")
    return columns, [[name, *(make(row) for make in makers)] for name, row in rows.items()]


def _found(row: dict, kind: str, is_first: bool) -> str:
    """Format a share of right values; ~ if not distinguishable from full precision's."""
    ends = row.get("retrieval_interval", {}).get(kind)
    loss = row.get("retrieval_lost", {}).get(kind)
    alike = not is_first and loss is not None and Interval(*loss).holds(0.0)
    text = f"{100 * row['retrieval'][kind]:.1f}{_limits(ends, '.0f', 100)}"
    return f"{text} ~" if alike else text


def notes(data: dict) -> list[str]:
    """Return the lines that explain the table."""
    options = data["options"]
    sizes = {tuple(v) for name, v in data["windows"].items() if name != BASELINE}
    if data["windows_equal"]:
        sink, recent, page = data["windows"][BASELINE]
        windows = f"the first {sink} and last {recent} tokens (up to {page} more), in all presets"
    else:
        same = "which are equal" if len(sizes) < 2 else "which are NOT equal"
        windows = f"each preset's own windows, {same}"
    lines = [
        f"bits: of a compressed value; in all: of a value on average, with the exact ones; MiB: cache in use, in the "
        f"layers that grow; exact: {windows}"
    ]
    if "ppl" in data["presets"][BASELINE]:
        lines.append(
            f"ppl: perplexity; KL: how far the next token's probabilities move from fp16's (nats); top: the likeliest "
            f"next token is the same; all over {options['decode']} tokens decoded after the context, means over "
            f"{_texts(data)}; KL 99 %: all but one token in a hundred move less; prompt KL: over the second half of "
            "the context, read in chunks; [95 %]: interval by resampling texts"
        )
    if "retrieval" in data["presets"][BASELINE]:
        lines.append(
            f"single, m-: right answers in percent, of {options['questions']} questions of each kind, with the wider "
            "of Wilson's interval and that of resampled documents; ~: not told apart from fp16's"
        )
    return [*lines, f"verdict: {verdict.RULES}"]


def _texts(data: dict) -> str:
    counts = {by_name[BASELINE].get("texts") for by_name in data["rows"].values()} - {None}
    return (
        f"{' or '.join(map(str, sorted(counts)))} text{'s' * (max(counts) > 1)}"
        if counts
        else "texts"
    )


def show(data: dict) -> None:
    """Print the tables."""
    for context in data["contexts"]:
        columns, rows = table(data, context)
        title = f"{data['model']}, {context} tokens, {data['dtype']}"
        console.print_table(columns, rows, title)
        for name, colour, sentence in verdict.sentences(data, context):
            console.say(f"{name} ({colour}): {sentence}")
        console.say("")
    console.say("\n".join(notes(data)))


# -- files: `report.json`, `report.md`, and `report.svg` where matplotlib is installed

PICTURE = "report.svg"


def write_page(data: dict, folder: Path) -> None:
    """Write the files to `folder`. data: of `assemble`. Raises MachineError."""
    try:
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        picture = plots.bits(data) if plots.available() else None
        if picture is not None:
            (folder / PICTURE).write_text(picture, encoding="utf-8")
        (folder / "report.md").write_text(markdown(data, picture is not None), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[--out] cannot write the report: {error.strerror}") from None


def markdown(data: dict, picture: bool) -> str:
    """Return the report as Markdown. picture: whether PICTURE is in the same folder."""
    out = [f"# {_plain(data['model'])}: what a compressed cache costs", "", *_about(data), ""]
    for context in data["contexts"]:
        columns, rows = table(data, context)
        out += [f"## {context} tokens", ""]
        for name, colour, sentence in verdict.sentences(data, context):
            out += [f"- **{_plain(name)}** ({colour}): {_plain(sentence)}"]
        out += ["", *markdown_table(columns, rows), ""]
    out += [f"- {_plain(line)}" for line in notes(data)]
    if picture:
        out += ["", f"![Bits per value against KL divergence]({PICTURE})"]
    elif not plots.available():
        out += ["", "No picture: it needs matplotlib (pip install matplotlib)."]
    return "\n".join(out) + "\n"


def _about(data: dict) -> list[str]:
    machine = data.get("machine", {})
    versions = ", ".join(f"{k} {v}" for k, v in data.get("versions", {}).items() if v)
    lines = (
        f"{machine.get('chip', '')}, {machine.get('system', '')}",
        versions,
        f"weights {data['fingerprint'][:12]}, computed in {data['dtype']}",
    )
    return [f"- {_plain(line)}" for line in lines]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(_plain(str(cell)) for cell in line)} |" for line in lines]


def _plain(text: str) -> str:
    """Escape Markdown and HTML syntax in a name."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
