"""Fixtures shared by all tests, and a header that says which backends run."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import fast_blas
import pytest

# Nothing in the suite may reach for the network: a test that does fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads it when it is imported first, by whatever test does so.
os.environ.setdefault("TRITON_INTERPRET", "1")
# The workers of a run share the cores: one thread each for OpenBLAS and torch, read as they load.
os.environ.setdefault("OMP_NUM_THREADS", "1")

BLAS, BLAS_SAID = fast_blas.put_in_front()  # before anything imports MLX


def pytest_report_header() -> list[str]:
    import mlx.core as mx

    found = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    runs = [name for name, there in found.items() if there]
    missing = [name for name, there in found.items() if not there]
    import emulator
    from emulator import nvrtc, strict
    from metal import codegen, parse

    checks = {
        "kernel emulator": emulator.why_not(),
        "watch over memory": None if emulator.can_check() else "needs g++ on Linux x86-64",
        "strict type check": strict.why_not(),
        "Metal texts read by libclang": parse.why_not(),
        "registers and private arrays": codegen.why_not(),
        "CUDA build": nvrtc.why_not(),
    }
    lacking = [f"{name} ({reason})" for name, reason in checks.items() if reason]
    return [
        f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, numpy {version('numpy')}",
        f"BLAS of the CPU backend: {BLAS_SAID}",
        f"backends that run: {', '.join(runs)}; not on this machine: {', '.join(missing) or 'none'}",
        f"kernel checks that do not run: {'; '.join(lacking) or 'none'}",
    ]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A random llama of two layers in the hub's format, with tokenizer and chat template."""
    from random_model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory) -> Path:
    """The same architecture with other weights and one more layer."""
    from random_model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "other", seed=1, num_hidden_layers=3)


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory) -> Path:
    """A random gemma3_text: three sliding layers with a window of 64, one that sees everything."""
    from random_model import write_model

    changes = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "sliding_window_pattern": 4,
        "query_pre_attn_scalar": 64,
    }
    return write_model(tmp_path_factory.mktemp("models") / "gemma", **changes)


@pytest.fixture
def same_blas(monkeypatch):
    """Processes that this test starts multiply as the test does: equal to the last bit."""
    if BLAS:
        monkeypatch.setenv("LD_PRELOAD", str(BLAS))


@pytest.fixture
def without_torch(monkeypatch):
    """Processes that this test starts find no torch, and are there in a third of the time."""
    paths = (str(Path(__file__).parent / "without_torch"), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def loaded(model_folder):
    """The random model with a plain cache."""
    from mlxkv.models import load

    return load(str(model_folder), "fp16")


@pytest.fixture
def workers(monkeypatch):
    """`mlxkv bench` without processes: made-up answers that a test may replace."""
    from bench_workers import Workers

    from mlxkv.bench import whole

    found = Workers()
    monkeypatch.setattr(whole, "call", found.call)
    return found
