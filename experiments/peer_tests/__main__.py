"""Run mlx-lm's own tests with our caches: `python -m experiments.peer_tests --tests FOLDER --out FILE`.

FOLDER is `tests` of mlx-lm's source of the version that is installed:
    pip download --no-deps --no-binary :all: mlx-lm==0.32.2, then unpack it.
Each suite runs with mlx-lm's caches ("plain"), with `int4`, and with "tight": int4 with sink 0, recent 0 and
pages of 16 tokens, where nothing but what is being read stays exact. --out writes one table: what differs
from the plain run, and why. The exit code is 1 where a difference has no reason here. test_server needs
the package requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from experiments.options import Parser, check_out, words
from experiments.peer_tests import plugin
from mlxkv import console
from mlxkv.errors import MachineError, UserError
from mlxkv.machine import machine, versions

SUITES = ("test_models", "test_prompt_cache", "test_generate", "test_server")
ROOT = Path(__file__).parents[2]
PATIENCE = 1200.0  # seconds for one suite

CHUNKS = (
    "reads one prompt in chunks of two sizes and wants equal logits: with codes, what is quantized when a later "
    "chunk is read depends on the chunks (by design)"
)
SAID = f"wants the words of the model that it fetches; got {plugin.MODEL}"
TEMPLATE = f"the chat template of {plugin.MODEL} knows no tools"
SIZE = "wants caches bounded by max_kv_size: it has no effect on an attached model, which warns"
CLASS = "wants the class `KVCache`"
# Why a test fails, by its name: without our caches too, or only with them.
PLAIN_REASONS = {
    "test_bitnet": "needs Metal",
    "test_gated_delta": "needs Metal",
    "test_gated_delta_masked": "needs Metal",
    "test_generate_with_logit_bias": SAID,
    "test_stream_generate_input_embeddings": SAID,
    "test_stream_generate_input_embeddings_prefill": SAID,
    "test_handle_chat_completions_with_dict_tool_arguments": TEMPLATE,
    "test_handle_chat_completions_with_null_tool_content": TEMPLATE,
    "test_handle_models": "wants a model in the cache folder of the hub",
}
REASONS = {
    "test_spark2_5": CLASS,
    "test_spark2_5_chunked_vs_oneshot_prefill": CHUNKS,
    "test_batch_continued_generation": CHUNKS,
    "test_batch_max_kv_size_creates_rotating_cache": SIZE,
    "test_batch_max_kv_size_none_creates_regular_cache": CLASS,
    "test_completion_quantizes_the_cache": "wants the class `QuantizedKVCache`: kv_bits has no effect on "
    "layers that are compressed already, and warns",
}
HEAD = """# mlx-lm's own tests with our caches

What else changes in mlx-lm when its caches are replaced.

The tests of mlx-lm {mlx_lm}, unchanged, {kinds}: each model is attached when it first makes a prompt
cache. *tight* is int4 with sink 0, recent 0 and pages of 16 tokens, so attention reads codes from the 17th token on.
Cells are tests passed of tests run, without skipped ones. *Models*: attached models in which all growing layers are
compressed, some of them, or none (refused with a reason, or nothing grows).

| suite | models | plain | int4 | tight | what fails or differs, and why |
|---|---:|---:|---:|---:|---|
"""


@dataclass(frozen=True)
class Run:
    """One suite with one kind of caches. outcomes: by test, passed, failed or skipped, and the last line
    it said. models: how many were compressed in "all" layers that grow, in "part" or in "none"."""

    outcomes: Mapping[str, tuple[str, str]]
    models: Mapping[str, int]

    @property
    def count(self) -> str:
        ran = [outcome for outcome, _ in self.outcomes.values() if outcome != "skipped"]
        return f"{ran.count('passed')} / {len(ran)}"

    @property
    def lost(self) -> dict[str, str]:
        """What every failed test said."""
        return {n: said for n, (outcome, said) in self.outcomes.items() if outcome == "failed"}


def run(folder: Path, suite: str, kind: str) -> Run:
    """Run one suite in a process of its own. Raises MachineError if it does not come to an end."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "outcomes.json"
        (Path(home) / "hub").mkdir()
        paths = (str(ROOT), os.environ.get("PYTHONPATH"))
        env = {
            plugin.CACHES: kind,
            plugin.OUT: str(out),
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        options = ("-p", plugin.__name__, "-p", "no:cacheprovider", "-q", "-c", os.devnull)
        command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder)]
        try:
            ran = subprocess.run(
                [*command, str(folder / f"{suite}.py")],
                env=os.environ | env,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"[peer_tests] {suite}, {kind}: no end in {PATIENCE:.0f} s"
            ) from None
        found = json.loads(out.read_text()) if out.exists() else {"outcomes": {}}
        if not found["outcomes"]:
            raise MachineError(
                f"[peer_tests] {suite} did not run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
            )
    return Run({n: tuple(o) for n, o in found["outcomes"].items()}, found["models"])


def reason(test: str, reasons: Mapping[str, str]) -> str | None:
    return reasons.get(test.rsplit("::", 1)[-1])


def differences(runs: Mapping[str, Run]) -> tuple[list[str], list[str]]:
    """Return what to say of a suite: lines with reasons, and the tests that have none."""
    lines, unknown = [], []
    plain = runs["plain"]
    for test, said in plain.lost.items():
        why = reason(test, PLAIN_REASONS)
        lines.append(f"{short(test)} (plain too): {why or said}")
        if why is None:
            unknown.append(f"{test}: {said}")
    tests = dict.fromkeys(test for one in runs.values() for test in one.outcomes)
    for test in tests:
        mine = {kind: one.outcomes.get(test, ("missing", "")) for kind, one in runs.items()}
        other = [kind for kind, (outcome, _) in mine.items() if outcome != mine["plain"][0]]
        if not other:
            continue
        why, said = reason(test, REASONS), mine[other[0]][1]
        lines.append(f"{short(test)} ({', '.join(other)}): {why or said}")
        if why is None:
            unknown.append(f"{test} ({', '.join(other)}): {said}")
    return lines, unknown


def short(test: str) -> str:
    return f"`{test.rsplit('::', 1)[-1]}`"


def page(rows: Mapping[str, Mapping[str, Run]], command: str) -> str:
    """Return the page: a row for each suite."""
    kinds = "with its own caches and with ours"
    out = [HEAD.format(mlx_lm=version("mlx-lm"), kinds=kinds)]
    for suite, runs in rows.items():
        lines = "<br>".join(differences(runs)[0]) or "nothing"
        counts = " | ".join(runs[kind].count for kind in plugin.KINDS)
        models = " / ".join(map(str, runs["int4"].models.values()))
        out.append(f"| {suite} | {models} | {counts} | {lines} |\n")
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    out.append(f"\nMade by `{command}` on {machine()['chip']}; {used}.\n")
    return "".join(out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("peer_tests", __doc__)
    add = parser.add_argument
    add("--tests", type=Path, required=True, help="folder of mlx-lm's tests")
    add("--suites", type=words, default=SUITES, help=f"default: {','.join(SUITES)}")
    add("--out", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    check_out(args.out)
    for suite in args.suites:
        if not (args.tests / f"{suite}.py").is_file():
            raise UserError(f"[--tests] no {suite}.py there; got {str(args.tests)!r}")
    rows, unknown = {}, []
    for suite in args.suites:
        rows[suite] = {kind: run(args.tests, suite, kind) for kind in plugin.KINDS}
        unknown += differences(rows[suite])[1]
        counts = ", ".join(f"{kind} {one.count}" for kind, one in rows[suite].items())
        console.note(f"{suite}: {counts}")
    text = page(rows, "python -m experiments.peer_tests --tests FOLDER --out FILE")
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    if unknown:
        raise MachineError("[peer_tests] differences without a reason:\n" + "\n".join(unknown))


if __name__ == "__main__":
    console.run_tool(main)
