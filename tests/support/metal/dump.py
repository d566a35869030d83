"""Write every text that a Mac would build, and what it is for.

From the project's root: PYTHONPATH=tests/support .venv/bin/python -m metal.dump FOLDER [--presets A,B] [--dims 64,128]
[--dtypes bfloat16]. FOLDER gets NAME.metal for each text, without MLX's preamble, which goes into
mlx_utils.h; and index.json.
"""

import argparse
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from metal import mlx_preamble, texts
from metal.signature import VERSIONS


def names(found: Sequence[texts.Text]) -> dict[str, texts.Text]:
    """The texts by the names of their files."""
    return {f"{x.name}-{sha256(x.kernel.text().encode()).hexdigest()[:12]}": x for x in found}


def index(found: Sequence[texts.Text]) -> dict[str, dict]:
    """What each text is, by the name of its file. level: the oldest Metal that has to read it, 310 for 3.1."""
    return {
        name: {
            "body": text.name,
            "function": text.kernel.function(),
            "level": text.level,
            "threads": text.threads,
            "buffers": len(text.kernel.buffers),
            "uses": [vars(use) for use in text.uses],
        }
        for name, text in names(found).items()
    }


def write(folder: Path, found: Sequence[texts.Text], version: str = VERSIONS[-1]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mlx_utils.h").write_text(mlx_preamble.preamble(), encoding="utf-8")
    for name, text in names(found).items():
        (folder / f"{name}.metal").write_text(text.kernel.text(version), encoding="utf-8")
    (folder / "index.json").write_text(json.dumps(index(found), indent=1), encoding="utf-8")


def choice(parser: argparse.ArgumentParser) -> None:
    """The options that say which texts."""

    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser.add_argument("--presets", type=names, help="all by default")
    parser.add_argument("--dims", type=lambda x: tuple(map(int, x.split(","))), default=texts.DIMS)
    parser.add_argument("--dtypes", type=names, default=tuple(texts.DTYPES))


def chosen(args: argparse.Namespace) -> list[texts.Text]:
    return texts.dump(args.presets, args.dims, args.dtypes, others=args.presets is None)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("metal.dump", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mlx", choices=VERSIONS, default=VERSIONS[-1], help="whose signature")
    choice(parser)
    asked = parser.parse_args(args)
    found = chosen(asked)
    write(asked.folder, found, asked.mlx)
    print(f"{len(found)} texts in {asked.folder}")


if __name__ == "__main__":
    main()
