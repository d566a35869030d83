"""Plant faults in a copy of the code, one at a time, and see whether the tests named beside each catch it.

    python tests/planted/run.py                      a sample of about five minutes
    python tests/planted/run.py --all --jobs 2       every fault
    python tests/planted/run.py --only cache         an area or a fault; may be repeated

A fault is "caught" when a test fails, "missed" when all of them pass, "late" when they do not end in time, and
"broken" when pytest could not run them. Exit code 1 unless every fault is caught.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # for the tests of one fault
SAMPLE = 24  # faults of a sample: some five minutes on two cores
FOLDERS = ("mlxkv", "cuda_track", "experiments", "tests", "docs")
FILES = ("pyproject.toml", "README.md")
SKIPPED = shutil.ignore_patterns("__pycache__", "node_modules", "runs")


@dataclass(frozen=True)
class Fault:
    """A fault. area: the file that lists it. old: a text that stands once in `file`. tests: what catches it."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault. Raises ValueError where it does not apply."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file}")
        return text.replace(self.old, self.new)


def read_faults(folder: Path = Path(__file__).parent) -> list[Fault]:
    """Read the faults of every area, in the order of their files."""
    return [
        Fault(path.stem, name, entry["file"], entry["old"], entry["new"], tuple(entry["tests"]))
        for path in sorted(folder.glob("*.toml"))
        for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()
    ]


def prepare() -> None:
    """Make what tests/support/small_models.py makes once a checkout: by the code without a fault."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    command = [sys.executable, "-c", "import small_models"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True)


def copy_tree(place: Path) -> Path:
    """Copy what tests read to `place`; returns it."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, place / name, ignore=SKIPPED)
    for name in FILES:
        shutil.copy2(ROOT / name, place / name)
    return place


def run_tests(tree: Path, tests: tuple[str, ...], seconds: int) -> tuple[str, str]:
    """Run the tests in a copy of the tree: (state, what pytest says last)."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, **pipe)
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "late", f"no end after {seconds} s"
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    if process.returncode == 0 and " passed" not in lines[-1]:
        return "broken", lines[-1]  # skipped, all of them
    return {0: "missed", 1: "caught"}.get(process.returncode, "broken"), failed


def plant(tree: Path, fault: Fault, seconds: int) -> tuple[str, str]:
    """Plant a fault in a copy of the tree, run its tests, and mend it again."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    try:
        planted = fault.planted(text)
        if path.suffix == ".py":
            compile(planted, fault.file, "exec")
    except (ValueError, SyntaxError) as error:
        return "broken", str(error)
    path.write_text(planted, encoding="utf-8")
    compiled = Path(cache_from_source(str(path)))  # may look as new as the fault
    compiled.unlink(missing_ok=True)
    try:
        return run_tests(tree, fault.tests, seconds)
    finally:
        path.write_text(text, encoding="utf-8")
        compiled.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see whether tests catch them.")
    parser.add_argument("--all", action="store_true", help="every fault")
    parser.add_argument("--only", action="append", metavar="NAME", help="an area, or a fault")
    today = int(time.time()) // 86400
    for name, default in (("sample", SAMPLE), ("seed", today), ("jobs", 1), ("seconds", SECONDS)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    options = parser.parse_args()
    faults, counts = read_faults(), Counter()
    if options.only:
        faults = [fault for fault in faults if {fault.area, fault.name} & set(options.only)]
    elif not options.all:
        faults = random.Random(options.seed).sample(faults, min(options.sample, len(faults)))
    prepare()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.jobs):
            trees.put(copy_tree(Path(folder, str(i))))

        def judge(fault: Fault) -> None:
            tree, start = trees.get(), time.monotonic()
            state, line = plant(tree, fault, options.seconds)
            trees.put(tree)
            counts[state] += 1
            spent = time.monotonic() - start
            print(f"{state:7} {spent:5.1f} s  {fault.area}: {fault.name}  {line[:150]}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(judge, faults))
    print(", ".join(f"{counts[state]} {state}" for state in ("caught", "missed", "late", "broken")))
    return 0 if counts["caught"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
