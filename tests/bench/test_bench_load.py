"""`mlxkv bench load` and `reuse` against servers in this process, and what counts as a failure."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
from bench_workers import fails
from serving import serving

from mlxkv.bench.server import load, reuse
from mlxkv.bench.server.asking import Texts, lengths, parting
from mlxkv.bench.server.load import LoadPlan
from mlxkv.bench.server.reuse import ReusePlan
from mlxkv.bench.server.served import ServerProcess, TimedReply
from mlxkv.cli import main
from mlxkv.errors import UserError

STEPS = [
    {"token": token, "top_logprobs": [{"logprob": -0.5}, {"logprob": -0.5 - gap}]}
    for token, gap in (("The", 3.0), ("Ġcat", 0.01), ("Ġsat", 2.0))
]
ALONE = TimedReply("The cat sat", 0.1, 1.0, 10, 3, steps=STEPS)
PLAN = LoadPlan(
    (), clients=1, minutes=1, chats=1, shortest=9, longest=99, tokens=9, tie=0.05, seed=0
)
REUSE = ReusePlan((), batches=(1,), prompt=9, tokens=9, rounds=1, picture=None)


class Inside(ServerProcess):
    """A server in this process."""

    def __init__(self, *options: str):
        words = [one for one in options if one != "--no-reuse"]
        named: dict = {
            name[2:].replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in zip(words[::2], words[1::2], strict=True)
        }
        named["reuse"] = "--no-reuse" not in options
        self._stack = ExitStack()
        self.server = self._stack.enter_context(serving(named.pop("model"), **named))
        self.port = self.server.server_address[1]

    def rss(self) -> int:
        return 1 << 20

    def close(self) -> int:
        self._stack.close()
        return 0


@pytest.fixture
def inside(monkeypatch):
    for module in (load, reuse):
        monkeypatch.setattr(module, "ServerProcess", Inside)


def document(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_seconds_of_load(inside, model_folder, capsys, monkeypatch):
    monkeypatch.setattr(load, "SAMPLE_SECONDS", 0.1)
    args = ["--model", str(model_folder), "--minutes", "0.03", "--clients", "6", "--chats", "3"]
    args += ["--shortest", "40", "--longest", "300", "--tokens", "4", "--json"]
    code = main(["bench", "load", *args, "--serve", "--kv-memory 4MB"])
    found = document(capsys)
    assert not code and found["problems"] == []
    assert found["replies"] == found["equal"] + found["ties"] >= 6 and found["errors"] == 0
    assert found["tokens_per_second"] > 0 and found["first_p95"] >= found["first_p50"] > 0
    assert found["cached_tokens"] > 0 < found["kv_most"] <= found["kv_bound"] == 4 << 20
    assert found["samples"][-1]["replies"] == found["replies"]


def test_the_prefix_cache_by_batch(inside, model_folder, capsys, tmp_path):
    args = ["--model", str(model_folder), "--batches", "1,3", "--prompt", "500", "--tokens", "4"]
    args += ["--rounds", "1", "--json", "--picture", str(tmp_path / "reuse.svg")]
    assert not main(["bench", "reuse", *args])
    rows = document(capsys)["rows"]
    assert [(row["batch"], row["cache"]) for row in rows] == [
        (batch, way) for batch in (1, 3) for way in reuse.WAYS
    ]
    for off, on, replay in (rows[:3], rows[3:]):
        assert all(row["first"] > 0 for row in (off, on, replay))
        assert off["reused"] == 0 < 0.8 < on["reused"] < replay["reused"] < 1
        assert min(row["tokens_per_second"] for row in (off, on, replay)) > 0
    text = (tmp_path / "reuse.svg").read_text()
    assert text.startswith("<svg") and "requests at once" in text and "replay" in text


def test_where_replies_part():
    assert parting("The cat sat", "The cat sat", STEPS) is None
    found = parting("The cat sat", "The dog sat", STEPS)
    assert found["token"] == 1 and found["gap"] == pytest.approx(0.01)
    assert parting("The cat sat", "The cat", STEPS)["token"] == 2
    assert parting("The cat sat", "A cat sat", STEPS) == {"token": 0, "gap": 3.0}
    assert parting("", "x", [])["gap"] == float("inf")


def samples(*rss: float) -> list[dict]:
    return [
        {"seconds": i, "rss": r * (1 << 30), "bytes": 5, "bound_bytes": 9, "mlx_bytes": 7}
        for i, r in enumerate(rss)
    ]


FLAT = samples(*[1.0] * 11)


@pytest.mark.parametrize(
    ("reply", "memory", "problem"),
    [
        (ALONE, FLAT, None),
        (replace(ALONE, text="The dog"), FLAT, None),  # a tie
        (replace(ALONE, text="A cat"), FLAT, "1 replies differ"),
        (replace(ALONE, error="500 broken"), FLAT, "1 errors: 500 broken"),
        (ALONE, samples(*[0.1, 0.3, 0.6, 0.9], *[1.0] * 7), None),  # warming up
        (ALONE, samples(*[0.1 * i for i in range(11)]), "resident memory grows"),
        (ALONE, [one | {"bytes": 10} for one in FLAT], "more than --kv-memory"),
    ],
)
def test_what_counts_as_a_failure(reply, memory, problem):
    found = load.judge(PLAN, [ALONE], [(0, reply)], memory, 10.0)
    text = "; ".join(found["problems"])
    assert (problem in text) if problem else not text, text


def test_plans_are_checked(capsys):
    for wrong in ({"clients": 0}, {"minutes": 0}, {"longest": 8}, {"tokens": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            replace(PLAN, **wrong)
    for wrong in ({"prompt": 1}, {"tokens": 1}, {"rounds": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            replace(REUSE, **wrong)
    for wrong in ("0", "4,none"):
        assert "[--batches]" in fails(capsys, "bench", "reuse", "--batches", wrong)
    assert lengths(3, 100, 10_000) == [100, 1000, 10_000] and lengths(1, 1, 9) == [9]
    texts = Texts(2.0)
    assert len(texts.cut(40_000, 3)) == 80_000
    first, third = (texts.chat(i, 400)[0] for i in (1, 3))
    assert first == third and first["role"] == "system"


def test_a_server_of_its_own_ends_in_good_order(model_folder):
    """Exit code 0 after requests, with all its threads."""
    with ServerProcess("--model", str(model_folder)) as server:
        messages = [{"role": "user", "content": "hello"}]
        stream = server.ask(messages, 4)
        whole = server.ask(messages, 4, stream=False)
        assert stream.error is None and stream.text == whole.text and len(whole.steps) == 4
        assert stream.tokens == 4 and stream.cached_tokens == 0 < stream.first <= stream.seconds
        assert server.rss() > 1 << 20 and os.path.basename(model_folder) == server.kv()["model"]
        assert server.ask(messages, 0).error.startswith("400 [max_tokens]")
        assert "chat: " in server.output()
        assert server.close() == 0
