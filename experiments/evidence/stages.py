"""Write what each change of calibrations did to KL: `python -m experiments.evidence.stages`.

The table of docs/results/positions.md between its two marks, from rows that were kept at each stage: folders of
docs/results/positions are named by the commit that had them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from experiments.evidence.cells import Cells, read
from experiments.evidence.pretrained_page import RESULTS, SHORT, _k, divergence
from experiments.options import Parser
from mlxkv import console
from mlxkv.eval import intervals
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.report import markdown_table

PAGE = RESULTS / "positions.md"
STAGES = ("83184deb", "7320516f", "21e94f24")
PRESETS = ("fill-2.25", "fill-3")
CONTEXTS = (1024, 4096, 8192, 32768)
MARKS = re.compile(r"(<!-- experiments.evidence.stages -->\n).*?(<!-- end -->)", re.S)


def table() -> str:
    """Return a row for each model and context: KL by stage, the last stage over the one before it, answers."""
    stages = [read(RESULTS / "positions" / commit) for commit in STAGES]
    heads = [""]
    for preset in PRESETS:
        heads += [f"`{preset}` KL", "last ratio", "answers"]
    rows = []
    for name, short in SHORT.items():
        if name not in stages[0]:
            continue  # measured since
        models = [stage[name] for stage in stages]
        for context in CONTEXTS:
            if models[-1].measured(PRESETS[0], context):
                row = [f"{short}, {_k(context)}"]
                for preset in PRESETS:
                    row += _changes(models, preset, context)
                full = models[-1].answers(BASELINE, context)
                rows.append([*row, "{} of {}".format(*full) if full else "–"])
    return "\n".join(markdown_table([*heads, "full precision"], rows)) + "\n"


def _changes(models: Sequence[Cells], preset: str, context: int) -> list[str]:
    """Return KL by stage, the ratio of the last two on the same texts, and their answers."""
    values = [cells.values(preset, context) for cells in models]
    right = [cells.answers(preset, context) for cells in models[-2:]]
    asked = {answers[1] if answers else None for answers in right}
    ratio = intervals.ratio(values[-1], values[-2])
    return [
        " → ".join(divergence(cells.kl(preset, context).value) for cells in models),
        f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
        " → ".join(str(x[0]) for x in right) if len(asked) == 1 and None not in asked else "–",
    ]


def page(text: str) -> str:
    """Return the page with the table between its marks."""
    return MARKS.sub(lambda found: found[1] + "\n" + table() + "\n" + found[2], text)


def main(arguments: list[str] | None = None) -> None:
    Parser("evidence.stages", __doc__).parse_args(arguments)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    console.note(f"wrote {PAGE}")


if __name__ == "__main__":
    console.run_tool(main)
