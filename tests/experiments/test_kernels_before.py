"""Kernels of two checkouts in one process; here both are this one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_attention_and_quantizing_are_timed_in_turns(subtests):
    command = [sys.executable, "-m", "experiments.kernels_before", str(ROOT), "--kv", "int4"]
    command += ["--shape", "1,2,1,64", "--tokens", "512", "--rounds", "1"]
    for more in ([], ["--seal"]):
        with subtests.test(more=more):
            ran = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            lines = [line.split() for line in ran.stdout.splitlines() if "─" not in line]
            head, row = filter(None, lines)
            assert head[:4] == ["preset", "mlxkv_older", "mlxkv", "again"]
            assert row[0] == "int4" and all(float(cell) > 0 for cell in row[1:])
