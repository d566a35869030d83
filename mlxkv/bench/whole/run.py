"""`mlxkv bench`: speed and memory of a model, every preset and context in a fresh process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress

from mlxkv import console
from mlxkv.bench.options import BASELINE
from mlxkv.bench.show import print_machine
from mlxkv.bench.whole import rows
from mlxkv.bench.whole.plan import BenchPlan
from mlxkv.bench.whole.process import call
from mlxkv.errors import MachineError, UserError

INTERRUPTED = 130


class BenchResults:
    """What was measured so far. runs, errors: by (preset, context); copies: GB/s."""

    def __init__(self, about: dict):
        self.about = about
        self.gates: list[dict] = []
        self.runs: dict[tuple[str, int], list[dict]] = defaultdict(list)
        self.errors: dict[tuple[str, int], str] = {}
        self.copies = [about["machine"]["copy_gb_s"]]
        self.interrupted = False

    @property
    def red(self) -> dict[str, str]:
        """Presets that failed their gate -> why they are not timed."""
        return {g["preset"]: f"not timed: {g['reason']}" for g in self.gates if not g["ok"]}


def run(plan: BenchPlan, as_json: bool) -> int:
    """Measure and print. Returns the exit code: 1 if one of the presets or fp16 failed at a context, 130
    after Ctrl-C. A failure of mlx-lm's own caches does not count."""
    # No time limit: the model may have to be downloaded.
    about = call({"task": "about"} | plan.subject, None, show=True)
    if "error" in about:
        kind = UserError if about.get("user") else MachineError
        text = about["error"]
        raise kind(text if text.startswith("[") else f"[bench] {text}")
    plan, found = plan.filled(about["machine"]["backend"]), BenchResults(about)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        per_arm = 2 * plan.rounds * len(plan.contexts)
        bar = bars.add_task(plan.model, total=len(plan.presets) + per_arm * len(plan.arms))
        try:
            _measure(
                plan,
                found,
                lambda text: bars.update(bar, description=text),
                lambda: bars.advance(bar),
            )
        except KeyboardInterrupt:
            found.interrupted = True
    data = document(plan, found)
    print_machine(data["machine"], data["versions"])
    rows.show(data)
    if as_json:
        console.print_json(data)
    if found.interrupted:
        return INTERRUPTED
    ours = (BASELINE, *plan.presets)
    return int(any(r["error"] for r in data["rows"] if r["preset"] in ours))


def _measure(plan: BenchPlan, found: BenchResults, say: Callable, done: Callable) -> None:
    """Fill `found`: the gate of each preset, then the runs, A B B A at each context."""
    for preset in plan.presets:
        say(f"{preset}: correctness")
        answer = call({"task": "gate", "preset": preset} | plan.subject, plan.timeout)
        if "error" in answer:
            answer = {"preset": preset, "ok": False, "reason": answer["error"]}
        found.gates.append({"by": None, "checks": []} | answer)
        done()
    first = True
    for context in plan.contexts:
        for preset in [*plan.arms, *reversed(plan.arms)] * plan.rounds:
            arm = preset, context
            if preset not in found.red and arm not in found.errors:
                if not first:
                    time.sleep(plan.cooldown)
                first = False
                say(f"{preset} {context}")
                _one(plan, found, arm)
            done()
    say("the copy bandwidth again")
    found.copies.append(call({"task": "copy"}, plan.timeout).get("copy_gb_s", 0.0))


def _one(plan: BenchPlan, found: BenchResults, arm: tuple[str, int]) -> None:
    preset, context = arm
    request = {"task": "run", "preset": preset, "context": context, "tokens": plan.tokens}
    answer = call(request | plan.subject, plan.timeout)
    if "error" in answer:
        found.errors[arm] = answer["error"]  # it would fail again: skip its other runs
    else:
        found.runs[arm].append(answer)


def document(plan: BenchPlan, found: BenchResults) -> dict:
    """Results as plain data: what --json prints."""
    machine, model = dict(found.about["machine"]), found.about["model"]
    # The better of two tries, before and after the runs.
    machine["copy_gb_s"] = max(found.copies)
    out = []
    for context in plan.contexts:
        for preset in plan.arms:
            runs = found.runs.get((preset, context), [])
            error = found.red.get(preset) or found.errors.get((preset, context))
            if runs or error:
                out.append(rows.row(preset, context, runs, error))
    rows.add_ratios(out)
    rows.add_shares(out, model["weight_bytes"], 1e9 * machine["copy_gb_s"])
    settings = {"tokens": plan.tokens, "rounds": plan.rounds, "cooldown": plan.cooldown}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine,
        "versions": found.about["versions"],
        "model": model,
        "settings": settings,
        "gates": found.gates,
        "rows": out,
        "interrupted": found.interrupted,
    }
