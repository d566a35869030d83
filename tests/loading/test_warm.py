"""What decoding needs is built before the first token; what steps are built by Python is said."""

from threading import get_ident

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from random_models import write_model
from serving import get, serving

from mlxkv.chat.session import Session
from mlxkv.generate.generation import new_cache
from mlxkv.loading import warmup
from mlxkv.loading.load import load
from mlxkv.loading.warmup import warm_up
from mlxkv.patching.mark import steps_of
from mlxkv.patching.steps import FORMS, SWITCH
from mlxkv.serve import engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(autouse=True)
def _traced(_untraced, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(warmup, "device_type", lambda: "metal")


def decoded(loaded, tokens: int) -> list[int]:
    session = Session(loaded, max_tokens=tokens, sampler=lambda x: mx.argmax(x[..., :90], axis=-1))
    "".join(session.ask("a long text to read " * 14))
    return session.tokens


def test_the_first_reply_finds_its_steps_traced(folder, on_a_gpu, capsys):
    """The next cache of the same sizes makes no trace of its own, and answers as without."""
    cold = decoded(load(folder, "int4"), 4)
    loaded = load(folder, "int4")
    mx.random.seed(5)
    drawn = mx.random.uniform()
    mx.random.seed(5)
    warm_up(loaded)
    assert mx.random.uniform() == drawn  # nothing of the user's seed is used up
    steps = steps_of(loaded.model)
    traced = steps.traced
    assert (
        traced and loaded.steps == "replayed" and "building decode steps" in capsys.readouterr().err
    )
    cache = new_cache(loaded)
    tokens = mx.zeros((1, loaded.kv.window + loaded.kv.page), mx.int32)
    with mx.stream(generation_stream):
        for piece in (tokens, tokens[:, :1]):
            mx.eval(loaded.model(piece, cache=cache))
    assert steps.traced == traced and decoded(loaded, 4) == cold


@pytest.mark.parametrize("why", ["cpu", "fp16", "off"])
def test_nothing_is_decoded_where_nothing_would_be_traced(folder, monkeypatch, capsys, why):
    monkeypatch.setattr(warmup, "device_type", lambda: "cpu" if why == "cpu" else "cuda")
    monkeypatch.setattr(warmup, "_decode", lambda loaded: pytest.fail("decodes"))
    if why == "off":
        monkeypatch.setenv(SWITCH, "0")
    loaded = load(folder, "fp16" if why == "fp16" else "int4")
    capsys.readouterr()
    warm_up(loaded)
    assert capsys.readouterr().err == ""
    wanted = {"cpu": "none yet", "off": "built by Python: MLXKV_COMPILE=0"}
    assert loaded.steps == wanted.get(why, "built by Python: nothing is compressed")


def test_a_fault_while_it_warms_up_is_no_end(folder, on_a_gpu, monkeypatch, capsys):
    loaded = load(folder, "int4")
    monkeypatch.setattr(warmup, "step_down", lambda loaded, error: f"! instead of {error}")

    def lost(loaded):
        raise RuntimeError("a kernel")

    monkeypatch.setattr(warmup, "_decode", lost)
    warm_up(loaded)
    assert "! instead of a kernel" in capsys.readouterr().err
    monkeypatch.setattr(warmup, "step_down", lambda loaded, error: None)
    warm_up(loaded)


def test_a_server_warms_up_where_it_decodes(folder, monkeypatch):
    warmed = []
    monkeypatch.setattr(engine, "warm_up", lambda loaded: warmed.append(get_ident()))
    with serving(folder) as server:
        assert get(server, "/v1/kv")["steps"] == "none yet"
    assert len(warmed) == 1 and warmed[0] != get_ident()


def test_steps_built_by_python_are_said_once(folder, on_a_gpu, monkeypatch, capsys):
    loaded = load(folder, "int4")
    monkeypatch.delitem(FORMS, type(new_cache(loaded)[0]))
    warm_up(loaded)
    reason = "decode steps are built by Python: no static form of CompressedKVCache"
    assert capsys.readouterr().err.count(reason) == 1
    assert loaded.steps == reason.removeprefix("decode steps are ")
    loaded.tell_steps()
    assert capsys.readouterr().err == ""
