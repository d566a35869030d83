"""Compile every text by Apple's own compiler, behind MLX's preamble, at every level of the language that it knows.

Needs no GPU. On a Mac with Xcode, from the project's root:
PYTHONPATH=tests/support .venv/bin/python -m metal.xcrun [--presets A,B] [--dims 64,128] [--dtypes bfloat16]
Portable texts are compiled as Metal 3.1, 3.2 and 4.0, tiles from 3.2 on. Texts with the same header share a file, since
MLX's preamble takes longer than a text. Exits with 1 where a text fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from metal import dump, mlx_preamble, parse, texts

LEVELS = {310: "metal3.1", 320: "metal3.2", 400: "metal4.0"}
LINES = 12000  # of a file, without the preamble
TOOL = ("xcrun", "-sdk", "macosx", "metal")
SHOWN = 40  # errors that are written out


def files(texts_of_level: Sequence[texts.Text]) -> Iterator[str]:
    """The text of each file. `#line` gives the compiler the name of a text to complain of."""
    names = {parse.Unit.of(text.kernel): name for name, text in dump.names(texts_of_level).items()}
    for batch in parse.batches(names, LINES):
        parts = [mlx_preamble.preamble(), '#line 1 "header"\n', batch[0].header]
        for unit in batch:
            parts += [f'#line 1 "{names[unit]}"\n', parse.alone(unit.tail)]
        yield "\n".join(parts)


def errors_at(level: int, texts_of_level: Sequence[texts.Text]) -> list[str]:
    """Compile these and return the compiler's errors. MLX's math mode is "safe": no fast math."""

    def run(path: Path) -> list[str]:
        flags = [f"-std={LEVELS[level]}", "-fno-fast-math", "-Wno-everything"]
        command = [*TOOL, *flags, "-c", str(path), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        errors = [line for line in done.stderr.splitlines() if "error: " in line]
        return errors or ([f"exit status {done.returncode}"] if done.returncode else [])

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = []
        for i, text in enumerate(files(texts_of_level)):
            paths.append(Path(folder) / f"{level}-{i}.metal")
            paths[-1].write_text(text, encoding="utf-8")
        return [line for errors in pool.map(run, paths) for line in errors]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("metal.xcrun", description=__doc__)
    dump.choice(parser)
    chosen, failed = dump.chosen(parser.parse_args(args)), False
    for level, standard in LEVELS.items():
        texts_of_level = [text for text in chosen if text.level <= level]
        errors = errors_at(level, texts_of_level)
        if any("invalid value" in line for line in errors):
            print(f"{standard}: the compiler here does not know it")
            continue
        print(
            "\n  ".join(
                [f"{standard}: {len(texts_of_level)} texts, {len(errors)} errors", *errors[:SHOWN]]
            )
        )
        failed |= bool(errors)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
