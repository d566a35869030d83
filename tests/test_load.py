"""Loading: names, folders that are broken in every way, an unreachable hub, types, fingerprints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors as hub_errors
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model, save_model
from random_models import config_of, random_model, tokens

from mlxkv.config import PRESETS
from mlxkv.errors import MachineError, UserError
from mlxkv.models import context_limit, detach, load
from mlxkv.models.aliases import EMBEDDED, HUB, Source, resolve
from mlxkv.models.folder import check, check_safetensors, fingerprint

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


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_a_folder_loads_and_is_attached(folder):
    loaded = load(str(folder), "naive-int4")
    assert (loaded.kv, loaded.kv_name) == (PRESETS["naive-int4"], "naive-int4")
    assert (loaded.path, loaded.name, loaded.context) == (folder, str(folder), 512)
    assert loaded.report() == ["layers 0-1 (full attention): naive-int4, 4.5 bits per value, plain ops"]
    assert loaded.tokenizer.encode("w3 w5") == [3, 5] and loaded.tokenizer.eos_token_ids == {0}
    assert type(make_prompt_cache(loaded.model)[0]).__name__ == "CompressedKVCache"
    detach(loaded.model)
    text = tokens(12)[None]
    assert mx.array_equal(loaded.model(text), random_model("llama")(text))


def test_16_bit_weights_become_float32_where_there_is_no_gpu(tmp_path):
    model = random_model("llama")
    model.set_dtype(mx.bfloat16)
    save(tmp_path, model, config_of("llama"))
    asked = load(str(tmp_path), dtype="float16")
    assert asked.dtype == mx.float16 and asked.notes == []
    loaded = load(str(tmp_path))
    if mx.default_device() == mx.Device(mx.cpu):
        assert loaded.dtype == mx.float32 and "bfloat16 weights run as float32" in loaded.report()[-1]
    else:
        assert loaded.dtype == mx.bfloat16 and loaded.notes == []


def test_quantised_weights(tmp_path):
    model, config = quantize_model(random_model("llama"), config_of("llama"), 32, 8)
    save(tmp_path, model, config)
    loaded = load(str(tmp_path), "naive-int4")
    assert loaded.dtype == mx.float32 and loaded.layers[0].compressed
    text = tokens(12)[None]
    assert mx.array_equal(loaded.model(text), model(text))
    detach(loaded.model)


def test_strict_reaches_attach(tmp_path):
    save(tmp_path, random_model("gemma2"), config_of("gemma2"))
    assert "gemma2 stay in full precision" in error_of(tmp_path, kv="naive-int4", strict=True)


def test_planted_weights_are_handed_over_and_change_the_fingerprint(folder, monkeypatch):
    seen = []

    class plant:
        @staticmethod
        def plant(weights: dict, config: dict) -> dict:
            seen.append((set(weights), config["model_type"]))
            return {name: 2 * x for name, x in weights.items()}

    monkeypatch.setitem(sys.modules, "mlxkv.models.plant", plant)
    monkeypatch.setitem(EMBEDDED, "tiny", Source("tiny", folder=folder))
    monkeypatch.setitem(EMBEDDED, "tiny-hard", Source("tiny-hard", folder=folder, planted=True))
    plain, hard = load("tiny"), load("tiny-hard")
    assert seen == [({name for name, _ in tree_flatten(plain.model.parameters())}, "llama")]
    assert mx.array_equal(hard.model.model.norm.weight, 2 * plain.model.model.norm.weight)
    assert plain.fingerprint != hard.fingerprint


def test_importing_the_names_imports_no_framework():
    code = (
        "import sys, mlxkv.models, mlxkv.models.aliases, mlxkv.models.folder, mlxkv.models.hub\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from mlxkv.models import attach, detach, load\n"
        "import mlxkv.models.seam, mlxkv.models.loader\n"
        "from mlxkv.models import attach, load\n"
        "assert callable(load) and callable(attach)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- names -------------------------------------------------------------------------------------------------------------


def test_aliases():
    assert resolve("gemma-3-1b") == Source("gemma-3-1b", repo="mlx-community/gemma-3-1b-it-4bit")
    assert resolve("tiny-hard").planted and resolve("tiny-hard").folder == resolve("tiny").folder
    assert resolve("owner/Some-Model_1.5") == Source("owner/Some-Model_1.5", repo="owner/Some-Model_1.5")
    assert len(HUB) >= 12 and all(repo.startswith("mlx-community/") for repo in HUB.values())


def test_a_folder_on_this_machine_wins_over_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name").folder == Path("owner/name")


@pytest.mark.parametrize("name", ["gema-3-1b", "", "a b", "../missing", "a/b/c", "Tiny"])
def test_unknown_names(name):
    text = error_of(name)
    assert f"got {name!r}" in text and "choose from tiny, tiny-hard" in text
    if name == "gema-3-1b":
        assert "did you mean gemma-3-1b" in text


def test_a_file_is_no_model(folder):
    assert "name its folder" in error_of(folder / WEIGHTS)


def test_mistakes_in_the_options_cost_no_loading(monkeypatch):
    monkeypatch.setattr("mlxkv.models.loader.fetch", lambda repo: pytest.fail("went to the hub"))
    assert "unknown preset; got 'int5'" in error_of("gemma-3-1b", kv="int5")
    assert "unknown dtype; got 'int8'" in error_of("gemma-3-1b", dtype="int8")


# -- broken folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", b"\xff\xfe{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", "{}", "names no model_type"),
        ("config.json", '{"model_type": "llamma"}', "got model_type 'llamma'"),
        ("config.json", '{"model_type": "llama"}', "do not fit together"),
        ("config.json", '{"model_type": "llama", "model_file": "x.py"}', "never runs code"),
        (WEIGHTS, None, "1 of 1 weight files are missing"),
        (WEIGHTS, "", "no room for its header in 0 bytes"),
        (WEIGHTS, b"\xff" * 100, "no room for its header in 100 bytes"),
        (WEIGHTS, b"\x04\0\0\0\0\0\0\0{{{{", "its header is not valid"),
        (WEIGHTS, b"\x02\0\0\0\0\0\0\0[]", "its header is not valid"),
        ("model.safetensors.index.json", "nonsense", "is not valid JSON"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}',
            "1 of 2 weight files are missing; got",
        ),
        ("tokenizer.json", None, "the tokenizer is missing"),
        ("tokenizer.json", "{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", '{"model": 3}', "the tokenizer cannot be loaded"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json is not valid JSON"),
    ],
)
def test_broken_files(folder, name, content, expected):
    file = folder / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert expected in error_of(folder)


def test_an_empty_folder(tmp_path):
    assert "config.json is missing" in error_of(tmp_path)


@pytest.mark.parametrize("other, expected", [(None, "no weights at all"), ("pytorch_model.bin", "only pytorch_model.bin")])
def test_no_safetensors(folder, other, expected):
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").unlink()
    if other:
        (folder / other).write_bytes(b"x")
    text = error_of(folder)
    assert expected in text and "mlx_lm.convert" in text


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_weights(folder, cut):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-cut])
    text = error_of(folder)
    assert f"promises {len(data)} bytes, it has {len(data) - cut}" in text


def test_edited_weights(folder):
    """A header that names another shape or place than the data has."""
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["model.norm.weight"]
    entry["data_offsets"][1] += 4
    edited = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(edited).to_bytes(8, "little") + edited + data[8 + length :])
    assert "is broken" in error_of(folder)


def test_weights_of_another_model(folder):
    save_model(folder, random_model("qwen2"))
    text = error_of(folder)
    assert "do not fit together" in text and "got a llama" in text


# -- fingerprint -------------------------------------------------------------------------------------------------------


def test_fingerprint_tells_models_apart(folder):
    first = fingerprint(check(folder))
    assert first == fingerprint(check(folder)) and len(first) == 16
    save_model(folder, random_model("llama", seed=1))
    second = fingerprint(check(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert len({first, second, fingerprint(check(folder))}) == 3


def test_header_check_takes_what_mlx_writes(tmp_path):
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {"a": mx.zeros((3, 5)), "b": mx.zeros((0,)), "c": mx.zeros((7,), mx.bfloat16)})
    assert set(check_safetensors(file)) >= {"a", "b", "c"}


# -- the hub -----------------------------------------------------------------------------------------------------------


def response():
    class Response:
        headers, request, status_code = {}, None, 404

    return Response()


class NetworkError(Exception):
    """Stands for an error of whatever HTTP library huggingface_hub uses."""


NetworkError.__module__ = "httpx"


@pytest.mark.parametrize(
    "error, expected",
    [
        (hub_errors.GatedRepoError("gated", response=response()), "hf auth login"),
        (hub_errors.RepositoryNotFoundError("404", response=response()), "no such model on the hub"),
        (hub_errors.HFValidationError("bad name"), "no such model on the hub"),
        (hub_errors.LocalEntryNotFoundError("offline"), "HF_HUB_OFFLINE"),
        (hub_errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (hub_errors.HfHubHTTPError("503 busy", response=response()), "503 busy"),
        (NetworkError("no route"), "check the network"),
        (ConnectionResetError("reset"), "fetching failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_failures_say_what_to_do(monkeypatch, error, expected):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    text = error_of("gemma-3-1b")
    assert expected in text and "got " in text and "gemma-3-1b-it-4bit" in text
    assert "hf auth login" in text or "--model tiny" in text


def test_a_full_disk_is_a_fault_of_the_machine(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(MachineError, match="the disk is full"):
        load("gemma-3-1b")


def test_faults_of_our_own_are_not_hidden(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load("gemma-3-1b")


def test_a_fetched_folder_loads(folder, monkeypatch):
    asked = {}

    def download(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load("gemma-3-1b")
    assert (loaded.name, loaded.path) == ("gemma-3-1b", folder)
    assert not any(pattern.endswith(".py") for pattern in asked["mlx-community/gemma-3-1b-it-4bit"])


# -- context -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, limit",
    [
        ({}, None),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        # Llama 3.1 and Phi name the extended length themselves.
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 131072),
        # Qwen writes the plain length beside yarn, gpt-oss the extended one.
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            },
            131072,
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "max_position_embeddings": 131072,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                },
            },
            131072,
        ),
        ({"max_position_embeddings": 100, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, 100),
    ],
)
def test_context_limit(config, limit):
    assert context_limit(config) == limit
