"""Model folders for tests of loading: a whole one, and copies of it to break."""

import json
from pathlib import Path

import pytest
from mlx_lm.utils import save_model
from random_models import config_of, random_model

from mlxkv.errors import UserError
from mlxkv.loading.load import load

WEIGHTS = "model.safetensors"


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A whole model folder; tests copy it before they break it."""
    return save(tmp_path_factory.mktemp("model"), random_model("llama"), config_of("llama"))


def save(path: Path, model, config: dict) -> Path:
    save_model(path, model)
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    return path


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def error_of(name: str | Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        load(str(name), **options)
    text = str(caught.value)
    assert text.startswith("[") and "; got " in text and "\n" not in text
    return text


def response():
    """A 404 of the hub, as its errors take it."""

    class Response:
        headers, request, status_code = {}, None, 404

    return Response()
