"""`mlxkv bench reuse`: what the prefix cache saves, by the number of requests at once.

All requests share a document as system prompt; each has its own question. Three ways: `off`, the prefix
cache is off; `on`, one request about the document came before; `replay`, the same requests again.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from mlxkv import console, plots
from mlxkv.bench.server.asking import Texts
from mlxkv.bench.server.served import ServerProcess, TimedReply
from mlxkv.errors import MachineError, UserError

WAYS = ("off", "on", "replay")
OWN = 0.03  # share of the prompt that is the question


@dataclass(frozen=True)
class ReusePlan:
    """Options of `mlxkv bench reuse`. batches: numbers of requests at once. prompt: in tokens."""

    options: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    rounds: int
    picture: Path | None

    def __post_init__(self):
        for name, least in (("prompt", 2), ("tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise UserError(f"[--{name}] must be at least {least}; got {getattr(self, name)}")
        if self.picture is not None and not self.picture.parent.is_dir():
            raise UserError(f"[--picture] no such folder; got {str(self.picture.parent)!r}")


def run(plan: ReusePlan, as_json: bool) -> int:
    """Measure and print."""
    texts, rows = Texts(), []
    room = ("--batch", str(max(plan.batches)), "--max-requests", str(2 * max(plan.batches)))
    for ways in (WAYS[:1], WAYS[1:]):
        more = ("--no-reuse",) if ways == WAYS[:1] else ()
        with ServerProcess(*plan.options, *room, *more) as server:
            head = server.kv()
            texts.calibrate(server, plan.prompt // 2)
            for batch in plan.batches:
                rows += _measure(plan, server, texts, batch, ways)
    rows.sort(key=lambda row: (row["batch"], WAYS.index(row["cache"])))
    title = (
        f"{head['model']} · --kv {head['kv']} · {head['backend']} · prompts of {plan.prompt} tokens"
    )
    show(rows, title)
    if plan.picture is not None:
        plan.picture.write_text(picture(rows, title), encoding="utf-8")
    if as_json:
        data = asdict(plan) | {"picture": str(plan.picture) if plan.picture else None}
        console.print_json({"plan": data, "model": head["model"], "kv": head["kv"], "rows": rows})
    return 0


def _measure(plan: ReusePlan, server: ServerProcess, texts: Texts, batch: int, ways) -> list[dict]:
    """Measure `batch` requests at once in each of `ways`: a row for each."""
    found: dict[str, list[tuple[float, list[TimedReply]]]] = {way: [] for way in ways}
    for turn in range(plan.rounds):
        start = 1000 * batch + 100 * turn
        document = texts.cut(round(plan.prompt * (1 - OWN)), start)
        chats = [_chat(texts, plan, document, start + 1 + i) for i in range(batch)]
        if "on" in ways:
            _all_right(server.ask(_chat(texts, plan, document, start), 1))
        for way in ways:
            found[way].append(_together(server, chats, plan.tokens))
    return [_row(batch, way, rounds) for way, rounds in found.items()]


def _chat(texts: Texts, plan: ReusePlan, document: str, start: int) -> list[dict]:
    own = texts.cut(round(plan.prompt * OWN), start)
    return [{"role": "system", "content": document}, {"role": "user", "content": own}]


def _together(server: ServerProcess, chats: list, tokens: int) -> tuple[float, list[TimedReply]]:
    """Ask all chats at once: seconds for all, and the replies."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(chats)) as pool:
        replies = list(pool.map(lambda chat: server.ask(chat, tokens), chats))
    return time.perf_counter() - start, [_all_right(reply) for reply in replies]


def _all_right(reply: TimedReply) -> TimedReply:
    if reply.error is not None:
        raise MachineError(f"[bench] a request failed: {reply.error}")
    return reply


def _row(batch: int, way: str, rounds: list[tuple[float, list[TimedReply]]]) -> dict:
    replies = [reply for _, some in rounds for reply in some]
    firsts = [reply.first for reply in replies if reply.first is not None]
    rates = [rate for reply in replies if (rate := reply.decode_rate)]
    total = [sum(reply.tokens for reply in some) / seconds for seconds, some in rounds]
    prompts = sum(reply.prompt_tokens for reply in replies)
    return {
        "batch": batch,
        "cache": way,
        "reused": round(sum(reply.cached_tokens for reply in replies) / prompts, 4),
        "first": round(median(firsts), 4) if firsts else None,
        "user_tokens_per_second": round(median(rates), 2) if rates else None,
        "tokens_per_second": round(median(total), 2),
    }


def show(rows: list[dict], title: str) -> None:
    columns = ["at once", "cache", "reused", "first token, s", "tokens/s, one", "tokens/s, all"]
    lines = [
        (row["batch"], row["cache"], f"{row['reused']:.0%}", row["first"])
        + (row["user_tokens_per_second"], row["tokens_per_second"])
        for row in rows
    ]
    console.print_table(columns, lines, title)


def picture(rows: list[dict], title: str) -> str:
    """First token and speed by how many ask at once, a line for each way: SVG."""
    panels = {
        "first": "seconds to the first token",
        "user_tokens_per_second": "tokens per second, each",
        "tokens_per_second": "tokens per second, all",
    }
    batches = sorted({row["batch"] for row in rows})
    with plots.pyplot("--picture") as plt:
        figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.4))
        for axis, (key, label) in zip(axes, panels.items(), strict=True):
            for index, way in enumerate(WAYS):
                points = [
                    (row["batch"], row[key])
                    for row in rows
                    if row["cache"] == way and row[key] is not None
                ]
                if points:
                    style = {"marker": "os^"[index], "color": f"C{index}"}
                    axis.plot(*zip(*points, strict=True), label=way, **style)
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches, [str(batch) for batch in batches])
            axis.set_xlabel("requests at once")
            axis.set_title(label, fontsize=10)
            if key == "first":
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        axes[-1].legend(title="prefix cache", loc="upper left", bbox_to_anchor=(1.02, 1))
        figure.suptitle(title, fontsize=10)
        figure.tight_layout()
        return plots.svg(figure)
