"""What is measured of the compiled texts, and a table of it.

From the project's root: PYTHONPATH=tests/support .venv/bin/python -m metal.measured [PRESETS [DIMS]]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from metal import codegen, texts

PRESETS = ("int8", "int4", "int3", "int2", texts.FILL)
NAMES = ("attend", "attend_tile", "merge", "seal", "seal_channel", "unseal", "whiten")
STEPS = ("seal", "prefill seal", "unseal", "attend 1")
DTYPE = "bfloat16"


def measured(preset: str, dims: int) -> Iterator[tuple[str, texts.Text]]:
    """(what it is, text) of each kernel of a chat with four query heads to a kv head, in bfloat16."""
    make = texts.Recorder()
    with texts.reading_once():
        texts.record(preset, dims, DTYPE, make)
    seen: dict[str, int] = {}
    for text in make.texts.values():
        steps = sorted({use.step for use in text.uses if use.step in STEPS}, key=STEPS.index)
        if text.name in NAMES and steps:
            label = text.name if steps[0] in ("unseal", "attend 1") else f"{text.name}, {steps[0]}"
            seen[label] = seen.get(label, 0) + 1
            yield f"{label} {seen[label]}" if seen[label] > 1 else label, text


def table(presets: Sequence[str] = PRESETS, dims: Sequence[int] = (64, 128, 256)) -> Iterator[str]:
    """The lines of a table in Markdown. of 256: the registers that it takes where it may have so many."""
    yield (
        "| preset | dims | kernel | threads | VGPRs | spilled | scratch | of 256 | shared | code "
        "| private arrays |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for preset in presets:
        for dim in dims:
            for label, text in measured(preset, dim):
                try:
                    found = codegen.registers(text.kernel, text.threads)
                    wanted = codegen.registers(text.kernel, text.threads, 256)
                    arrays = codegen.private_arrays(text.kernel)
                except codegen.CompileError as error:
                    yield f"| {preset} | {dim} | {label} | {text.threads} | {error} |||||||"
                    continue
                sizes = ", ".join(str(size) for _, size in arrays) or "none"
                yield (
                    f"| {preset} | {dim} | {label} | {text.threads} | {found.vgprs} | {found.spilled} "
                    f"| {found.scratch} B | {wanted.vgprs} | {found.shared} B | {found.code} B | {sizes} |"
                )


def main() -> None:
    if reason := codegen.why_not():
        sys.exit(f"[measured] {reason}")
    presets = sys.argv[1].split(",") if len(sys.argv) > 1 else PRESETS
    dims = [int(x) for x in sys.argv[2].split(",")] if len(sys.argv) > 2 else (64, 128, 256)
    for line in table(presets, dims):
        print(line, flush=True)


if __name__ == "__main__":
    main()
