"""A server of several models: others than the first come when they are asked for, and go when memory is needed."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread
from threading import enumerate as threads

import pytest
from random_models import write_model
from serving import ENDLESS, asking, complete, get, held, refused, send, serving, text_of, until

from mlxkv.errors import MachineError, UserError
from mlxkv.machine import machine_memory
from mlxkv.serve import engine as engines
from mlxkv.serve import models
from mlxkv.serve.http import app
from mlxkv.serve.options import ServeOptions


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("several")
    return [write_model(base / name, seed=i) for i, name in enumerate(("one", "two", "three"))]


@pytest.fixture(scope="module")
def several(folders):
    with serving(folders) as server:
        yield server


@pytest.fixture
def server(several):
    """A server of three models, whose first one alone is loaded."""
    yield several
    for name in list(several.models.loaded):
        several.models.loaded.pop(name).close()


def test_each_request_gets_the_model_that_it_names(folders):
    with serving(folders) as server:
        names = ["one", "two", "three"]
        assert [one["id"] for one in get(server, "/v1/models")["data"]] == names
        listed = get(server, "/v1/models", **{"anthropic-version": "2023-06-01"})
        assert [one["id"] for one in listed["data"]] == names == get(server, "/v1/kv")["models"]
        assert get(server, "/v1/models/two")["id"] == "two" and not server.models.loaded
        found = {name: complete(server, "Hello", 12, model=name) for name in names}
        assert all(found[name]["model"] == name for name in names)
        assert len({text_of(one) for one in found.values()}) == 3
        assert text_of(complete(server, "Hello", 12)) == text_of(found["one"])
        assert complete(server, "Hello", 12, model="two")["kv"]["cached_tokens"] > 0
        assert list(server.models.loaded) == ["three", "two"]  # the latest last
        document = get(server, "/v1/kv")
        assert document["model"] == "one" and list(document["others"]) == ["three", "two"]
        assert all(document["others"][name]["sessions"]["count"] for name in names[1:])
        lines = send(server, "GET", "/metrics")[2].decode().splitlines()
        numbers = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
        for name in names:
            tokens = found[name]["usage"]["completion_tokens"]
            assert int(numbers[f'mlxkv_generated_tokens_total{{model="{name}"}}']) >= tokens
            assert int(numbers[f'mlxkv_sessions_count{{model="{name}"}}']) > 0
        error = refused(server, 404, prompt="a", model="four")
        assert "choose 'one' or 'two' or 'three'" in error["message"]
        loaded_models = list(server.models.loaded.values())
    assert not any(loaded_model.engine.is_healthy for loaded_model in loaded_models)


def test_a_model_goes_for_another_one_but_not_from_its_requests(server, monkeypatch):
    complete(server, "a", 2, model="two")
    used = machine_memory()
    monkeypatch.setattr(models, "used_memory", lambda: used)
    with asking(server, **ENDLESS, model="two", stream=True) as line:
        assert line.recv(12).endswith(b" 200")
        assert refused(server, 503, prompt="a", model="three")["code"] == "memory_busy"
        assert list(server.models.loaded) == ["two"]
    loaded_model = server.models.loaded["two"]
    until(lambda: not loaded_model.users)
    monkeypatch.setattr(models, "used_memory", lambda: used if server.models.loaded else 0)
    assert complete(server, "a", 2, model="three")["model"] == "three"
    assert list(server.models.loaded) == ["three"] and not loaded_model.engine.is_healthy


def test_a_model_that_cannot_be_loaded_costs_its_requests_alone(folders, tmp_path):
    broken = write_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with serving([folders[0], broken]) as server:
        error = refused(server, 503, prompt="a", model="broken")
        assert error["code"] == "model_not_loaded"
        assert "broken could not be loaded" in error["message"]
        assert complete(server, "a", 2)["model"] == "one"
        assert send(server, "GET", "/health")[0] == 200


def test_a_model_whose_engine_has_failed_is_loaded_anew(server):
    complete(server, "a", 2, model="two")
    broken = server.models.loaded["two"]
    workers = broken.reader.workers
    broken.engine.problem = MachineError("for good")
    assert complete(server, "a", 2, model="two")["model"] == "two"
    anew = server.models.loaded["two"]
    assert anew is not broken
    assert all(worker._has_ended and worker._pool is None for worker in workers)


def test_two_models_of_one_name_are_refused(folders, tmp_path):
    twin = write_model(tmp_path / "one")
    with pytest.raises(UserError, match=r"^\[--model\] two have one name; got one, one"):
        serving([folders[0], twin]).__enter__()


def test_a_model_stays_for_a_request_that_its_engine_has_not_seen_yet(server, monkeypatch):
    with ThreadPoolExecutor(1) as pool:
        complete(server, "a", 2, model="two")
        with held(monkeypatch, app, "tenant") as go:
            job = pool.submit(complete, server, "a", 2, model="two")
            until(lambda: server.models.loaded["two"].users)
            used = machine_memory()
            monkeypatch.setattr(models, "used_memory", lambda: used)
            assert refused(server, 503, prompt="a", model="three")["code"] == "memory_busy"
            go.set()
            assert job.result()["model"] == "two"
        until(lambda: not server.models.loaded["two"].users)


def test_buffers_that_are_free_make_room_before_models_do(server, monkeypatch):
    complete(server, "a", 2, model="two")
    cleared = []
    monkeypatch.setattr(models.mx, "clear_cache", lambda: cleared.append(1))
    monkeypatch.setattr(models, "used_memory", lambda: 0 if cleared else machine_memory())
    complete(server, "a", 2, model="three")
    assert list(server.models.loaded) == ["two", "three"]


def test_a_load_holds_up_no_other_model_and_waits_no_longer_than_a_request(server, monkeypatch):
    with ThreadPoolExecutor(1) as pool, held(monkeypatch, models, "locate") as go:
        job = pool.submit(complete, server, "a", 2, model="three")
        until(server.models._lock.locked)
        assert complete(server, "a", 2)["model"] == "one"
        go.set()
        assert job.result()["model"] == "three"
    monkeypatch.setattr(server.models, "options", replace(server.models.options, timeout=0.2))
    with held(monkeypatch, models, "locate"):
        assert refused(server, 504, prompt="a", model="two")["code"] == "timeout"
    until(lambda: "two" in server.models.loaded)  # it is there for those who ask next


def test_a_model_that_is_not_found_is_not_loaded(server, monkeypatch):
    def offline(_):
        raise MachineError("the hub cannot be reached")

    monkeypatch.setattr(models, "locate", offline)
    error = refused(server, 503, prompt="a", model="two")
    assert error["code"] == "model_not_loaded" and "cannot be reached" in error["message"]


def test_the_end_comes_while_a_model_is_loaded(folders, monkeypatch):
    before = set(threads())
    with serving(folders) as server, ThreadPoolExecutor(2) as pool:
        with held(monkeypatch, engines, "warm_up") as go:
            jobs = [
                pool.submit(send, server, "POST", "/v1/completions", {"prompt": "a", "model": name})
                for name in ("two", "three")
            ]
            until(lambda: len(engine_threads(before)) == 2)  # of the first model, and of the next
            server.stop()
            server.stop()
            until(lambda: server.models._has_ended)
            go.set()
            for status, _, data in (job.result() for job in jobs):
                assert (status, json.loads(data)["error"]["code"]) == (503, "ending")
    assert not engine_threads(before)


def engine_threads(before: set[Thread]) -> list[Thread]:
    return [each for each in threads() if each not in before and each.name.endswith("(_run)")]


def test_a_calibration_is_for_one_model():
    with pytest.raises(UserError, match=r"^\[--calibration\] is for one model; got 2: a, b; "):
        ServeOptions(model=["a", "b"], calibration="c.json")
