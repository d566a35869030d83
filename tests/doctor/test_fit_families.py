"""What `mlxkv fit` computes from a config.json, against mlx-lm's own model and caches."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest
import random_models
from mlx.utils import tree_flatten

from mlxkv.catalog.aliases import CONFIGS, OUTLINES, QUANTIZATION
from mlxkv.cli import main
from mlxkv.loading.outline import outline
from mlxkv.loading.plans import known_outline, plan_of
from mlxkv.patching.cache_shapes import layers_of

FAMILIES = [name for name in random_models.FAMILIES if name not in ("gemma3", "gemma3_text")]


def test_weights_and_caches_are_those_of_a_made_model(subtests):
    for family in FAMILIES:
        with subtests.test(family=family):
            made = plan_of(random_models.config_of(family))
            assert not made.estimate
            model = random_models.random_model(family)
            model.set_dtype(mx.bfloat16)
            assert made.layers == layers_of(model)
            weights = sum(x.nbytes for _, x in tree_flatten(model.parameters()))
            assert made.weights == pytest.approx(weights, rel=0.001)


REPORTED = json.loads((Path(__file__).parents[1] / "data" / "fit_configs.json").read_text())


def test_bytes_of_700_tokens_are_those_of_mlx_lms_caches(subtests, tmp_path, capsys):
    """Families with config keys of their own; the bytes were read off mlx-lm's caches after 700 tokens."""
    for name in REPORTED["small"]:
        with subtests.test(name=name):
            case = REPORTED["small"][name]
            (tmp_path / "c.json").write_text(json.dumps(case["config"]))
            asked = f"fit --context 700 --kv fp16 --json --memory 64GB --model {tmp_path}/c.json"
            assert main(asked.split()) == 0
            made = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert made["presets"][0]["kv_bytes"] == case["kv_bytes"]


def test_weights_as_published(subtests):
    """GiB in 16 bits, and layers that keep the whole context."""
    for name in REPORTED["large"]:
        with subtests.test(name=name):
            case = REPORTED["large"][name]
            plan = plan_of(case["config"])
            assert not plan.estimate
            assert plan.weights / 2**30 == pytest.approx(case["gib"], abs=0.06)
            assert sum(layer.kind == "full" for layer in plan.layers) == case["grow"]


# Weights as their authors say, in thousand millions, without eyes and ears; GiB of what grows at 128K in 16 bits.
ALIASES = {
    "devstral-small-2": (23.57, 20),
    "gemma-3-4b": (3.88, None),
    "gemma-3n-e2b": (4.46, None),
    "gemma-4-26b": (25.2, 2.5),
    "gemma-4-31b": (None, 10),
    "gemma-4-e4b": (None, 2),
    "glm-4.7-flash": (29.9, 6.61),
    "gpt-oss-20b": (20.9, 3),
    "gpt-oss-120b": (None, 4.5),
    "llama-3.1-8b": (8.03, None),
    "minimax-m2.5": (228.7, 31),
    "phi-4-mini": (3.84, None),
    "qwen2.5-7b": (7.62, None),
    "qwen3-coder-30b": (30.5, 12),
    "qwen3.5-35b": (34.7, None),
    "qwen3.5-4b": (None, 4),
    "qwen3.5-9b": (None, 4),
    "qwen3.6-27b": (None, 8),
    "qwen3.6-35b": (None, 2.5),
    "qwen3.8-27b": (None, 8),
    "smollm2": (0.1345, None),
    "smollm3-3b": (3.08, None),
}


def test_weights_and_caches_of_the_aliases(subtests):
    for alias, (count, gib) in ALIASES.items():
        with subtests.test(alias=alias):
            plain = {k: v for k, v in CONFIGS[alias].items() if k != "quantization"}
            plan = plan_of(plain)
            assert not plan.estimate
            if count is not None:
                assert plan.weights / 2 / 1e9 == pytest.approx(count, rel=0.02)
            if gib is not None:
                layers = [x for x in plan.layers if x.kind in ("full", "latent")]
                found = sum(2 * x.values(131072) for x in layers) / 2**30
                assert found == pytest.approx(gib, abs=0.01)


def as_stored(layers: list, weights: int, working: int) -> dict:
    """An outline as `known.json` has it: fields that are not 0, and how many layers have them."""
    groups = [
        {"count": count, **{k: v for k, v in vars(layer).items() if v and k != "index"}}
        for layer, count in Counter(layers).items()
    ]
    return {"layers": groups, "weights": weights, "working": working}


def test_stored_outlines_are_those_of_mlx_lm(subtests):
    for alias, config in CONFIGS.items():
        with subtests.test(alias=alias):
            made = outline({"quantization": QUANTIZATION} | config)
            assert OUTLINES[alias] == as_stored(*made)
            kept = known_outline(alias, config)
            assert Counter(kept[0]) == Counter(made[0]) and kept[1:] == made[1:]


def test_an_outline_is_for_the_sizes_it_was_made_from(tmp_path):
    config = CONFIGS["qwen3-4b"]
    assert known_outline("qwen3-4b", config | {"eos_token_id": 1})
    assert known_outline("qwen3-4b", config | {"num_key_value_heads": 4}) is None
    assert known_outline(str(tmp_path), config) is None


def test_fit_of_aliases_does_not_wait_for_mlx_lm():
    code = (
        "import sys; from mlxkv.cli import main; main(['fit', '--memory', '16GB']); "
        "assert not {'mlx_lm', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "llama-3.1-8b" in done.stdout


HOSTILE = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 300},
    {"hidden_size": -4},
    {"hidden_size": "4096"},
    {"vocab_size": 10**12},
    {"vocab_size": 1 << 30},
    {"num_transformer_layers": 10**9},
    {"layer_types": ["full_attention"] * 10**5},
]


def test_sizes_that_no_model_has(subtests, tmp_path, capsys):
    for changes in HOSTILE:
        with subtests.test(changes=changes):
            path = tmp_path / "config.json"
            path.write_text(json.dumps(CONFIGS["qwen3-4b"] | changes))
            assert main(["fit", "--model", str(path)]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_mlx_lm_does_not_know_is_said_to_be_an_estimate(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3-4b"] | {"model_type": "of_tomorrow"}))
    assert main(["fit", "--model", str(path), "--json"]) == 0
    said = capsys.readouterr()
    assert "an estimate: mlx-lm makes no model of this" in said.err
    assert "of_tomorrow" in json.loads(said.out)["estimate"]
