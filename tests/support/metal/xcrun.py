"""Compile every text by Apple's own compiler, behind MLX's preamble, at every level of the language.

Needs no GPU. On a Mac with Xcode, from the project's root:
PYTHONPATH=tests/support .venv/bin/python -m metal.xcrun [--parse] [--presets A,B] [--dims 64,128] [--dtypes bfloat16]
--parse makes no code, which is quick. Portable texts are compiled as Metal 3.1, 3.2 and 4.0, tiles from
3.2 on. Texts with the same header share a file, since MLX's preamble takes longer than a text. Exits with
1 where a text fails, or where the compiler knows none of these levels.
"""

from __future__ import annotations

import argparse
import os
import re
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
SHOWN = 40  # failures that are written out


def run(path: Path, standard: str, makes_code: bool = True) -> subprocess.CompletedProcess[str]:
    """One file. MLX's math mode is "safe": no fast math."""
    flags = [f"-std={standard}", "-fno-fast-math", "-Wno-everything"]
    what = ["-c", str(path), "-o", os.devnull] if makes_code else ["-fsyntax-only", str(path)]
    return subprocess.run([*TOOL, *flags, *what], capture_output=True, text=True)


def known(folder: Path) -> dict[int, str | None]:
    """Of each level what the compiler says against it, or None."""
    probe = folder / "probe.metal"
    probe.write_text("#include <metal_stdlib>\n")
    out: dict[int, str | None] = {}
    for level, standard in LEVELS.items():
        try:
            done = run(probe, standard)
        except OSError as error:
            return dict.fromkeys(LEVELS, str(error))
        said = [x for x in done.stderr.splitlines() if "error" in x] or [done.stderr.strip()]
        out[level] = None if done.returncode == 0 else (said[0] or f"exit status {done.returncode}")
    return out


def files(found: Sequence[texts.Text]) -> Iterator[tuple[str, list[str]]]:
    """(text, names of the texts in it) of each file. `#line` gives the compiler the name of a text to complain of."""
    names = {parse.Unit.of(text.kernel): name for name, text in dump.names(found).items()}
    for batch in parse.batches(names, LINES):
        parts = [mlx_preamble.preamble(), '#line 1 "header"\n', batch[0].header]
        for unit in batch:
            parts += [f'#line 1 "{names[unit]}"\n', parse.alone(unit.tail)]
        yield "\n".join(parts), [names[unit] for unit in batch]


def blamed(said: str, names: Sequence[str]) -> dict[str, str]:
    """The first error of each text of a file that the compiler refused; of all, where it names none."""
    out: dict[str, str] = {}
    for line in said.splitlines():
        if match := re.match(r"(?:.*/)?([^:/]+):(\d+):\d+: (?:fatal )?(error: .*)", line):
            where = match[1] if match[1] in names else f"{names[0]} and {len(names) - 1} more"
            out.setdefault(where, f"{match[1]}:{match[2]}: {match[3]}")
    first = (said.strip().splitlines() or ["no message"])[0]
    return out or {f"{names[0]} and {len(names) - 1} more": first}


def compile_all(found: Sequence[texts.Text], makes_code: bool = True) -> int:
    """Compile these at every level, write what came of it, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        levels = known(Path(folder))
        for level, reason in levels.items():
            if reason:
                print(
                    f"{LEVELS[level]}: not compiled, the compiler here does not know it: {reason}"
                )
        if all(levels.values()):
            print("no level was compiled")
            return 1
        jobs, failed = [], 0
        for level, reason in levels.items():
            those = [text for text in found if text.level <= level and not reason]
            for i, (text, names) in enumerate(files(those)):
                path = Path(folder) / f"{level}-{i}.metal"
                path.write_text(text, encoding="utf-8")
                jobs.append((level, path, names))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = pool.map(lambda job: run(job[1], LEVELS[job[0]], makes_code), jobs)
            results = list(zip(jobs, done, strict=True))
        for level in levels:
            mine = [(names, x) for (at, _, names), x in results if at == level]
            bad = [
                one for names, x in mine if x.returncode for one in blamed(x.stderr, names).items()
            ]
            if mine:
                count = sum(len(names) for names, _ in mine)
                print(f"{LEVELS[level]}: {count} texts in {len(mine)} files, {len(bad)} failures")
            for name, error in bad[:SHOWN]:
                print(f"  {name}: {error}")
            if len(bad) > SHOWN:
                print(f"  and {len(bad) - SHOWN} more")
            failed += len(bad)
    return int(failed > 0)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("metal.xcrun", description=__doc__)
    parser.add_argument("--parse", action="store_true", help="make no code")
    dump.choice(parser)
    asked = parser.parse_args(args)
    return compile_all(dump.chosen(asked), not asked.parse)


if __name__ == "__main__":
    sys.exit(main())
