"""A plugin of pytest that gives every model of mlx-lm's tests compressed caches, and notes what came of it.

It comes before MLX: nothing of it is imported here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

CACHES, OUT = "MLXKV_PEER_CACHES", "MLXKV_PEER_OUT"  # which caches, and the file of outcomes
KINDS = ("plain", "int4", "tight")
MODEL = "a random qwen2"  # in place of the chat model that the tests fetch

outcomes: dict[str, tuple[str, str]] = {}  # by test: passed, failed or skipped, and the last line


def pytest_configure(config) -> None:
    from experiments.peer_tests import caches

    caches.put(os.environ[CACHES])


def pytest_runtest_setup(item) -> None:
    import mlx.core as mx

    mx.random.seed(0)  # the same weights whatever ran before


def pytest_runtest_logreport(report) -> None:
    name = report.nodeid.rsplit("/", 1)[-1]
    if report.when != "call" and report.outcome == "passed":
        return
    if outcomes.get(name, ("", ""))[0] != "failed":  # a test fails with any of its parts
        said = str(report.longrepr or "").strip().splitlines()[-1:]
        lines = [line for line in str(report.longrepr or "").splitlines() if line.startswith("E  ")]
        outcomes[name] = report.outcome, (lines or said or [""])[0].removeprefix("E").strip()[:160]


def pytest_sessionfinish() -> None:
    from experiments.peer_tests.caches import models

    Path(os.environ[OUT]).write_text(json.dumps({"outcomes": outcomes, "models": models}))
