"""Say where the trainings are: python -m natural.status RUNS [--wait SECONDS]."""

import argparse
import json
import time
from pathlib import Path

SHOWN = ("step", "progress", "tokens", "length", "lr", "loss_real", "loss_worlds", "loss_answers",
         "gradient", "skipped", "tokens_per_second", "mfu", "waiting", "minutes_left")  # fmt: skip


def describe(run: Path) -> str:
    """Return a line about a run, with the end of its output where there is no status yet."""
    try:
        status = json.loads((run / "status.json").read_text())
        age = time.time() - (run / "status.json").stat().st_mtime
        said = " ".join(f"{key}={status[key]}" for key in SHOWN if key in status)
        said += f" ({age:.0f} s ago)"
    except FileNotFoundError:
        said = "has not begun"
    if (run / "done").exists():
        return f"{run.name}: done; {said}"
    output = run / "output.txt"
    last = output.read_text(errors="replace").splitlines()[-1:] if output.exists() else []
    return f"{run.name}: {said} | {(last or ['no output'])[0][:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--wait", type=float, default=0, help="seconds, or until all are done")
    args = parser.parse_args()
    end = time.monotonic() + args.wait
    while True:
        runs = sorted(path.parent for path in args.runs.glob("*/output.txt"))
        print(time.strftime("%H:%M:%S"), *map(describe, runs), sep="\n  ", flush=True)
        left = end - time.monotonic()
        if left <= 0 or (runs and all((run / "done").exists() for run in runs)):
            return
        time.sleep(min(20, left))


if __name__ == "__main__":
    main()
