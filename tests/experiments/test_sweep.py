"""Many presets beside SDPA: what runs and what is shown. test_bench.py tests the timing."""

import argparse
import json

import pytest

from experiments import sweep
from mlxkv.bench.kernels import run
from mlxkv.doctor import checks
from mlxkv.errors import UserError
from mlxkv.formats.lowrank import Fill
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.records import why_no_record
from mlxkv.formats.tile import Kitty

SHAPE = "B1.H4.G2.D64"


def test_every_preset_that_compresses_is_of_one_kind():
    groups = sweep.alike()
    named = sorted(name for others in groups.values() for name in others)
    assert named == sorted(name for name in PRESETS if PRESETS[name].compresses)
    assert "srft-int4+g64" in groups["hadamard-int4"]  # another rotation, the same work
    assert groups["kvarn-int4"] == ["kvarn-int4", "kvarn-int4+fixed"]
    assert "naive-int4" in groups  # no rotation
    assert groups["static-0.75"] == [
        "static-0.75",
        "static-0.75+windows",
        "oja-0.75",
        "oja-0.75+pinned",
    ]


@pytest.mark.parametrize("name", sweep.alike())
def test_bench_kernels_takes_every_kind(name):
    assert run._preset(name) == parse_kv(name)
    assert run._cases(SHAPE, "1k", {name: parse_kv(name)})


@pytest.mark.parametrize("name", ("fp16", "fp16/int4"))
def test_full_precision_is_no_preset_to_time(name):
    with pytest.raises(UserError, match="full precision is timed beside the others"):
        run._preset(name)


def test_encoded_tokens_are_whole_pages_of_every_preset():
    with pytest.raises(UserError, match="multiple of 128"):
        run._encode_tokens("64", 128)


def test_rows_reasons_and_the_file(monkeypatch, tmp_path, capsys):
    """Workers run here: one preset that is timed, one that cannot be stored, one that fails."""

    def here(jobs, args):
        numbers = args.tokens, args.calls, args.rounds
        rows = [sweep.time_one(*job, *numbers, lambda: None) for job in jobs if job[0] != "int8"]
        return rows or [{"preset": "int8", "shape": SHAPE, "bits": None, "reason": "no memory"}]

    monkeypatch.setattr(sweep, "_wave", here)
    path = tmp_path / "rows.json"
    given = ["--kv", "polar-tree,int8", "--shapes", SHAPE, "--context", "400", "--workers", "1"]
    assert sweep.main([*given, "--calls", "1", "--rounds", "1", "--json", str(path)]) == 1
    first, second = json.loads(path.read_text())
    assert first["us"] > 0 and first["sdpa_us"] > 0 and first["rms"] < 1e-5
    assert first["reason"] is None and second["reason"] == "no memory"
    assert "1 of 2 timed" in capsys.readouterr().out
    row = sweep.time_one("polar-tree", "B1.H4.G2.D72", 400, 1, 1, lambda: None)
    assert "multiple of 16 dims" in row["reason"]
    with pytest.raises(UserError, match=r"\[--context\] nothing is compressed"):
        sweep.main(["--kv", "int4", "--context", "64"])


@pytest.mark.slow
def test_workers_build_side_by_side_and_take_turns():
    args = argparse.Namespace(tokens=400, calls=1, rounds=1)
    rows = sweep._wave([("int8", SHAPE), ("no such preset", SHAPE)], args)
    assert rows[0]["ratio"] > 0 and rows[0]["reason"] is None
    assert rows[1]["reason"] == "its process failed"


def test_doctor_judges_a_preset_of_every_method_with_kernels():
    judged = {row["preset"] for row in checks.rows(lambda what: None)}
    methods = {type(parse_kv(name).keys.quantizer) for name in judged}
    every = {
        type(c.keys.quantizer)
        for c in PRESETS.values()
        if c.compresses and why_no_record(c.keys.quantizer, 128, c.page) is None
    }
    # Bits by direction are no preset: any number of them is a name.
    assert methods == {*every, Fill} and Kitty not in every
