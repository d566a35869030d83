"""Workers and output of `mlxkv bench` without processes, caches with shuffled codes, small subjects."""

from __future__ import annotations

import json
import platform

import mlx.core as mx
from random_models import config_of, random_model

from mlxkv.bench.subject import Subject
from mlxkv.cli import main

RUN = {"by": "MLX", "prefill_seconds": 2.0, "prefill_tokens_per_second": 500.0, "kv_bytes": 300}
RUN |= {"first_token_seconds": 2.1, "tokens_per_second": 50.0, "token_ms": 20.0, "peak_bytes": 900}
RUN |= {"read_bytes": 200}
ABOUT = {
    "machine": {
        "system": f"Linux 6.1.0-{platform.node()} x86_64",
        "chip": "Chip | <9>",
        "memory_bytes": 1 << 34,
        "backend": "cpu",
        "device": "Chip 9",
        "power": {"source": "ac", "mode": "normal"},
        "copy_gb_s": 1e-5,
    },
    "versions": {"mlxkv": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2", "numpy": None},
    "model": {"name": "tiny", "weights": "loaded", "dtype": "float32", "bits": None},
}
ABOUT["model"]["weight_bytes"] = 100


class Workers:
    """Answers without processes: `answers[task]` takes the request. asked: the requests so far."""

    def __init__(self):
        self.asked: list[dict] = []
        self.answers = {
            "about": lambda request: ABOUT,
            "copy": lambda request: {"copy_gb_s": 2e-5},
            "gate": lambda request: {"preset": request["preset"], "ok": True, "reason": None},
            "run": lambda request: RUN,
        }

    def call(self, request: dict, timeout: float | None, show: bool = False) -> dict:
        self.asked.append(request)
        return self.answers[request["task"]](request)


def subject(family: str = "gemma3_text", **changes) -> Subject:
    return Subject(
        random_model(family, **changes), config_of(family) | changes, "random", mx.float32
    )


def shuffle(cache, part: str, side: int) -> None:
    """Other tokens' codes for each token; scales stay where they were."""
    store, name = cache._store, ("keys", "values")[side]
    state = store.state
    x = state[name][part]
    order = mx.random.permutation(x.shape[2], key=mx.random.key(3))
    state[name][part] = mx.take(x, order, axis=2)
    store.restore(state, store.count)


def said(capsys, *args) -> tuple[str, dict]:
    """Run a command that succeeds: (its output, the JSON of its last line)."""
    assert main([str(arg) for arg in args]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def fails(capsys, *args) -> str:
    """Run a command that refuses its options: its one line of error."""
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    return err
