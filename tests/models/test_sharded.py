"""A model in two processes, each with half of the kv heads: caches are halves, logits are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from random_model import write_model
from ring import environments

SCRIPT = Path(__file__).parents[1] / "support" / "sharded.py"


def processes(folder: Path, *command: str) -> list[tuple[int, str, str]]:
    """Code, stdout and stderr of two processes of one ring."""
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments(folder)
    ]
    try:
        said = [one.communicate(timeout=PATIENCE) for one in running]
    finally:
        for one in running:
            one.kill()
    return [(one.returncode, *texts) for one, texts in zip(running, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["int4", "balanced-int2+g32"])
def test_caches_of_a_sharded_model(tmp_path, without_torch, preset):
    folder = write_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    for code, out, err in processes(tmp_path, str(SCRIPT), str(folder), preset):
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["size"] == 2 and found["error"] < 1e-4
        assert found["bytes"][0] == 2 * found["bytes"][1] > 0
