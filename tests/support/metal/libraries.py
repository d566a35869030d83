"""How many libraries a chat compiles, and of how many lines: MLX builds each text when it is first needed.

From the project's root: PYTHONPATH=tests/support .venv/bin/python -m metal.libraries [PRESETS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from metal import texts

PRESETS = (
    "int8",
    "int4",
    "int3",
    "int2",
    "srft-int4",
    "oscar-int2",
    "kivi-int2",
    "turbo-int3",
    "polar",
)
STEPS = ("prefill seal", "seal", "unseal", "attend 1")  # of a chat whose prompts come in chunks


def of_a_chat(preset: str, body: str, dims: int = 128, dtype: str = "bfloat16") -> list[texts.Text]:
    """The texts that a chat compiles, with four query heads to a kv head."""
    make = texts.Recorder()
    with texts.reading_once():
        texts.record(preset, dims, dtype, make)
    # A prefill decodes its pages by the same kernels whatever body decode attention has.
    return [
        text
        for text in make.texts.values()
        if any(u.step in STEPS and (u.body == body or u.step == "unseal") for u in text.uses)
    ]


def lines(text: texts.Text) -> int:
    """Lines of ours: neither MLX's preamble nor the parameters that it writes."""
    return text.kernel.header.count("\n") + text.kernel.source.count("\n")


def table(presets: Sequence[str] = PRESETS) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| preset | body | libraries | lines | of |"
    yield "|---|---|---|---|---|"
    for preset in presets:
        for body in texts.BODIES:
            found = of_a_chat(preset, body)
            if body == "tiles" and not any(text.name == "attend_tile" for text in found):
                continue
            each = ", ".join(f"{text.name} {lines(text)}" for text in found)
            yield f"| {preset} | {body} | {len(found)} | {sum(map(lines, found))} | {each} |"


def main() -> None:
    for line in table(sys.argv[1].split(",") if len(sys.argv) > 1 else PRESETS):
        print(line)


if __name__ == "__main__":
    main()
