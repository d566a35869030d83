"""Write the table of what kernels take on an M1 or M2, by Mesa's compiler.

From the project's root, after `make agx`: PYTHONPATH=tests/support python -m agx [PRESETS [DIMS [KERNELS]]]
"""

import sys
from collections.abc import Iterator, Sequence

from metal import texts

from agx import compiler

PRESETS = (
    "int8",
    "int4",
    "int3",
    texts.MIXED_BITS,
    "int2",
)  # fill-NUMBER: one text for every number
DIMS = (64, 128, 256)
KERNELS = ("quantize", "quantize_channel", "dequantize", "attend", "merge", "attend_tile")
STEPS = ("quantize", "prefill quantize", "dequantize", "attend 1")
DTYPE = "bfloat16"
COLUMNS = (
    *("preset", "dims", "kernel", "registers", "spills", "fills", "scratch", "shared"),
    *("code", "nest", "instructions", "cycles", "threads", "loops"),
)


def chosen(
    presets: Sequence[str] = PRESETS, dims: Sequence[int] = DIMS, kernels: Sequence[str] = KERNELS
) -> Iterator[tuple[str, int, str, texts.Text]]:
    """(preset, dims, kernel, text) of a chat with four query heads to a kv head, in bfloat16. Kernels that quantize
    a prompt by another text than a page are named with the step."""
    for preset in presets:
        for dim in dims:
            make = texts.Recorder()
            with texts.reading_once():
                texts.record(preset, dim, DTYPE, make)
            for text in make.texts.values():
                steps = sorted({x.step for x in text.uses} & set(STEPS), key=STEPS.index)
                if text.name in kernels and steps:
                    prompt = " of a prompt" if steps[0] == "prefill quantize" else ""
                    yield preset, dim, text.name + prompt, text


def row(preset: str, dims: int, kernel: str, text: texts.Text) -> list[object]:
    """A row of the table, in the order of `COLUMNS`."""
    took = compiler.takes(text.kernel, text.threads)
    large = [x for x in took.loops if x.instructions >= 100]
    loops = " ".join(f"{x.instructions}+{x.spills}" for x in large)
    return [
        *(preset, dims, kernel, took.registers, took.spills, took.fills, took.scratch),
        *(took.shared, took.code, took.nest, took.instructions, took.cycles, took.threads, loops),
    ]


def main() -> None:
    if reason := compiler.why_not():
        sys.exit(f"[agx] {reason}")
    given = sys.argv[1:] + [""] * 3
    presets = given[0].split(",") if given[0] else PRESETS
    dims = [int(x) for x in given[1].split(",")] if given[1] else DIMS
    kernels = given[2].split(",") if given[2] else KERNELS
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for each in chosen(presets, dims, kernels):
        print("| " + " | ".join(map(str, row(*each))) + " |", flush=True)


if __name__ == "__main__":
    main()
