"""Compile every text by Apple's own compiler, behind MLX's preamble, at every level of the language that it knows.

Needs no GPU. On a Mac with Xcode, from the project's root:
PYTHONPATH=tests/support .venv/bin/python -m metal.xcrun [--presets A,B] [--dims 64,128] [--dtypes bfloat16]
--write FOLDER compiles nothing, on any machine: NAME.metal for each text, MLX's preamble apart from them, index.json.
Portable texts are compiled as Metal 3.1, 3.2 and 4.0, tiles from 3.2 on. Texts with the same header share a file, since
MLX's preamble takes longer than a text. Exits with 1 where a text fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from metal import mlx_preamble, parse, texts

LEVELS = {310: "metal3.1", 320: "metal3.2", 400: "metal4.0"}
LINES = 12000  # of a file, without the preamble
TOOL = ("xcrun", "-sdk", "macosx", "metal")
SHOWN = 40  # errors that are written out


def names(found: Sequence[texts.Text]) -> dict[str, texts.Text]:
    """The texts by the names of their files."""
    return {f"{x.name}-{sha256(x.kernel.text().encode()).hexdigest()[:12]}": x for x in found}


def write(folder: Path, found: Sequence[texts.Text]) -> None:
    """Write the texts, and what each is. level: the oldest Metal that has to read it, 310 for 3.1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mlx_utils.h").write_text(mlx_preamble.preamble(), encoding="utf-8")
    index = {}
    for name, x in names(found).items():
        (folder / f"{name}.metal").write_text(x.kernel.text(), encoding="utf-8")
        index[name] = {"body": x.name, "function": x.kernel.function(), "level": x.level}
        index[name] |= {"threads": x.threads, "buffers": len(x.kernel.buffers)}
        index[name]["uses"] = [vars(use) for use in x.uses]
    (folder / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    print(f"{len(index)} texts in {folder}")


def files(texts_of_level: Sequence[texts.Text]) -> Iterator[str]:
    """The text of each file. `#line` gives the compiler the name of a text to complain of."""
    by_unit = {parse.Unit.of(text.kernel): name for name, text in names(texts_of_level).items()}
    for batch in parse.batches(by_unit, LINES):
        parts = [mlx_preamble.preamble(), '#line 1 "header"\n', batch[0].header]
        for unit in batch:
            parts += [f'#line 1 "{by_unit[unit]}"\n', parse.alone(unit.tail)]
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
    listed = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--presets", type=listed, help="all by default")
    parser.add_argument("--dims", type=lambda x: tuple(map(int, x.split(","))), default=texts.DIMS)
    parser.add_argument("--dtypes", type=listed, default=tuple(texts.DTYPES))
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    asked, failed = parser.parse_args(args), False
    chosen = texts.dump(asked.presets, asked.dims, asked.dtypes, others=asked.presets is None)
    if asked.write:
        write(asked.write, chosen)
        return 0
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
