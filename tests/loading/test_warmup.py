"""Kernels are built when a model is loaded; what fails later is said, and something else goes on."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import LOST, NOT_BUILT, Failing, counting, make, make_tiles, unbuildable
from random_models import random_model, write_model
from serving import complete, get, refused, serving, text_of

from mlxkv import errors
from mlxkv.cache import selftest
from mlxkv.cache.backends import LatentBackend, PortableBackend, RowsBackend, TileBackend
from mlxkv.cache.choose import KernelPlan
from mlxkv.cache.stores import Codes, Records
from mlxkv.chat.session import Session
from mlxkv.cli import main
from mlxkv.errors import MachineError
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import load
from mlxkv.loading.warmup import not_used, step_down
from mlxkv.metal import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two query heads on one kv head; its numbers are halves, so that tiles read them, too."""
    return write_model(tmp_path_factory.mktemp("models") / "halves")


def talk(session: Session, prompt: str) -> str:
    return "".join(session.ask(prompt))


def session_of(loaded, tokens: int, letters: int = 90) -> Session:
    """Says the likeliest of the first `letters` bytes, and never ends by itself. 90: all of them text."""
    likeliest = lambda logprobs: mx.argmax(logprobs[..., :letters], axis=-1)  # noqa: E731
    return Session(loaded, max_tokens=tokens, sampler=likeliest)


LONG = "a long text to read " * 14  # pages are quantized while it is read


# -- reasons


def test_the_compilers_own_lines_are_the_reason():
    error = RuntimeError(NOT_BUILT)
    assert errors.reason(error) == (
        "program_source:1312:5: error: use of undeclared identifier 'kv_level'; "
        "program_source:1340:9: error: no matching function for call to 'simd_sum'"
    )
    assert errors.text(error).splitlines()[0].endswith("Unable to build metal library from source")
    assert errors.is_of_build(error) and not errors.is_of_memory(error)


def test_reasons_are_one_short_line():
    for said, reason in [
        ("\n\n  first\nsecond", "first"),
        ("", "RuntimeError"),
        ("\x1b[31ma\x1b[0m\x07b\u202ec\td", "abc d"),
        ("x" * 500, "x" * 157 + "..."),
        (
            "\n".join(f"a:{i}: error: {i}" for i in range(9)),
            "a:0: error: 0; a:1: error: 1; a:2: error: 2",
        ),
    ]:
        assert errors.reason(RuntimeError(said)) == reason


def test_a_kernel_that_is_not_built_is_told_from_a_wrong_one():
    found = selftest.test(PRESETS["int4"], 64, mx.float16, PortableBackend(unbuildable()))
    assert not found.built and found.reason.startswith("program_source:1312:5: error: ")
    assert "Unable to build" in found.detail and found.seconds > 0
    lost = Failing("dequantize")
    lost.left = 0
    found = selftest.test(PRESETS["int4"], 64, mx.float16, PortableBackend(lost))
    assert found.built and found.reason == LOST


# -- at load


@pytest.mark.parametrize(
    ("family", "dtype", "tiles"),
    [
        ("llama", mx.bfloat16, True),
        ("gpt_oss", mx.float32, False),  # sinks; MLX's experts are float32 alone on a CPU
    ],
)
def test_nothing_is_built_after_a_model_is_attached(family, dtype, tiles):
    """Long prompts in chunks, short rests of prompts, replies, pages quantized on the way, a way back."""
    model, built = random_model(family), []
    model.set_dtype(dtype)
    factory = counting(built, tiles)
    with launch.using(factory):
        reports = attach(model, "int4")
        assert any(r.compressed and "kernels" in r.kernel for r in reports)
        known = list(built)
        assert len(known) == len(set(known)) and any("quantize" in name for name in known)
        assert (
            tiles
            == any("attend_tile" in name for name in known)
            != any("merge" in n for n in known)
        )
        cache = make_prompt_cache(model)
        for length, tokens in ((360, 2), (9, 1), (6, 14), (2, 1)):
            steps = generate_step(
                mx.arange(length) % 50,
                model,
                max_tokens=tokens,
                prompt_cache=cache,
                prefill_step_size=128,
            )
            assert len(list(steps)) == tokens
        stores = [c.store for c in cache if hasattr(c, "store")]
        assert stores and all(type(store) is Records for store in stores)
        for layer in cache:
            layer.trim_to(layer.offset - 100) if hasattr(layer, "store") else None
        mx.eval([c.state for c in cache])
        detach(model)
    assert built == known


def test_one_line_tells_that_kernels_are_built(folder, capsys):
    with launch.using(counting([])):
        load(str(folder), "int4")
        first = capsys.readouterr().err
        load(str(folder), "int4")
        assert capsys.readouterr().err == ""
    assert first == "building kernels: 1 to go, once\n"


def test_a_chat_says_loudly_that_kernels_fail(folder, capsys):
    with launch.using(unbuildable("quantize")):
        assert main(["chat", "--model", str(folder), "--prompt", "hello", "--max-tokens", "2"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("!")]
    assert len(said) == 1
    assert (
        "kernels are not used on this GPU" in said[0] and "program_source:1312:5: error" in said[0]
    )
    assert said[0].endswith("decoding is slow. `mlxkv doctor` shows why")


def test_what_has_no_kernel_is_said_mildly(folder):
    with launch.using(make):
        line, loud = not_used(load(str(folder), "srft-int4+g16").layers)
        assert not loud and "no kernel reads this format" in line and "groups of 16" in line
        assert not_used(load(str(folder), "int4").layers) is None
        assert not_used(load(str(folder), "fp16").layers) is None
    with launch.using(None):
        assert not_used(load(str(folder), "int4").layers) is None  # no GPU here


def test_a_version_outside_the_range_is_one_line(folder, monkeypatch, capsys):
    monkeypatch.setattr("mlxkv.machine.requires", lambda name: ["mlx>=99", "rich>=1"])
    assert main(["chat", "--model", str(folder), "--prompt", "hello", "--max-tokens", "2"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("!")]
    assert len(said) == 1 and "tested with: mlx " in said[0] and "wanted >=99" in said[0]


# -- under way


@pytest.mark.parametrize(("calls", "letters"), [(5, 90), (9, 256)])
def test_a_gpu_error_in_a_reply_goes_on_by_plain_ops(folder, capsys, calls, letters):
    """At the first token, in the middle, in the middle of a letter."""
    lost = Failing("merge")
    with launch.using(None):
        want = session_of(load(str(folder), "int4"), 12, letters)
        replies = [talk(want, LONG), talk(want, "and now?")]
    with launch.using(lost):
        loaded = load(str(folder), "int4")
        session = session_of(loaded, 12, letters)
        capsys.readouterr()
        lost.left = calls
        assert talk(session, LONG) == replies[0]
        said = capsys.readouterr().err.strip()
        assert said.count("\n") == 0 and LOST in said and "plain ops" in said
        assert launch.kernel_builder() is None and {type(c.store) for c in session.cache} == {Codes}
        assert session.stats.generated_tokens == 12 and len(session.messages) == 2
        assert talk(session, "and now?") == replies[1] and capsys.readouterr().err == ""
        assert {c.offset for c in session.cache} == {len(session.tokens)}
        assert all("switched off" in layer.kernel for layer in loaded.layers)
    assert launch.switched_off(launch.KERNELS) is None


def test_where_tiles_fail_the_portable_kernels_take_over_and_then_plain_ops(folder, capsys):
    lost = Failing("", tiles=True)
    with launch.using(lost):
        loaded = load(str(folder), "int4", dtype="float16")
        session = session_of(loaded, 8)
        assert all("tile" in layer.kernel for layer in loaded.layers)
        lost.part, lost.left = "attend_tile", 3
        capsys.readouterr()
        assert talk(session, LONG)
        assert "portable kernels decode" in capsys.readouterr().err
        assert {type(c.store.backend) for c in session.cache} == {PortableBackend}
        lost.part, lost.left = "merge", 3
        assert talk(session, "more")
        assert "plain ops" in capsys.readouterr().err
        assert {type(c.store) for c in session.cache} == {Codes}


def test_no_memory_is_an_error_and_switches_nothing_off(folder):
    lost = Failing("merge", said="[metal::malloc] Unable to allocate 9 bytes")
    with launch.using(lost):
        session = session_of(load(str(folder), "int4"), 8)
        lost.left = 2
        with pytest.raises(MachineError, match=r"\[generate\] \[metal::malloc\].*is kept"):
            talk(session, LONG)
        lost.left = None
        assert launch.kernel_builder() is lost and talk(session, LONG)


def test_an_error_drops_the_counters_of_tiles(folder):
    from mlxkv.metal import tiles

    with launch.using(make_tiles):
        loaded = load(str(folder), "int4", dtype="float16")
        before = tiles._counters()
        assert step_down(loaded, RuntimeError(LOST)) is not None
        assert tiles._counters() is not before


@pytest.mark.parametrize("backend", (TileBackend, RowsBackend, LatentBackend))
def test_only_tiles_go_first(folder, backend):
    with launch.using(make_tiles):
        loaded = load(str(folder), "int4", dtype="float16")
        plan = KernelPlan(backend(make_tiles))
        loaded.layers[:] = [replace(layer, plan=plan) for layer in loaded.layers]
        assert "portable kernels" in str(step_down(loaded, RuntimeError(LOST)))
        assert launch.switched_off(launch.KERNELS) is None
        assert LOST in str(launch.switched_off(launch.TILES))


@pytest.mark.parametrize("alone", (False, True), ids=("batched", "alone"))
def test_a_server_goes_on_without_the_kernels_that_failed(folder, alone, monkeypatch, capsys):
    lost = Failing("merge")
    with launch.using(lost), serving(folder) as server:
        if alone:
            monkeypatch.setattr(server.engine, "is_batchable", False)
        want = text_of(complete(server, LONG, 8))
        lost.left = 2
        message = refused(server, 500, prompt=LONG + "!", max_tokens=8)["message"]
        assert "Command buffer execution failed" in message and "\n" not in message
        assert text_of(complete(server, LONG, 8)) == want
        assert all("plain ops" in layer["kernel"] for layer in get(server, "/v1/kv")["layers"])
        assert server.engine.faults == 1
    assert "plain ops, slowly, decode" in capsys.readouterr().err


@pytest.mark.parametrize("kind", (NotImplementedError, RecursionError, MachineError))
def test_errors_of_python_switch_nothing_off(folder, kind):
    """What MLX raises is a plain RuntimeError; these are others that Python counts among them."""
    with launch.using(make):
        loaded = load(str(folder), "int4")
        assert step_down(loaded, kind("x")) is None
        assert launch.kernel_builder() is make


def test_what_is_under_way_is_waited_for_after_an_error(folder, monkeypatch, capsys):
    """Buffers in flight may set the error again: it is raised by the streams' next waits, and one fault
    would pass for two."""
    asked, wait = [], mx.synchronize

    def synchronize(stream):
        asked.append(stream)
        wait(stream)
        if len(asked) < 4:
            raise RuntimeError(LOST)

    lost = Failing("", tiles=True)
    with launch.using(lost):
        session = session_of(load(str(folder), "int4", dtype="float16"), 8)
        monkeypatch.setattr(mx, "synchronize", synchronize)
        lost.part, lost.left = "attend_tile", 3
        assert talk(session, LONG)
        assert launch.kernel_builder() is lost and launch.switched_off(launch.TILES)
    streams = generation_stream, mx.default_stream(mx.default_device())
    assert [asked.count(stream) for stream in streams] == [2, 2] and len(asked) == 4
