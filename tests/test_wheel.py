"""The wheel alone, in an environment of its own: what is in it, and that its commands run without the clone."""

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import make_golden
import numpy as np
import pytest
import typer
from small_models import TINY

from mlxkv.spec import bounds

ROOT = Path(__file__).parents[1]
BYTES = 1_350_000  # the golden tables of tests/golden would be three million more


def call(*command, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_a_sample_of_the_golden_tables_and_no_tests(wheel):
    names = ZipFile(wheel).namelist()
    assert wheel.stat().st_size < BYTES
    assert [name for name in names if name.endswith(".safetensors")] == [
        "mlxkv/spec/golden.safetensors"
    ]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"mlxkv", "cuda_track"}


def test_the_wheel_answers_a_question_and_checks_its_formats(wheel, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    call(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel
    )
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    # What it depends on is that of this environment, whose own mlxkv comes behind.
    (site / "others.pth").write_text(str(Path(typer.__file__).parents[1]))
    command = python.with_name("mlxkv")
    options = {"cwd": tmp_path}
    asked = ("chat", "-m", TINY, "--kv", "int4", "--max-tokens", 4, "--prompt", "Once upon a time")
    assert call(command, *asked, **options).strip()
    report = json.loads(call(command, "doctor", "--json", **options).splitlines()[-1])
    assert all(row["ok"] for row in report["golden"]) and 80 < len(report["golden"]) < 200
    where = "import mlxkv, mlxkv.spec.bounds as b; print(mlxkv.__file__, b.FOLDER.is_dir())"
    path, in_clone = call(python, "-c", where, **options).rsplit(maxsplit=1)
    assert Path(path).is_relative_to(site) and in_clone == "False"


def test_importing_mlxkv_compiles_nothing_and_imports_no_framework():
    code = "import sys, mlxkv; print([m for m in ('mlx', 'numpy', 'ctypes') if m in sys.modules])"
    assert call(sys.executable, "-S", "-c", code, cwd=ROOT).strip() == "[]"


OTHERS = {"affine", "balanced", "oscar_released", "softcap"}


def test_the_sample_is_of_the_golden_tables(subtests):
    """Every table but those whose cases others repeat."""
    tensors, headers = make_golden.sample()
    assert headers.keys() == set(make_golden.TABLES) - OTHERS
    for name in headers:
        with subtests.test(name=name):
            stored, header = bounds.read_golden(name, sample=True)
            assert header == json.loads(headers[name]) and stored
            for key, x in stored.items():
                assert np.array_equal(x, tensors[f"{name}/{key}"], equal_nan=True)
