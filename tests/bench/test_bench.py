"""The bench commands: what they print, in which order they run, what they refuse."""

import json
import time

import mlx.core as mx
import pytest
from methods import config_named
from mlx_lm.models import base
from random_models import config_of, random_model
from small_models import TINY

from mlxkv.bench import decode, steps, subject
from mlxkv.bench.decode import measure
from mlxkv.bench.kernels import attend, case, encode, run
from mlxkv.bench.kernels.case import KernelShape
from mlxkv.cli import main
from mlxkv.errors import MachineError
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch, predict, timing
from mlxkv.patching.mark import steps_of

SHAPE = KernelShape(1, 2, 1, 64)
LAST = KernelShape(1, 4, 2, 64)
ONE = ("--kv", "int4")
TINY_RUN = ("--contexts", "320")


def small_subject(family: str = "gemma3_text", **changes) -> subject.Subject:
    return subject.Subject(
        random_model(family, **changes), config_of(family) | changes, "random", mx.float32
    )


def said(capsys, *args) -> tuple[str, dict]:
    """Run a command that succeeds: (its output, the JSON of its last line)."""
    assert main([str(arg) for arg in args]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def fails(capsys, *args) -> str:
    """Run a command that refuses its options: its one line of error."""
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    return err


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small arrays and few repeats: only a number is wanted."""
    monkeypatch.setattr(run, "SHAPES", (SHAPE,))
    monkeypatch.setattr(run, "CALLS", 2)
    monkeypatch.setattr(run, "ROUNDS", 1)
    monkeypatch.setattr(run, "ENCODE_SHAPE", SHAPE)
    monkeypatch.setattr(encode, "PAGES", 1)
    monkeypatch.setattr(run, "ENCODE_TOKENS_CPU", 130)
    monkeypatch.setattr(encode, "REPEATS", 1)


def test_the_reference_is_attention(subtests):
    for preset in ["int4", "oscar-int2+g32"]:
        for shape in [KernelShape(2, 4, 2, 64), KernelShape(1, 2, 1, 96)]:
            with subtests.test(preset=preset, shape=shape):
                view = case.filled(config_named(preset), shape, 500, mx.float32)
                assert view.tokens == 500 and view.pages.tokens
                q = shape.queries(mx.float32)
                keys, values = attend.attention.decode_all(view, mx.float32)
                spec = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.2)
                assert attend.relative_rms(attend.reference(q, view, 0.2), spec) < 1e-5


def test_kernels_prints_tables_and_json(capsys, monkeypatch):
    monkeypatch.setattr(run, "SHAPES", (SHAPE, KernelShape(1, 2, 2, 64), LAST))
    out, data = said(capsys, "bench", "kernels", *TINY_RUN, "--json")
    assert set(data) == {"machine", "versions", "rows"}
    assert {"backend", "device", "chip", "copy_gb_s", "link_us"} <= set(data["machine"])
    rows = [row for row in data["rows"] if row["what"] == "attend"]
    assert [row["preset"] for row in rows] == ["int4", "fill-2.25"] * 3
    for row in rows:
        assert not row["wrong"] and row["rms"] < 1e-5
        assert row["ratio"] == pytest.approx(row["sdpa_us"] / row["us"])
        assert row["of_floor"] == pytest.approx(row["floor_us"] / row["us"])
        assert (row["mlx_lm_us"] is None) == (row["shape"] == str(LAST))  # the first two
    assert "us: per call" in out and "2.5 D log2 D" in out and "mlx-lm us" in out


def test_a_prediction_stands_beside_what_a_known_apple_gpu_does(capsys, monkeypatch):
    info = mx.device_info() | {"device_name": "Apple M1"}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(predict.gpu, "known_cores", lambda: None)
    # int4, 4 rows: 1714 cycles of a record, 4 schedulers of 8 cores at 1.278 GHz. int8, 256 dims: 544 bytes, 68 GB/s.
    records = 2 * 4096 / 16
    by_cycles = records * 1714 / (4 * 8 * 1.278) / 1000
    assert predict.attend_us("int4", 128, 2, 4, 4096) == pytest.approx(by_cycles)
    assert predict.attend_us("int4", 128, 2, 16, 4096) == pytest.approx(2 * by_cycles)
    # By multiply-adds 1155 cycles for 4 rows, 885 for 3, and 6 rows are two times 3: less than memory takes for 3.
    for rows, cycles in ((4, 1155), (6, 2 * 885)):
        issue = records * cycles / (4 * 8 * 1.278) / 1000
        assert predict.attend_us("int4", 128, 2, rows, 4096, False) == pytest.approx(
            max(issue, 2 * 4096 * 144 / 68 / 1000)
        )
    by_bytes = 2 * 4096 * 544 / 68 / 1000
    assert predict.attend_us("int8", 256, 2, 4, 4096) == pytest.approx(by_bytes)
    assert predict.attend_us("fill-2.25", 128, 2, 4, 4096) is None
    with launch.using(None):  # tiles are what is predicted
        out, data = said(capsys, "bench", "kernels", *TINY_RUN, "--json")
        assert "predicted us" not in out
        monkeypatch.setattr(run.TileBackend, "name", data["rows"][0]["by"])
        out, data = said(capsys, "bench", "kernels", *TINY_RUN, "--json")
    assert "predicted us" in out
    assert [row["predicted_us"] for row in data["rows"][:2]] == [
        pytest.approx(320 / 16 * 936 / (4 * 8 * 1.278) / 1000),
        None,
    ]
    info["device_name"] = "Apple M4 Max"
    by_bytes = 2 * 4096 * 544 / 1000
    assert predict.attend_us("int8", 256, 2, 4, 4096) == pytest.approx(by_bytes / 546)
    monkeypatch.setattr(predict.gpu, "known_cores", lambda: 32)
    cycles = 2 * 4096 / 16 * 3384 / (4 * 32 * 1.578) / 1000
    assert predict.attend_us("int8", 256, 2, 4, 4096) == pytest.approx(max(by_bytes / 410, cycles))
    info["device_name"] = "Apple M99"
    assert predict.attend_us("int4", 128, 2, 4, 4096) is None


def test_plain_ops_say_why(capsys):
    with launch.using(None):
        out, data = said(capsys, "bench", "kernels", *ONE, *TINY_RUN, "--json")
    assert {row["by"] for row in data["rows"]} == {"plain ops (no GPU here)"}
    assert "plain ops (no GPU here)" in out


@pytest.mark.parametrize("fault", [1.1, float("nan")])
def test_a_wrong_result_gets_no_time(capsys, monkeypatch, fault):
    right = attend.attention.attend
    monkeypatch.setattr(attend.attention, "attend", lambda *args: fault * right(*args))
    out, data = said(capsys, "bench", "kernels", *ONE, *TINY_RUN, "--json")
    assert "WRONG" in out
    row = data["rows"][0]
    assert row["wrong"] and row["us"] is row["ratio"] is None and row["sdpa_us"] > 0


def test_mlx_lm_that_fails_costs_only_its_column(capsys, monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", missing)
    out, data = said(capsys, "bench", "kernels", *ONE, *TINY_RUN, "--json")
    assert data["rows"][0]["mlx_lm_reason"] == "no kernel for this" and data["rows"][0]["us"]
    assert "fails" in out and "mlx-lm fails: no kernel" in out


def test_encoding_is_timed_by_call_and_page(monkeypatch):
    monkeypatch.setattr(encode, "seconds_of", lambda make, repeats: 8e-3)  # of CALLS_CPU calls
    monkeypatch.setattr(encode, "PAGES", 4)
    row = encode.row("int4", parse_kv("int4"), SHAPE, 128, mx.float32, 1e9)
    seconds, values = 8e-3 / encode.CALLS_CPU, 2 * 128 * 64
    speed = values * (4 + 4.5 / 8) / seconds / 1e9
    assert row["encode_ns_per_vector"] == pytest.approx(1e9 * seconds / (2 * 128))
    assert row["encode_gb_s"] == row["unseal_gb_s"] == pytest.approx(speed)
    assert row["encode_of_copy"] == row["unseal_of_copy"] == pytest.approx(speed)
    assert row["page_us"] == pytest.approx(1e6 * 8e-3 / 4)


def test_building_a_chain_is_not_running_it(monkeypatch):
    clock = iter((1.0, 4.0, 11.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    found = timing.chain(lambda q, copy: q + copy, mx.ones(2), [mx.ones(2)], 2)
    assert found == timing.Chain(build=1.5, run=3.5)


def test_kernels_refuses(subtests, capsys):
    for options, words in [
        (("--contexts", "4k,x"), ("[--contexts]", "got 'x'")),
        (("--contexts", "64"), ("[--contexts]", "at least 193")),
        (("--kv", "int4,polar", "--contexts", "200"), ("[--contexts]", "at least 257")),
        (("--kv", "int4,int5"), ("[--kv]", "got 'int5'")),
        (("--kv", "fp16"), ("[--kv]", "got 'fp16'")),
    ]:
        with subtests.test(options=options, words=words):
            line = fails(capsys, "bench", "kernels", *options)
            assert all(word in line for word in words)


def test_decode_refuses(subtests, capsys):
    for options, words in [
        (("--contexts", "1"), ("[--contexts]", "at least 2")),
        (("--kv", "fp16,int5"), ("[--kv]", "got 'int5'")),
        (("--tokens", "0"), ("[--tokens]", "got 0")),
        (("--rounds", "0"), ("[--rounds]", "got 0")),
        (("--bits", "5"), ("[--bits]", "choose from 2, 3, 4")),
        (("--model", TINY, "--bits", "4"), ("[--bits]", "random weights")),
        (("--model", "no-such-model"), ("no-such-model", "choose")),
    ]:
        with subtests.test(options=options, words=words):
            line = fails(capsys, "bench", "decode", *options)
            assert all(word in line for word in words)


def test_random_weights_have_the_bits_that_were_asked_for(bare_folder):
    for bits in (None, 4):
        model = subject.load_subject(str(bare_folder), bits).model
        layers = [m for _, m in model.named_modules() if hasattr(m, "bits")]
        assert {layer.bits for layer in layers} == ({bits} if bits else set())


def test_a_folder_that_is_no_model_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    assert "[--model]" in fails(capsys, "bench", "decode", "--model", tmp_path)


def test_an_unknown_bench_names_the_choices(capsys):
    assert "[bench]" in fails(capsys, "bench", "speed")
    assert "[bench]" in fails(capsys, "bench", "batch")


def test_a_model_in_front_of_a_command_is_not_passed_over(capsys):
    assert "decode --model some" in fails(capsys, "bench", "-m", "some", "decode")


def test_decode_prints_a_table_and_json(capsys, bare_folder, monkeypatch):
    monkeypatch.setattr(decode, "DIRECT_ABOVE_CPU", 300)
    options = ("--contexts", "300,400", "--tokens", "4", "--rounds", "1")
    out, data = said(
        capsys, "bench", "decode", "--model", bare_folder, "--kv", "int4,fp16", *options, "--json"
    )
    assert set(data) == {"machine", "versions", "rows"}
    rows = data["rows"]
    assert [(row["preset"], row["context"]) for row in rows] == [
        *(("int4", 300), ("fp16", 300), ("int4", 400), ("fp16", 400))
    ]
    for row in rows:
        assert row["by"] == {"fp16": "MLX", "int4": "plain ops (no GPU here)"}[row["preset"]]
        assert row["weights"] == "random" and row["runs"] == 2
        assert row["fill"] == ("direct" if row["context"] > 300 else "prefill")
        assert (row["prefill_seconds"] is None) == (row["fill"] == "direct")
        assert isinstance(row["peak_bytes"], int) and row["kv_bytes"] > 0
    for ours, plain in (rows[:2], rows[2:]):
        ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
        assert ours["baseline_ratio"] == pytest.approx(ratio) and plain["baseline_ratio"] == 1
        assert ours["kv_bytes"] < plain["kv_bytes"]
    assert "random weights" in out and "spread" in out


def test_without_fp16_there_is_no_ratio(capsys, bare_folder):
    options = ("--contexts", "500", "--tokens", "1", "--rounds", "1", "--kv", "oscar-int2")
    _, data = said(capsys, "bench", "decode", "--model", bare_folder, *options, "--json")
    assert data["rows"][0]["baseline_ratio"] is None and data["rows"][0]["kv_bytes"]


def test_mlx_lm_s_own_codes_stand_beside(capsys, bare_folder):
    options = ("--contexts", "300", "--tokens", "2", "--rounds", "1", "--kv", "fp16,mlx-lm-kv4")
    _, data = said(capsys, "bench", "decode", "--model", bare_folder, *options, "--json")
    plain, codes = data["rows"]
    assert (codes["preset"], codes["by"]) == ("mlx-lm-kv4", "mlx-lm")
    assert codes["kv_bytes"] < plain["kv_bytes"] and codes["baseline_ratio"] > 0


def test_states_are_never_filled_directly():
    fills = [decode._fill_of(random_model(name), 1 << 17) for name in ("llama", "falcon_h1")]
    assert fills == ["direct", "prefill"]


def test_both_fills_leave_the_same_cache(subtests, gemma_folder):
    """300 tokens of a model with rotating windows, by prefill and directly: offsets and bytes."""
    for preset in ["fp16", "int4"]:
        with subtests.test(preset=preset):
            check_both_fills_leave_the_same_cache(gemma_folder, preset)


def check_both_fills_leave_the_same_cache(gemma_folder, preset):
    it = subject.load_subject(str(gemma_folder), None)
    made, caches = decode.make_prompt_cache, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "make_prompt_cache", lambda m: caches.append(made(m)) or caches[-1])
        for fill in ("prefill", "direct"):
            decode.measure(it, preset, 300, fill, 2)
    assert [c.offset for c in caches[0]] == [c.offset for c in caches[1]]
    assert {c.offset for c in caches[0]} == {300 + decode.WARM + 2}


# -- decode: the parts of a step, how steps are made, full precision through the same steps

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
    it = small_subject("llama")
    call = type(it.model).__call__
    assert measure(it, "fp16-replayed", 70, "prefill", 1, steps_apart=1)["step"] == "replayed"
    assert steps_of(it.model) is None and type(it.model).__call__ is call
    assert "host_ms" not in measure(it, "fp16", 70, "prefill", 1)


def test_a_model_of_nan_has_no_speed():
    it = small_subject("llama")
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


def test_the_device_s_time_is_of_one_step(monkeypatch):
    clock = iter((1.0, 9.0) * 2)  # of TOGETHER steps, twice
    monkeypatch.setattr(steps, "perf_counter", lambda: next(clock))
    step = lambda last: (last + 1, last)  # noqa: E731
    assert steps._together(step, mx.array([0]), 2) == 8.0 / steps.TOGETHER
