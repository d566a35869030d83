"""Write a report: `report.json`, and `report.html`, one file that needs nothing else."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from mlxkv import plots
from mlxkv.errors import MachineError
from mlxkv.eval.report import pictures, report, words
from mlxkv.eval.tasks.statistics import block

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --back: #fff; --soft: #555; --line: #ddd; --card: #f6f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #eee; --back: #161618; --soft: #aaa; --line: #38383c; --card: #222226; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 86rem; padding: 0 1rem;
       color: var(--text); background: var(--back); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
table { font-size: .85rem; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } p.note, figcaption { color: var(--soft); font-size: .9rem; max-width: 60rem; }
p.said { background: var(--card); border-radius: .5rem; padding: .7rem 1rem; max-width: 60rem; }
.green, .amber, .red, .open { border-radius: .3rem; padding: .05rem .45rem; color: #fff; font-weight: 600; }
.green { background: #1b6e36; } .amber { background: #8a5300; }
.red { background: #b3261e; } .open { background: #5a5a66; }
figure { margin: 1rem 0; padding: .5rem; background: #fff; border-radius: .5rem; }
figcaption { color: #555; } svg { max-width: 100%; height: auto; } pre { font-size: .8rem; }
details { margin: .4rem 0; } summary { cursor: pointer; }
"""


def write(data: dict, folder: Path) -> None:
    """Write both files to `folder`. data: of `report.assemble`. Raises MachineError."""
    try:
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        (folder / "report.html").write_text(html(data), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[--out] cannot write the report: {error.strerror}") from None


def html(data: dict) -> str:
    title = f"{data['model']}: what a compressed cache costs"
    body = [f"<h1>{escape(title)}</h1>", _about(data)]
    for context in data["contexts"]:
        columns, rows = report.table(data, context)
        body += [f"<h2>{context} tokens</h2>"]
        body += [
            f'<p class="said"><b>{escape(name)}</b> {_badge(colour)} {escape(said)}</p>'
            for name, colour, said in words.sentences(data, context)
        ]
        body += [_table(columns, rows)]
    body += [f'<p class="note">{escape(line)}</p>' for line in report.notes(data)]
    body += _pictures(data) + _blocks(data)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        "<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _about(data: dict) -> str:
    machine = data.get("machine", {})
    versions = " · ".join(f"{k} {v}" for k, v in data.get("versions", {}).items() if v)
    texts = [f"{machine.get('chip', '')}, {machine.get('system', '')}", versions]
    texts.append(f"weights {data['fingerprint'][:12]}, computed in {data['dtype']}")
    return f'<p class="note">{"<br>".join(escape(t) for t in texts)}</p>'


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    # The last column is the verdict.
    lines = (
        "".join(f"<td>{escape(cell)}</td>" for cell in row[:-1]) + f"<td>{_badge(row[-1])}</td>"
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _badge(verdict: str) -> str:
    return f'<span class="{verdict}">{verdict}</span>'


def _pictures(data: dict) -> list[str]:
    if not plots.available():
        return ["<p class='note'>No pictures: they need matplotlib (pip install matplotlib).</p>"]
    return [
        f"<h2>{escape(title)}</h2><figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        for title, caption, svg in pictures.all_of(data)
    ]


def _blocks(data: dict) -> list[str]:
    out = []
    for context in data["contexts"]:
        for name, result in data["parts"].get(f"divergence-{context}", {}).items():
            for leg, summary in result["legs"].items():
                head = escape(f"{name}, {context} tokens, {leg}")
                text = escape(block(summary))
                out.append(f"<details><summary>{head}</summary><pre>{text}</pre></details>")
    return ["<h2>Statistics of every preset</h2>", *out] if out else []
