"""A server whose model says what tests have written down, and the caches of the same small model."""

from dataclasses import replace

import pytest
from scripted_models import saying, write_thinker
from serving import serving

from mlxkv.loading.load import load


@pytest.fixture(scope="session")
def said() -> list[str]:
    """What the model will say next."""
    return [""]


@pytest.fixture(scope="session")
def running(said, tmp_path_factory):
    folder = write_thinker(tmp_path_factory.mktemp("said") / "caller")
    with saying(folder, said) as server:
        yield server


@pytest.fixture(scope="session")
def server(model_folder):
    """A server of a small random model, which takes bodies of 64 KiB."""
    with serving(model_folder, body=64 << 10) as server:
        yield server


@pytest.fixture
def change(server, monkeypatch):
    """Changes the options of the running server."""

    def change(**options) -> None:
        changed = replace(server.loaded_model.options, **options)
        for owner in (server.models, server.loaded_model, server.engine):
            monkeypatch.setattr(owner, "options", changed)

    return change


@pytest.fixture(scope="module")
def small(model_folder):
    return load(str(model_folder), "int4")


@pytest.fixture(scope="session")
def openai():
    """OpenAI's library, which takes a second to import: not by workers that need none."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, running):
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
