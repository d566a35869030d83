"""`mlxkv bench load`: check a server under many streaming clients for minutes.

First a server that batches nothing and keeps nothing answers every distinct chat alone. Then all clients
ask for these chats at random, and every reply is compared with the one given alone.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from statistics import median
from threading import Event, Lock, Thread

from mlxkv import console
from mlxkv.bench.options import check_counts
from mlxkv.bench.server.asking import Texts, lengths, parting
from mlxkv.bench.server.served import ServerProcess, TimedReply
from mlxkv.errors import MachineError, UserError

SAMPLE_SECONDS = 1.0
GROWTH, SPARE = 0.05, 16 << 20  # memory may grow after warm-up by this share and these bytes
WARM = 0.4  # share of the time that is warm-up


@dataclass(frozen=True)
class LoadPlan:
    """Options of `mlxkv bench load`. tie: a reply may part from the one given alone where the two best
    logits are this close (nats)."""

    options: tuple[str, ...]
    clients: int
    minutes: float
    chats: int
    shortest: int
    longest: int
    tokens: int
    tie: float
    seed: int

    def __post_init__(self):
        check_counts(
            clients=self.clients, chats=self.chats, shortest=self.shortest, tokens=self.tokens
        )
        if not 0 < self.minutes < float("inf"):
            raise UserError(f"[--minutes] must be above 0; got {self.minutes:g}")
        if self.longest < self.shortest:
            raise UserError(
                f"[--longest] must be at least {self.shortest}, the shortest; got {self.longest}"
            )


def run(plan: LoadPlan, as_json: bool) -> int:
    """Measure and print. Returns 0, or 1 if there are problems."""
    with ServerProcess(
        *plan.options, "--no-reuse", "--batch", "1", "--prefill-batch", "1"
    ) as server:
        console.note(f"{plan.chats} chats, each alone")
        chats, alone = _alone(plan, server)
    console.note(f"{plan.clients} clients, {plan.minutes:g} minutes")
    server = ServerProcess(*plan.options)
    try:
        start = time.perf_counter()
        replies, samples = _load(plan, server, chats)
        seconds = time.perf_counter() - start
        last = server.kv()
    finally:
        code = server.close()
    found = judge(plan, alone, replies, samples, seconds) | {"exit_code": code, "kv": last["kv"]}
    found |= {"model": last["model"], "backend": last["backend"], "sessions": last["sessions"]}
    if code:
        found["problems"].append(f"the server ended with code {code}")
    show(found, samples)
    if as_json:
        console.print_json({"plan": asdict(plan), **found, "samples": samples})
    return 1 if found["problems"] else 0


def _alone(plan: LoadPlan, server: ServerProcess) -> tuple[list[list[dict]], list[TimedReply]]:
    """Make chats of about the planned lengths in this model's tokens, and get a reply to each."""
    texts, chats, replies = Texts(), [], []
    texts.calibrate(server, plan.longest // 2)
    for index, size in enumerate(lengths(plan.chats, plan.shortest, plan.longest)):
        while True:
            chat = texts.chat(index, size)
            reply = server.ask(chat, plan.tokens, stream=False)
            if reply.error is None:
                break
            if "longer than the model's context" not in reply.error or size < 2:
                raise MachineError(f"[bench] a chat cannot be answered alone: {reply.error}")
            size = int(0.95 * size)  # more tokens per character than other texts
        chats.append(chat)
        replies.append(reply)
    return chats, replies


def _load(
    plan: LoadPlan, server: ServerProcess, chats: list
) -> tuple[list[tuple[int, TimedReply]], list[dict]]:
    """Run the clients. Returns replies with the index of their chat, and samples of memory."""
    replies: list[tuple[int, TimedReply]] = []
    samples: list[dict] = []
    lock, over, start = Lock(), Event(), time.perf_counter()

    def client(number: int) -> None:
        draw = random.Random(f"{plan.seed}.{number}")
        while not over.is_set():
            index = draw.randrange(len(chats))
            reply = server.ask(chats[index], plan.tokens)
            with lock:
                replies.append((index, reply))
            if reply.error is not None:
                over.wait(0.1)

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            samples.append(_sample(server, time.perf_counter() - start, len(replies)))

    threads = [Thread(target=client, args=(i,)) for i in range(plan.clients)]
    threads.append(Thread(target=watch))
    for thread in threads:
        thread.start()
    try:
        over.wait(60 * plan.minutes)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    samples.append(_sample(server, time.perf_counter() - start, len(replies)))
    return replies, samples


def _sample(server: ServerProcess, seconds: float, replies: int) -> dict:
    found = server.kv()
    names = ("bytes", "bound_bytes", "sessions_bytes", "mlx_bytes")
    memory = {name: found["memory"][name] for name in names}
    return {
        "seconds": round(seconds, 1),
        "rss": server.rss(),
        **memory,
        "active": found["active_requests"],
        "replies": replies,
    }


def judge(
    plan: LoadPlan,
    alone: list[TimedReply],
    replies: list[tuple[int, TimedReply]],
    samples: list[dict],
    seconds: float,
) -> dict:
    """Compare the replies and the memory with what the plan allows: results, and a list of `problems`."""
    good = [(index, reply) for index, reply in replies if reply.error is None]
    errors = [reply.error for _, reply in replies if reply.error is not None]
    parted = []
    for index, reply in good:
        if found := parting(alone[index].text, reply.text, alone[index].steps):
            prompt, cached = reply.prompt_tokens, reply.cached_tokens
            parted.append(found | {"chat": index, "prompt": prompt, "cached": cached})
    wrong = [one for one in parted if one["gap"] > plan.tie]
    (before, after), arrays = (_warm(samples, name, seconds) for name in ("rss", "mlx_bytes"))
    problems = [f"{len(errors)} errors: {errors[0]}"] if errors else []
    problems += [] if good else ["no reply came"]
    if wrong:
        problems.append(
            f"{len(wrong)} replies differ from the reply given alone by more than a tie"
        )
    for what, (first, last) in {"resident memory": (before, after), "MLX's memory": arrays}.items():
        if first and last - first > GROWTH * first + SPARE:
            by = console.human_bytes(last - first)
            problems.append(f"{what} grows after warm-up, by {by}")
    if any(one["bytes"] > one["bound_bytes"] for one in samples):
        problems.append("caches took more than --kv-memory")
    firsts = sorted(reply.first for _, reply in good if reply.first is not None)
    rates = [rate for _, reply in good if (rate := reply.decode_rate)]
    return {
        "seconds": round(seconds, 1),
        "replies": len(good),
        "errors": len(errors),
        "retries": sum(reply.retries for _, reply in replies),
        "equal": len(good) - len(parted),
        "ties": len(parted) - len(wrong),
        "different": len(wrong),
        "parted": _distinct(parted),
        "prompt_tokens": sum(reply.prompt_tokens for _, reply in good),
        "cached_tokens": sum(reply.cached_tokens for _, reply in good),
        "tokens": sum(reply.tokens for _, reply in good),
        "tokens_per_second": round(sum(reply.tokens for _, reply in good) / seconds, 2),
        "user_tokens_per_second": round(median(rates), 2) if rates else None,
        "first_p50": round(median(firsts), 3) if firsts else None,
        "first_p95": round(firsts[int(0.95 * (len(firsts) - 1))], 3) if firsts else None,
        "rss_warm": before,
        "rss_end": after,
        "mlx_warm": arrays[0],
        "mlx_end": arrays[1],
        "kv_most": max((one["bytes"] for one in samples), default=0),
        "kv_bound": samples[-1]["bound_bytes"] if samples else None,
        "problems": problems,
    }


def _warm(samples: list[dict], name: str, seconds: float) -> tuple[float, float]:
    """Medians of the first and of the second half of the samples after warm-up."""
    warm = [one[name] for one in samples if one["seconds"] > WARM * seconds]
    half = len(warm) // 2
    first, last = (median(part) if part else 0 for part in (warm[:half], warm[half:]))
    return first, last


def _distinct(parted: list[dict]) -> list[dict]:
    """One dict for each chat and token, with `times`; the widest gaps first."""
    counts: dict[tuple, dict] = {}
    for one in parted:
        key = (one["chat"], one["token"])
        counts.setdefault(key, one | {"times": 0})["times"] += 1
    return sorted(counts.values(), key=lambda one: -one["gap"])


def show(found: dict, samples: list[dict]) -> None:
    """Print the results as tables."""
    size, minute = console.human_bytes, 0.0
    rows = [
        ("replies", f"{found['replies']} in {found['seconds']:.0f} s"),
        ("errors", found["errors"]),
        ("retries", found["retries"]),
        ("equal to the reply given alone", found["equal"]),
        ("... up to a tie", found["ties"]),
        ("... different", found["different"]),
        ("prompt tokens, reused tokens", f"{found['prompt_tokens']}, {found['cached_tokens']}"),
        ("tokens per second, all clients", found["tokens_per_second"]),
        ("tokens per second, one client (median)", found["user_tokens_per_second"]),
        ("first token, s (median, 95 %)", f"{found['first_p50']}, {found['first_p95']}"),
        ("resident, after warm-up", f"{size(found['rss_warm'])}, then {size(found['rss_end'])}"),
        (
            "MLX's arrays, after warm-up",
            f"{size(found['mlx_warm'])}, then {size(found['mlx_end'])}",
        ),
        ("caches, most of bound", f"{size(found['kv_most'])} of {size(found['kv_bound'] or 0)}"),
        ("exit code", found["exit_code"]),
    ]
    title = f"{found['model']} · --kv {found['kv']} · {found['backend']}"
    console.print_table(["load", "found"], rows, title)
    lines, step = [], max(10.0, found["seconds"] / 12)
    for one in samples:
        if one["seconds"] >= minute or one is samples[-1]:
            caches = [size(one[name]) for name in ("rss", "mlx_bytes", "bytes", "sessions_bytes")]
            lines.append((f"{one['seconds']:.0f} s", *caches, one["replies"]))
            minute += step
    console.print_table(["time", "resident", "MLX", "caches", "of these kept", "replies"], lines)
    if found["parted"]:
        lines = [
            (one["chat"], one["prompt"], one["cached"], one["token"], f"{one['gap']:.4f}")
            + (one["times"],)
            for one in found["parted"]
        ]
        columns = ["chat", "prompt", "reused", "parts at token", "gap (nats)", "times"]
        console.print_table(columns, lines)
    for problem in found["problems"]:
        console.note(f"[bench] {problem}")
