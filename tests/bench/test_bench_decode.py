"""`mlxkv bench decode`: the parts of a step, how steps are made, full precision through the same steps."""

import time

import mlx.core as mx
import pytest
from bench_workers import fails, said, subject

from mlxkv.bench import steps
from mlxkv.bench.decode import measure
from mlxkv.errors import MachineError
from mlxkv.models.hooks.mark import steps_of

PARTS = {*steps.NUMBERS, "waits", "step"}


def test_rows_say_how_steps_are_made(capsys, bare_folder):
    options = ("--kv", "fp16,fp16-replayed,fp16-pages,int4", "--contexts", "200", "--tokens", 2)
    options += ("--rounds", 1, "--json", "--model", bare_folder)
    out, data = said(capsys, "bench", "decode", *options)
    rows = {row["preset"]: row for row in data["rows"]}
    assert {name: row["step"] for name, row in rows.items()} == {
        "fp16": "by Python: not attached",
        **dict.fromkeys(("fp16-replayed", "fp16-pages", "int4"), "replayed"),
    }
    assert all(set(row) >= PARTS and row["waits"] in ("host", "device") for row in data["rows"])
    assert rows["int4"]["kv_bytes"] < rows["fp16-pages"]["kv_bytes"]
    assert "fp16: by Python: not attached" in out and "processor time" in out


def test_names_of_the_bench_are_no_presets(subtests, capsys):
    for name in ["fp16-pages", "fp16-replayed"]:
        with subtests.test(name=name):
            assert "[--kv]" in fails(capsys, "chat", "--kv", name, "--prompt", "x")
            assert "[--kv]" in fails(capsys, "bench", "kernels", "--kv", name)


def test_the_model_is_as_it_was_after_a_replayed_row():
    it = subject("llama")
    call = type(it.model).__call__
    assert measure(it, "fp16-replayed", 70, "prefill", 1, steps_apart=1)["step"] == "replayed"
    assert steps_of(it.model) is None and type(it.model).__call__ is call
    assert "host_ms" not in measure(it, "fp16", 70, "prefill", 1)


def test_a_model_of_nan_has_no_speed():
    it = subject("llama")
    it.model.model.norm.weight = it.model.model.norm.weight * mx.nan
    with pytest.raises(MachineError, match="NaN or infinity in the logits with fp16"):
        measure(it, "fp16", 70, "prefill", 1)


class Slow:
    """A model whose call keeps the host busy, or asleep."""

    def __init__(self, seconds: float, asleep: bool):
        self.seconds, self.asleep = seconds, asleep

    def __call__(self, tokens, cache):
        start = time.thread_time()
        if self.asleep:
            time.sleep(self.seconds)
        while not self.asleep and time.thread_time() - start < self.seconds:
            pass
        return mx.zeros((*tokens.shape, 4))

    def parameters(self):
        return {}


@pytest.mark.parametrize("asleep", [False, True])
def test_waiting_is_no_work_of_the_host(monkeypatch, asleep):
    monkeypatch.setattr(steps, "steps_of", lambda model: None)
    found = steps.parts(Slow(0.02, asleep), [], 0, 4)
    assert (found["build_ms"] < 10) == (found["host_ms"] < 10) == asleep
    assert found["host_ms"] + found["wait_ms"] >= 20
    assert found["waits"] == "host" or not asleep
