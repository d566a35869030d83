"""`mlxkv eval` as users run it: report, verdicts, going on after a kill, errors in one line."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_models import TINY

from mlxkv.calibration.fitting import find_calibration
from mlxkv.cli import main
from mlxkv.codec.codec import Codec
from mlxkv.errors import MachineError
from mlxkv.eval import engine, plots, report, retrieval, verdict
from mlxkv.eval import run as evaluation
from mlxkv.eval.arms import Arms
from mlxkv.eval.engine import Part, TaskOptions, computed, row_of
from mlxkv.eval.rows import Rows
from mlxkv.formats.calibration import artifact
from mlxkv.formats.names import parse_kv
from mlxkv.loading.load import load

SMALL = TaskOptions(contexts=(512,), decode=16, questions=2, samples=2)


@pytest.fixture
def planned(model_folder):
    """Arms and parts."""
    arms = Arms(load(str(model_folder), "fp16"), ("int4",), (64, 64))
    return arms, evaluation.parts_of(arms, ("divergence",), SMALL)


@pytest.mark.slow
def test_a_whole_run_on_a_random_model(model_folder, tmp_path, monkeypatch, capsys):
    """Every task; the report has what the tables promise."""
    out = tmp_path / "report"
    name = "int4/srft-int2+g32"
    command = ["eval", "--model", str(model_folder), "--kv", name, "--context", "512,640"]
    options = ["--tasks", "divergence,retrieval", "--out", str(out), "--json"]
    monkeypatch.setattr(evaluation, "QUESTIONS_CPU", 2)
    monkeypatch.setattr(retrieval, "PER_VALUE", 1)  # random weights answer nothing
    monkeypatch.setattr(retrieval, "START", 2)
    monkeypatch.setattr(evaluation, "QUICK", replace(evaluation.QUICK, decode=4))
    assert main([*command, *options, "--samples", "5"]) == 0
    printed = capsys.readouterr()
    brief = json.loads(printed.out.splitlines()[-1])
    assert set(brief["presets"]) == {"fp16", name} == {"fp16", *brief["windows"]}
    assert brief["context"] == 640 and set(brief["rows"]) == {"512", "640"}
    row = brief["presets"][name]
    assert {"bits_per_value", "ppl", "kl_mean", "kl_p99", "top1", "retrieval"} <= set(row)
    assert set(row["retrieval"]) == {"single", "multi-key", "multi-query", "multi-value"}
    assert brief["presets"]["fp16"]["kl_mean"] == 0.0
    check_intervals(row, brief)
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert "divergence-512" in data["parts"] and data["machine"]["chip"]
    check_page(out, name)


def stored(arms, part, name, rows):
    return rows.get(*row_of(arms, part, name))


def check_intervals(row: dict, brief: dict) -> None:
    assert row["texts"] == 5 and row["documents"] == 2
    assert row["kl_interval"][0] <= row["kl_mean"] <= row["kl_interval"][1]
    assert row["top1_interval"][0] <= row["top1"] <= row["top1_interval"][1]
    assert brief["presets"]["fp16"]["kl_interval"] == [0.0, 0.0]
    low, high = row["retrieval_interval"]["single"]
    assert 0 <= low <= row["retrieval"]["single"] <= high <= 1


def check_page(out: Path, name: str) -> None:
    """The page has a table and sentences for each context, and its picture."""
    text = (out / "report.md").read_text(encoding="utf-8")
    assert text.count("\n| --- |") == 2 and text.count("![") == 1
    assert (out / "report.svg").read_text(encoding="utf-8").startswith("<svg")
    for context in (512, 640):
        assert f"## {context} tokens" in text
    verdict = rf"- \*\*{re.escape(name)}\*\* \((?:green|amber|red|open)\): "
    assert len(re.findall(verdict, text)) == 2


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path / "rows.jsonl")


def test_a_killed_run_goes_on(planned, rows, capsys):
    arms, parts = planned
    first = [results for _, results in computed(arms, parts, rows)]
    calls = []
    watched = [replace(p, run=lambda *a: calls.append(a)) for p in parts]
    assert [results for _, results in computed(arms, watched, rows)] == first
    assert not calls
    assert "kept from before" in capsys.readouterr().err
    assert len(parts) == 2 and len({one["fp16"]["name"] for one in first}) == 2
    # A result that was cut while it was written, and one of another question, are done again.
    text = rows.file.read_text()
    rows.file.write_text(text[:-100])
    cut = Rows(rows.file)
    assert stored(arms, parts[1], "int4", cut) is None
    assert stored(arms, parts[0], "fp16", cut) == first[0]["fp16"]
    assert stored(arms, replace(parts[0], asks={"text": "another"}), "fp16", cut) is None
    assert [results for _, results in computed(arms, parts, cut)] == first
    again = rows.file.read_text()
    assert again.startswith(text[:-100] + "\n") and again.splitlines()[-1] == text.splitlines()[-1]


def test_a_preset_that_fails_leaves_the_others(planned, rows, capsys):
    arms, (part, _) = planned

    def run(arms, names, progress):
        for name in names:
            if name == "fp16":
                raise ValueError("of this one")
            yield name, {"kl": 1}

    failing = replace(part, run=run)
    with pytest.raises(ValueError, match="of this one"):
        computed(arms, [failing], rows)
    assert computed(arms, [failing], rows, tolerant=True) == [(failing, {"int4": {"kl": 1}})]
    assert "fp16: ValueError: of this one" in capsys.readouterr().err
    assert stored(arms, failing, "fp16", Rows(rows.file)) is None, "it is tried again"
    memory = replace(part, run=lambda *_: memory_error())
    with pytest.raises(MachineError, match="memory ran out with fp16"):
        computed(arms, [memory], rows, tolerant=True)


def test_texts_that_are_read_at_once_have_rows_of_their_own(planned, rows):
    arms, (part, other) = planned

    def run(arms, names, progress):
        for name in names:
            if name == "fp16":
                raise ValueError("of this one")
            yield name, [{"kl": 1}, {"kl": 2}]

    both = replace(part, run=run, beside=(other,))
    found = computed(arms, [both], rows, tolerant=True)
    assert found == [(both, {"int4": {"kl": 1}}), (other, {"int4": {"kl": 2}})]
    written = [json.loads(line) for line in rows.file.read_text().splitlines()]
    assert [(row["preset"], row["text"], "error" in row) for row in written] == [
        ("fp16", part.text, True), ("fp16", other.text, True),
        ("int4", part.text, False), ("int4", other.text, False),
    ]  # fmt: skip


def memory_error():
    raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes")


def test_results_belong_to_a_model_its_type_windows_and_versions(
    subtests, planned, rows, monkeypatch
):
    arms, (part, _) = planned
    rows.add(*row_of(arms, part, "int4"), {"kl": 1})
    assert stored(arms, part, "int4", rows) == {"kl": 1}
    assert stored(Arms(arms.loaded, ("int4",), (16, 16)), part, "int4", rows) is None
    other = Arms(arms.loaded, {"int4": parse_kv("int3")}, "64,64")
    assert stored(other, part, "int4", rows) is None
    for name, change in {
        "model": (arms.loaded, "fingerprint", "another"),
        "type": (arms.loaded, "dtype", "another"),
        "mlxkv": (engine, "__version__", "another"),
        "MLX": (engine.mx, "__version__", "another"),
        "backend": (engine, "device_type", lambda: "another"),
    }.items():
        with subtests.test(name), monkeypatch.context() as patch:
            patch.setattr(*change)
            assert stored(arms, part, "int4", rows) is None


def test_figures_of_a_report_are_of_their_leg_and_context(planned, rows):
    arms, parts = planned
    results = computed(arms, parts, rows)
    for part, by_arm in list(results):
        larger = {arm: {**of, "kv_bytes": of["kv_bytes"] + 1} for arm, of in by_arm.items()}
        results.append((replace(part, context=640), larger))
    data = report.assemble(arms, replace(SMALL, contexts=(640, 512)), results, (64, 64))
    pooled = data["parts"]
    for context in ("512", "640"):
        row, of = data["rows"][context]["int4"], pooled[f"divergence-{context}"]["int4"]
        decode, prompt = of["legs"]["decode"], of["legs"]["prompt"]
        assert row["kv_bytes"] == of["kv_bytes"] and row["top1"] == decode["same_top"]
        assert (row["ppl"], row["prompt_ppl"]) == (decode["ppl"], prompt["ppl"])
        for name in ("mean", "p99"):
            kl = row[f"kl_{name}"], row[f"prompt_kl_{name}"]
            assert kl == (decode["kl"][name], prompt["kl"][name]) and kl[0] != kl[1]
        assert 4 < row["bits_per_value"] < row["bits_with_windows"] < 16
    assert data["context"] == 640 and data["presets"] == data["rows"]["640"]
    assert data["rows"]["512"] != data["rows"]["640"]


def test_a_stopped_run_says_what_is_kept(planned, rows, capsys):
    arms, parts = planned

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        computed(arms, [parts[0], replace(parts[1], run=stop)], rows)
    said = " ".join(capsys.readouterr().err.split())
    assert "stopped; 1 of 2 parts are kept in" in said and "the same command continues" in said
    computed(arms, parts, rows)
    assert capsys.readouterr().err == "reading: 50% kept from before\n"


def shuffled(encode):
    """`Codec.encode` with the tokens of each page in another order."""

    def wrong(self, x):
        stored = encode(self, x)
        return stored | {"codes": stored["codes"][:, :, ::-1]}

    return wrong


@pytest.mark.slow
def test_a_broken_cache_is_red(tmp_path, monkeypatch, capsys):
    """A cache that works is green, on the trained model. Without matplotlib the report says so."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["eval", "--model", TINY, "--kv", "naive-int8", "--tasks", "divergence", "--json"]
    command += ["--context", "256", "--windows", "16,16", "--out", str(tmp_path)]
    monkeypatch.setattr(evaluation, "SHORTEST", 256)
    monkeypatch.setattr(evaluation, "QUICK", replace(evaluation.QUICK, decode=4))
    assert main(command) == 0
    sound = json.loads(capsys.readouterr().out.splitlines()[-1])["presets"]
    assert sound["naive-int8"]["verdict"] == "green" and sound["fp16"]["verdict"] is None
    monkeypatch.setattr(Codec, "encode", shuffled(Codec.encode))
    kept = tmp_path / "rows.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    kept.write_text("".join(line for line in lines if '"preset": "fp16"' in line), encoding="utf-8")
    assert main(command) == 0
    broken = json.loads(capsys.readouterr().out.splitlines()[-1])["presets"]
    assert broken["naive-int8"]["verdict"] == "red" and "mean KL" in broken["naive-int8"]["reason"]
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "pip install matplotlib" in page and not (tmp_path / "report.svg").exists()


FINE = {
    "kl_mean": 1e-4,
    "kl_interval": [5e-5, 3e-4],
    "top1": 0.99,
    "top1_interval": [0.98, 1.0],
    "texts": 8,
    "retrieval_lost": {"single": [0.0, -0.03, 0.03], "multi-query": [0.0, -0.02, 0.02]},
    "retrieval_values": {"single": 128, "multi-query": 512},
}


def test_verdicts(subtests):
    for change, colour, reason in [
        ({}, "green", ""),
        ({"kl_mean": 0.02, "kl_interval": [0.011, 0.05]}, "amber", "mean KL 0.02 [0.011, 0.05]"),
        ({"kl_mean": 0.2, "kl_interval": [0.11, 0.5]}, "red", "mean KL 0.2 [0.11, 0.5]"),
        ({"kl_mean": 0.008, "kl_interval": [0.004, 0.02]}, "open", "green or amber; mean KL 0.008"),
        ({"kl_mean": 0.05, "kl_interval": [0.004, 0.2]}, "open", "green or red; mean KL 0.05"),
        ({"kl_mean": float("nan"), "kl_interval": None}, "red", "mean KL nan"),
        ({"kl_interval": None, "texts": 3}, "open", "3 texts are too few for an interval"),
        ({"kl_mean": 0.2, "kl_interval": None, "texts": 3}, "open", "3 texts are too few"),
        ({"top1": 0.95, "top1_interval": [0.94, 0.96]}, "amber", "same top 95.0 % [94.0, 96.0]"),
        ({"top1": 0.96, "top1_interval": [0.94, 0.98]}, "open", "green or amber; same top"),
        ({"retrieval_lost": {"single": [0.06, 0.04, 0.09]}}, "amber", "single 6 points [4, 9]"),
        ({"retrieval_lost": {"single": [0.5, 0.3, 0.7]}}, "red", "single 50 points [30, 70]"),
        (
            {"retrieval_lost": {"single": [0.0, -0.2, 0.2]}, "retrieval_values": {"single": 16}},
            "green",
            "16 values leave open up to 20 points below fp16 in retrieval",
        ),
    ]:
        with subtests.test(change=change, colour=colour, reason=reason):
            found, why = verdict.judge(FINE | change)
            assert found == colour and reason in why and bool(why) == bool(reason)


def test_bad_options_are_one_line(subtests, tmp_path, monkeypatch, capsys):
    for options, words in [
        (["--kv", "int4,int5"], ["[--kv]", "int5", "int8"]),
        (["--context", "100"], ["[--context]", "512"]),
        (["--context", "2k,100"], ["[--context]", "512", "got 100"]),
        (["--context", "2k,x"], ["[--context]", "'x'"]),
        (["--tasks", "divergence,speed"], ["[--tasks]", "speed", "retrieval"]),
        (["--tasks", "stages"], ["[--tasks]", "stages", "divergence"]),
        (["--windows", "64"], ["[--windows]", "64,64"]),
        (["--samples", "0"], ["[--samples]", "at least 1"]),
        (["--text", "no-such-file.txt"], ["no-such-file.txt"]),
        (["--model", "no-such-model"], ["[--model]", "no-such-model"]),
        (["--calibration", "none.safetensors"], ["[calibration]", "none.safetensors"]),
    ]:
        with subtests.test(options=options, words=words):
            monkeypatch.chdir(tmp_path)
            assert main(["eval", *options]) == 2
            printed = capsys.readouterr()
            lines = printed.err.strip().splitlines()
            assert len(lines) == 1 and all(word in lines[0] for word in words), lines
            assert printed.out == "" and list(tmp_path.iterdir()) == []


def test_results_belong_to_a_calibration_and_its_clips(tmp_path, rows):
    """With --calibration FILE, other clips make a kept result unusable."""
    loaded = load(TINY, "fp16")
    own = find_calibration(loaded.model)
    part, files = Part("divergence", "1", 512, lambda *_: (), 1), {}
    layers = {
        name: replace(layer, keys=replace(layer.keys, clips={"int2 g128": 0.5}))
        for name, layer in own.layers.items()
    }
    changed = {"own": own, "clips": replace(own, layers=layers)}
    for name, made in changed.items():
        files[name] = tmp_path / f"{name}.safetensors"
        artifact.write_calibration(files[name], made)

    def arms(file):
        return Arms(load(TINY, "fp16", calibration=str(file)), ("oscar-int2", "int4"), (64, 64))

    first = arms(files["own"])
    for name in ("oscar-int2", "int4"):
        rows.add(*row_of(first, part, name), {"kl": 1})
    for name, file in files.items():
        kept = {arm: stored(arms(file), part, arm, rows) for arm in ("oscar-int2", "int4")}
        assert kept["int4"] == {"kl": 1}  # needs none
        assert kept["oscar-int2"] == ({"kl": 1} if name == "own" else None), name


def test_an_out_that_cannot_be_written(model_folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    command = ["eval", "--model", str(model_folder), "--tasks", "divergence", "--context", "512"]
    assert main([*command, "--out", str(tmp_path / "file")]) == 2
    assert "[--out]" in capsys.readouterr().err.splitlines()[-1]


def test_a_context_longer_than_the_model_was_made_for_is_refused(capsys, monkeypatch):
    """Before any text is read."""
    monkeypatch.setattr(evaluation.engine, "computed", None)
    assert main(["eval", "-m", TINY, "--context", "2k,8193"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"longer than {TINY} was made for; got 8193; choose 8192" in line


def test_a_picture_shows_means_and_the_worst_percent():
    pytest.importorskip("matplotlib")

    def drawn(mean: float, worst: float) -> str:
        rows = {
            name: {"bits_per_value": bits, "kl_mean": bits * mean, "kl_p99": bits * worst}
            for name, bits in (("fp16", 16), ("int4", 4), ("int2", 2))
        }
        return plots.bits({"model": "some", "rows": {"512": rows}})

    first = drawn(1e-3, 1e-2)
    assert drawn(1e-3, 1e-2) == first != drawn(1e-3, 5e-2)
    assert first != drawn(5e-3, 1e-2)
