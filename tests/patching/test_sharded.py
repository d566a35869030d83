"""A model in two processes, each with half of the kv heads: caches are halves, logits are the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from random_models import write_model
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
def test_caches_of_a_sharded_model(tmp_path):
    folder = write_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    for code, out, err in processes(tmp_path, str(SCRIPT), str(folder), "balanced-int2"):
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found["size"] == 2 and found["error"] < 1e-4
        assert found["bytes"][0] == 2 * found["bytes"][1] > 0


@pytest.mark.slow
def test_steps_of_a_sharded_model_are_traced(tmp_path):
    """The sums of a trace are those of a step by Python: processes stay in step where one alone traces."""
    folder = write_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    found = []
    for code, out, err in processes(tmp_path, str(SCRIPT), str(folder)):
        assert code == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    ways = [way for one in found for way in one]
    assert len({tuple(way["tokens"]) for way in ways}) == 1
    assert [[way["traced"] > 0 for way in one] for one in found] == [
        [False, True, True, False],
        [False, True, False, True],
    ]
    assert not any(way["refused"] for way in ways)
    assert len(set(ways[0]["tokens"])) > 3
