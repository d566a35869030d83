"""`mlxkv bench`: a model as its user runs it, every preset and context in a fresh process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress

from mlxkv import console
from mlxkv.bench import rows, share
from mlxkv.bench.plan import BASELINE, Plan
from mlxkv.bench.process import call
from mlxkv.errors import MachineError, UserError

INTERRUPTED = 130


class Findings:
    """What is known so far, in the order in which it was found."""

    def __init__(self, about: dict):
        self.about = about
        self.gates: list[dict] = []
        self.runs: dict[tuple[str, int], list[dict]] = defaultdict(list)
        self.errors: dict[tuple[str, int], str] = {}
        self.copies = [about["machine"]["copy_gb_s"]]
        self.interrupted = False

    @property
    def red(self) -> dict[str, str]:
        """Presets that are not timed -> why."""
        return {g["preset"]: f"not timed: {g['reason']}" for g in self.gates if not g["ok"]}


def run(plan: Plan, as_json: bool = False) -> int:
    """The command. Returns the exit code: 1 when a preset that was asked for, or fp16, has no speed
    somewhere; 130 after Ctrl-C. mlx-lm's own caches may fail freely."""
    # Without a limit: the model may have to be fetched first.
    about = call({"task": "about"} | plan.subject, None, show=True)
    if "error" in about:
        kind = UserError if about.get("user") else MachineError
        text = about["error"]
        raise kind(text if text.startswith("[") else f"[bench] {text}")
    plan, found = plan.filled(about["machine"]["backend"]), Findings(about)
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
    _show(data)
    unwritten = False
    if plan.share is not None:
        try:
            print(f"written: {share.write(data, plan.share)}")
        except MachineError as error:  # what was measured must not be lost with it
            console.note(str(error))
            unwritten = True
    if as_json:
        console.print_json(data)
    if found.interrupted:
        return INTERRUPTED
    ours = (BASELINE, *plan.presets)
    return int(unwritten or any(r["error"] for r in data["rows"] if r["preset"] in ours))


def _measure(plan: Plan, found: Findings, say: Callable, done: Callable) -> None:
    """Fills `found`: the gate of each preset, then the runs, A B B A at each context."""
    for preset in plan.presets:
        say(f"{preset}: is it right")
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


def _one(plan: Plan, found: Findings, arm: tuple[str, int]) -> None:
    preset, context = arm
    request = {"task": "run", "preset": preset, "context": context, "tokens": plan.tokens}
    answer = call(request | plan.subject, plan.timeout)
    if "error" in answer:
        found.errors[arm] = answer["error"]  # it would fail again: its other runs are left out
    else:
        found.runs[arm].append(answer)


def document(plan: Plan, found: Findings) -> dict:
    """Everything as plain data: what --json prints and --share writes."""
    machine, model = dict(found.about["machine"]), found.about["model"]
    # What the memory can do, of two tries: before the runs and behind them.
    machine["copy_gb_s"] = max(found.copies)
    out = []
    for context in plan.contexts:
        for preset in plan.arms:
            runs = found.runs.get((preset, context), [])
            error = found.red.get(preset) or found.errors.get((preset, context))
            if runs or error:
                out.append(rows.row(preset, context, runs, error))
    rows.compare(out, model["weight_bytes"], 1e9 * machine["copy_gb_s"])
    settings = {"tokens": plan.tokens, "rounds": plan.rounds, "cooldown": plan.cooldown}
    return {
        "format": share.FORMAT,
        "version": share.VERSION,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine,
        "versions": found.about["versions"],
        "model": model,
        "settings": settings,
        "gates": found.gates,
        "rows": out,
        "interrupted": found.interrupted,
    }


def _show(data: dict) -> None:
    machine, power = data["machine"], data["machine"]["power"]
    memory = console.human_bytes(machine["memory_bytes"])
    print(f"{machine['chip']} · {memory} · {machine['system']}")
    print(f"backend {machine['backend']}: {machine['device']}")
    print(f"power {power['source']}, mode {power['mode']}")
    print(" · ".join(f"{name} {text or 'missing'}" for name, text in data["versions"].items()))
    rows.show(data)
