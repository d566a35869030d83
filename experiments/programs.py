"""Programs from PyPI under `mlxkv run`, as they are: each alone, with --kv fp16 and with --kv int4.

    python -m experiments.programs --folder FOLDER [--only mlx_lm.chat,llm] [--python python3.12]

Makes a virtual environment per set of packages in FOLDER and installs them there, unless it is there already; then
no network is needed. Prints a table in Markdown. `alone = fp16`: what the program answers, times left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.fixtures import QWEN
from experiments.options import Parser, words
from mlxkv import console
from mlxkv.errors import UserError

ROOT = Path(__file__).parents[1]
WAIT = 900  # seconds for a program to answer
MLX = "mlx[cpu]" if sys.platform == "linux" else "mlx"
# The sets do not go into one environment: mlx-openai-server asks for mlx-lm 0.31.
SETS = {
    "mlx-lm": (MLX, "mlx-lm", "lm-eval", "datasets", "llm", "llm-mlx"),
    "mlx-openai-server": (MLX, "mlx-openai-server"),
    "mlx-vlm": (MLX, "mlx-lm", "mlx-vlm"),
}
QUESTION = (
    "The harbour of Amsel lies east of the mill, and the ferry leaves when the bell has rung. " * 16
)
REPORT = re.compile(r"layers? [\d-]+ \([^)]*\): (\w+, [\d.]+ bits per value)")
LONGEST = re.compile(r"longest cache ([\d,]+) tokens.*? in ([\d.]+ \w+), in 16 bits ([\d.]+ \w+)")


@dataclass(frozen=True)
class Tried:
    """A program to try. package: of PyPI, whose version is told. group: of SETS. args: of the command line.
    answer: what of stdout is compared, or None where all of it is times. port: it is a server."""

    name: str
    package: str
    group: str
    args: tuple[str, ...]
    answer: Callable[[str], str] | None = str.strip
    stdin: str = ""
    port: int = 0


def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def programs(work: Path) -> list[Tried]:
    """work: the folder in which they run; it has the model, and texts."""
    model, prompt = ("--model", "model"), ("--prompt", QUESTION + "Where is the harbour?")
    few = ("--max-tokens", "16")
    data = ("--data-path", "texts", "--sequence-length", "128", "--num-samples", "2")
    one, two, three = port(), port(), port()
    launch = ("--model-path", "model", "--model-type", "lm", "--no-log-file", "--host", "127.0.0.1")
    return [
        Tried("mlx_lm.generate", "mlx-lm", "mlx-lm", (*model, *prompt, *few), between),
        Tried(
            "mlx_lm.chat", "mlx-lm", "mlx-lm", (*model, *few), untimed, QUESTION + "\nHello\nq\n"
        ),
        Tried("mlx_lm.server", "mlx-lm", "mlx-lm", (*model, "--port", str(one)), port=one),
        Tried(
            "mlx_lm.benchmark",
            "mlx-lm",
            "mlx-lm",
            (*model, *["-p", "300", "-g", "8", "-n", "1"]),
            None,
        ),
        Tried(
            *("mlx_lm.evaluate", "mlx-lm", "mlx-lm"),
            (*model, "--tasks", "arc_easy", "--output-dir", "out", "--limit", "2"),
            scores,
        ),
        Tried("mlx_lm.perplexity", "mlx-lm", "mlx-lm", (*model, *data), perplexity),
        Tried("llm", "llm-mlx", "mlx-lm", ("-m", "tiny", "-o", "temperature", "0", prompt[1])),
        Tried(
            *("mlx-openai-server", "mlx-openai-server", "mlx-openai-server"),
            ("launch", *launch, "--port", str(two)),
            port=two,
        ),
        Tried("mlx_vlm.generate", "mlx-vlm", "mlx-vlm", (*model, *prompt, *few), last_line),
        Tried("mlx_vlm.server", "mlx-vlm", "mlx-vlm", (*model, "--port", str(three)), port=three),
    ]


def between(out: str) -> str:
    return out.split("=" * 10)[1].strip()


def untimed(out: str) -> str:
    return "\n".join(line for line in out.splitlines() if "tok/s" not in line)


def last_line(out: str) -> str:
    return out.strip().splitlines()[-1]


def perplexity(out: str) -> str:
    return re.search(r"Perplexity: (.*)", out)[1]


def scores(out: str) -> str:
    return ", ".join(re.findall(r'"acc\w*,none": [\d.]+', out))


def environment(folder: Path, group: str, python: str) -> Path:
    """The Python of a set's virtual environment."""
    place = folder / group
    if not place.exists():
        subprocess.run([python, "-m", "venv", place], check=True)
        pip = [place / "bin" / "python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *SETS[group], "-e", ROOT], check=True)
    return place / "bin" / "python"


def prepare(work: Path) -> None:
    """The model without its calibrations, which mlx-vlm would read as weights, and texts for the programs."""
    shutil.rmtree(work, ignore_errors=True)
    ignored = shutil.ignore_patterns("mlxkv-calibration*")
    shutil.copytree(QWEN, work / "model", ignore=ignored)
    (work / "texts").mkdir()
    for name in ("train", "valid", "test"):
        lines = [json.dumps({"text": QUESTION})] * 8
        (work / "texts" / f"{name}.jsonl").write_text("\n".join(lines))
    (work / "llm").mkdir()
    entry = {str(work / "model"): {"aliases": ["tiny"]}}
    (work / "llm" / "llm-mlx.json").write_text(json.dumps(entry))
    arc = work / "allenai" / "ai2_arc"  # the harness finds it before it would look on the hub
    arc.mkdir(parents=True)
    splits = "".join(f"      - {{split: {s}, path: rows.jsonl}}\n" for s in ("train", "test"))
    splits += "      - {split: validation, path: rows.jsonl}\n"
    head = f"---\nconfigs:\n  - config_name: ARC-Easy\n    data_files:\n{splits}---\n"
    (arc / "README.md").write_text(head)
    choices = {"text": ["mill", "ferry", "bell", "east"], "label": list("ABCD")}
    row = {"question": QUESTION + "Where is the harbour?", "choices": choices, "answerKey": "D"}
    rows = [json.dumps(row | {"id": str(i)}) for i in range(4)]
    (arc / "rows.jsonl").write_text("\n".join(rows))


def call(one: Tried, command: list[str], work: Path, env: dict) -> tuple[str, str, int]:
    """What the program answers, its stderr and its exit code."""
    err = work / "stderr"
    with err.open("w") as log:
        streams = {"stdout": subprocess.PIPE, "stderr": log, "stdin": subprocess.PIPE}
        process = subprocess.Popen(
            command, cwd=work, env=env, text=True, preexec_fn=_hears_ctrl_c, **streams
        )
        if one.port:
            try:
                out = ask(one.port, process)
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=WAIT)
        else:
            out, _ = process.communicate(one.stdin, timeout=WAIT)
            found = list((work / "out").glob("*")) if one.answer is scores else []
            out += "".join(path.read_text() for path in found)
            shutil.rmtree(work / "out", ignore_errors=True)
            failed = process.returncode and f"exit code {process.returncode}"
            out = failed or (one.answer(out) if one.answer else "")
    return out, err.read_text(errors="replace"), process.returncode


def _hears_ctrl_c() -> None:
    """Undo what a job in the background inherits: servers end by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ask(number: int, process: subprocess.Popen) -> str:
    """The replies of a server to a short and a long question."""
    replies, end = [], time.monotonic() + WAIT
    for prompt in ("Hello", QUESTION + "Where is the harbour?"):
        message = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
        body = json.dumps(message | {"temperature": 0, "model": "model"}).encode()
        url = f"http://127.0.0.1:{number}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=WAIT) as reply:
                    replies.append(json.load(reply)["choices"][0]["message"]["content"])
                    break
            except urllib.error.HTTPError as error:
                return f"HTTP {error.code}: {error.read().decode()[:200]}"
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    return "no answer"
                time.sleep(1)
    return " | ".join(replies)


def versions(python: Path, names: list[str]) -> list[str]:
    code = "import sys\nfrom importlib.metadata import version\nprint(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return done.stdout.split()


def row(one: Tried, python: Path, work: Path) -> list[str]:
    tool = str(python.parent / one.name)
    own = {"HF_HUB_OFFLINE": "1", "LLM_USER_PATH": str(work / "llm"), "MLXKV_COMPILE": "0"}
    env = os.environ | own
    path = (str(ROOT), os.environ.get("PYTHONPATH"))
    beneath = env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    alone = call(one, [tool, *one.args], work, env)
    start = [str(python), "-m", "mlxkv", "run", "--kv"]
    plain = call(one, [*start, "fp16", "--", tool, *one.args], work, beneath)
    packed = call(one, [*start, "int4", "--", tool, *one.args], work, beneath)
    same = "-" if one.answer is None else "yes" if alone[0] == plain[0] else "NO"
    if alone[0] == "no answer":  # the program itself does not run here
        same = alone[0]
    layers, longest = REPORT.search(packed[1]), LONGEST.findall(packed[1])
    nothing = re.search(r"nothing was compressed \(([^)]*)\)", packed[1])
    held = "{} tokens: {}, in 16 bits {}".format(*longest[-1]) if longest else "-"
    (program, host), codes = versions(python, [one.package, hosted(one)]), {alone[2], packed[2]}
    for what, found in (("alone", alone), ("fp16", plain), ("int4", packed)):
        print(f"{one.name} {what}: {found[2]} {found[0][:300]!r}", file=sys.stderr, flush=True)
    if not layers:
        print(packed[1][-3000:], file=sys.stderr, flush=True)
    return [
        f"`{one.name}`",
        f"{one.package} {program}",
        f"{hosted(one)} {host}",
        same,
        layers[1] if layers else "-",
        nothing[1] if nothing and not longest else held,
        "same" if len(codes) == 1 else "OTHER",
    ]


def hosted(one: Tried) -> str:
    return "mlx-vlm" if one.package == "mlx-vlm" else "mlx-lm"


HEAD = ["program", "package", "models by", "alone = fp16", "int4: layers"]
HEAD += ["int4: longest cache", "exit code"]


def main(argv: list[str] | None = None) -> None:
    parser = Parser("programs", __doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for environments and texts")
    parser.add_argument("--only", type=words, help="these programs, by commas")
    parser.add_argument("--python", default=sys.executable, help="of new environments")
    options = parser.parse_args(argv)
    known = [one.name for one in programs(Path())]
    if unknown := set(options.only or ()) - set(known):
        raise UserError(
            f"[--only] no such program; got {unknown.pop()!r}; choose from {', '.join(known)}"
        )
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    show(HEAD)
    show(["---"] * len(HEAD))
    for one in programs(folder / "work"):
        if options.only and one.name not in options.only:
            continue
        python = environment(folder, one.group, options.python)
        prepare(folder / "work")
        show(row(one, python, folder / "work"))


def show(cells: list[str]) -> None:
    """Print a row of the table at once: the next one takes a minute."""
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    console.run_tool(main)
