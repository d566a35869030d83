"""Take the output that pages show anew: `python -m experiments.pages.outputs` (`make pictures`).

In README.md and docs/guide a block of ```bash that is followed by a block of ```text shows what its commands
print. This runs them again and writes what they print now. A test runs them and compares; times may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.options import Parser
from mlxkv import console
from mlxkv.errors import MachineError

ROOT = Path(__file__).parents[2]
LINES = r"(?:(?!```)[^\n]*\n)*"
SHOWN = re.compile(rf"^```bash\n(?P<code>{LINES})```\n\n```text\n(?P<out>{LINES})```$", re.M)
COLUMNS = "92"
LIMIT = 900  # seconds, on a busy machine


def main(arguments: list[str] | None = None) -> None:
    Parser("pages.outputs", __doc__).parse_args(arguments)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:

            def again(found: re.Match, folder: str = folder) -> str:
                if found.string[: found.start()].endswith(" -->\n"):  # marked: not run
                    return found[0]
                start, end = (side - found.start() for side in found.span("out"))
                return found[0][:start] + output(found["code"], Path(folder)) + found[0][end:]

            fresh = SHOWN.sub(again, text)
        if fresh != text:
            page.write_text(fresh, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written", file=sys.stderr)


def pages() -> list[Path]:
    """Return the pages whose blocks are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


def output(code: str, folder: Path) -> str:
    """Return what the commands print to stdout, run in `folder` without a network. Raises MachineError."""
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder),
        timeout=LIMIT,
    )
    if run.returncode:
        raise MachineError(f"[pages.outputs] exit code {run.returncode} of {code!r}: {run.stderr}")
    text = "\n".join(line.rstrip() for line in run.stdout.splitlines())
    return text.strip("\n") + "\n"


def environment(folder: Path) -> dict[str, str]:
    """Return a home of its own in `folder`, where `mlxkv` and `python` are those that run this."""
    names = folder / ".bin"
    names.mkdir(exist_ok=True)
    for name, words in (("mlxkv", "-m mlxkv "), ("python", "")):
        script = names / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        script.chmod(0o755)
    own = {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "PATH": f"{names}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "COLUMNS": COLUMNS,
        "HF_HUB_OFFLINE": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXKV_")}
    if "MLXKV_MODELS" in os.environ:  # where SmolLM2 is
        kept["MLXKV_MODELS"] = os.environ["MLXKV_MODELS"]
    return kept | own


if __name__ == "__main__":
    console.run_tool(main)
