"""Tensor parallelism of transformers: each process has the caches of its own kv heads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

pytest.importorskip("transformers.distributed.mixin")  # what spreads a model
HERE = Path(__file__).parents[1] / "support"
# Seconds go into importing torch and transformers in a process that may fork.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    command = [sys.executable, HERE / "tensor_parallel.py", tmp_path_factory.mktemp("ranks")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=HERE.parent, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_processes_say_and_store_what_one_does(found):
    """By `mlxkv.torch`, the public name of the second track, and without MLX."""
    for rank in found:
        assert not rank["mlx"]
        for kv in ("balanced-int3", "static-0.75+int4"):
            one = rank[kv]
            assert one["heads"] == [1] and one["text"]
            assert one["logits"] < 1e-3
            assert one["bytes"] > 50_000 and one["differ"] < 1e-3 * one["bytes"]


def test_what_heads_decide_together_is_refused(found):
    for rank in found:
        for kv in ("oja-0.75+int4", "int4+keep0.5"):
            assert rank[kv].startswith(
                f"[attach] {kv} runs in one process only; got a model spread over 2"
            )
