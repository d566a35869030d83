"""A server of several models: others than the first come when they are asked for, and go when memory is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_model import write_model
from serving import ENDLESS, asking, complete, get, refused, send, serving, text_of, until

from mlxkv.errors import UserError
from mlxkv.machine import machine_memory
from mlxkv.serve.http import models


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("several")
    return [write_model(base / name, seed=i) for i, name in enumerate(("one", "two", "three"))]


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
        error = refused(server, 404, prompt="a", model="four")
        assert "choose 'one' or 'two' or 'three'" in error["message"]
        engines = [site.engine for site in server.models.loaded.values()]
    assert not any(engine.is_healthy for engine in engines)


def test_a_model_goes_for_another_one_but_not_from_its_requests(folders, monkeypatch):
    with serving(folders) as server:
        complete(server, "a", 2, model="two")
        used = machine_memory()
        monkeypatch.setattr(models, "used_memory", lambda: used)
        with asking(server, **ENDLESS, model="two", stream=True) as line:
            assert line.recv(12).endswith(b" 200")
            assert refused(server, 503, prompt="a", model="three")["code"] == "memory_busy"
            assert list(server.models.loaded) == ["two"]
        engine = server.models.loaded["two"].engine
        until(lambda: not engine.is_busy)
        monkeypatch.setattr(models, "used_memory", lambda: used if server.models.loaded else 0)
        assert complete(server, "a", 2, model="three")["model"] == "three"
        assert list(server.models.loaded) == ["three"] and not engine.is_healthy


def test_a_model_that_cannot_be_loaded_costs_its_requests_alone(folders, tmp_path):
    broken = write_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with serving([folders[0], broken]) as server:
        error = refused(server, 503, prompt="a", model="broken")
        assert (
            error["code"] == "model_not_loaded" and "broken could not be loaded" in error["message"]
        )
        assert complete(server, "a", 2)["model"] == "one"
        assert send(server, "GET", "/health")[0] == 200


def test_two_models_of_one_name_are_refused(folders, tmp_path):
    twin = write_model(tmp_path / "one")
    with pytest.raises(UserError, match=r"^\[--model\] two have one name; got one, one"):
        serving([folders[0], twin]).__enter__()
