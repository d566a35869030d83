"""Model folders that mean harm: one line naming the file, before anything is built from what they say."""

# ruff: noqa: F401, F811 (the fixtures `saved` and `folder` are imported)
import json
import os
import time
from itertools import product

import pytest
from random_models import WEIGHTS, error_of, folder, saved

from mlxkv.catalog import shapes
from mlxkv.catalog.folder import INDEX, check_folder
from mlxkv.errors import UserError
from mlxkv.untrusted import Unsound

DEEP = {"lists": "[" * 100_000, "objects": '{"a":' * 1000 + "1" + "}" * 1000}


def edit(folder, name: str = "config.json", **changes) -> None:
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data | changes))


@pytest.fixture(autouse=True)
def _soon():
    start = time.process_time()
    yield
    assert (
        time.process_time() - start < 10
    )  # 0.1 s on a quiet machine, the imports of a first load aside


@pytest.mark.parametrize(
    "name",
    ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
def test_nested_files(folder, name):
    for text in DEEP.values():
        (folder / name).write_text(text)
        with pytest.raises(UserError, match=f"{name} is nested deeper than 64; got /"):
            check_folder(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *product(["pipe"], ["config.json", WEIGHTS, "tokenizer.json", "merges.txt", INDEX]),
        *product(["loop", "device"], ["config.json", WEIGHTS]),
    ],
)
def test_pipes_loops_and_devices(folder, name, kind):
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else name)
    with pytest.raises(UserError, match=rf"^\[load\] {name} "):
        check_folder(folder)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers from 1 to 65536; got 1000000"),
        ({"num_hidden_layers": 60_000}, "names 60000 layers, but the weights have"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers from 1 to 65536; got a str"),
        ({"hidden_size": 0}, "hidden_size from 1 to 16777216; got 0"),
        ({"vocab_size": 1 << 40}, "vocab_size from 1 to 2147483647; got 1099511627776"),
        ({"vocab_size": 10**400}, "vocab_size from 1 to 2147483647; got a huge number"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"text_config": {"num_hidden_layers": 1 << 40}}, "num_hidden_layers"),
        ({"intermediate_size": [64, 1 << 60]}, "intermediate_size"),
        ({"sliding_window": 0, "layer_types": ["sliding_attention"]}, "sliding_window from 1"),
        ({"sliding_window": -1, "layer_types": ["sliding_attention"]}, "sliding_window from 1"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern from 1"),
        ({"rope_theta": float("inf")}, "Infinity for a number"),
        ({"rope_scaling": {"factor": float("inf")}}, "Infinity"),
        ({"rope_scaling": {"factor": 1e308, "type": "linear"}, "n_ctx": 1 << 60}, "no sound type"),
        ({"text_config": {"model_type": []}}, "no sound type"),
    ],
)
def test_numbers_that_no_model_has(folder, changes, what):
    edit(folder, **changes)
    with pytest.raises(UserError, match=rf"^\[load\] config.json .*{what}.*; got /"):
        check_folder(folder)


def test_numbers_that_models_have():
    for config in (
        {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]},
        {"model_type": "x", "time_step_limit": float("inf"), "num_key_value_heads": None},
        {"model_type": "gemma3n", "intermediate_size": [16384] * 35},
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG", "sliding_window": 4096},
        {"model_type": "qwen2", "sliding_window": 0, "use_sliding_window": False},
        {"model_type": "llama", "num_hidden_layers": 126, "vocab_size": 128256.0},
        {"model_type": "llama", "sliding_window": 0, "layer_types": ["full_attention"] * 4},
    ):
        shapes.check_numbers(config, 1000)
    with pytest.raises(Unsound, match="4 layers, but the weights have 99999 tensors"):
        shapes.check_numbers({"model_type": "llama", "num_hidden_layers": 4}, 99999)


def test_files_of_mlx_lm_that_are_no_models(folder):
    """The file of olmo leaves Python where a package is missing."""
    for kind in ["cache", "base", "switch_layers", "__init__", "rope_utils", "", "olmo"]:
        edit(folder, model_type=kind)
        assert "choose a model that mlx-lm supports" in error_of(folder)


def test_a_huge_model_type_is_cut(folder):
    edit(folder, model_type="x" * 200_000)
    assert len(error_of(folder)) < 1000


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
def test_a_tokenizer_that_cannot_encode(folder, kind):
    """One without a token for unknown words fails at the first of them."""
    data = json.loads((folder / "tokenizer.json").read_text())
    more = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    model = {"type": kind, "vocab": {}, "unk_token": "[UNK]", **(more if "P" in kind else {})}
    edit(folder, "tokenizer.json", model=model, added_tokens=data["added_tokens"])
    assert "[load] the tokenizer cannot be loaded" in error_of(folder)


@pytest.mark.parametrize("size", ["num_attention_heads", "num_key_value_heads", "head_dim"])
def test_sizes_that_cannot_run(folder, size):
    edit(folder, **{size: 0})
    text = error_of(folder)
    assert "do not fit together" in text or "cannot run" in text


@pytest.mark.parametrize("value", [[], {}, 3, None])
def test_an_index_of_odd_values(folder, value):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": value, "b": "x"}}))
    assert f"{INDEX} names files by something else than texts" in error_of(folder)
