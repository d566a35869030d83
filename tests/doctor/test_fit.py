"""`mlxkv fit` against sums done by hand."""

import json

import pytest
import random_models
from methods import config_named

from mlxkv.catalog.aliases import CONFIGS, HUB
from mlxkv.catalog.shapes import LayerShape, estimated_sizes
from mlxkv.catalog.sizes import (
    CHUNK,
    TIED,
    ModelPlan,
    bits_in_pages,
    cache_shape,
    layer_bytes,
    longest,
    need,
    why_16_bits,
)
from mlxkv.cli import main
from mlxkv.console import human_bytes, parse_size, parse_tokens
from mlxkv.doctor import fit
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.plans import plan_of

QWEN3_4B, GEMMA3_1B = (CONFIGS[name] for name in ("qwen3-4b", "gemma-3-1b"))


def test_the_largest_layer_is_decoded_for_a_prefill():
    """Of layers with a window and without, in either order."""
    layers = [LayerShape("sliding", 1, 64, 64, window=512), LayerShape("full", 1, 64, 64)]
    for some in (layers, layers[::-1]):
        plan = ModelPlan("two", some, 0, "", working=10)
        # A window holds a chunk, too, until the first token is decoded.
        chunk = 2 * (511 + 2048 - 512) * 128
        assert need(plan, PRESETS["int4"], 4096).transient == 10 * CHUNK + 2 * 4096 * 128 + chunk


def test_every_expert_has_weights_and_few_work():
    dense = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    dense |= {"intermediate_size": 256, "vocab_size": 100}
    experts = dense | {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    attention = 64 * (2 * 16 * 8)
    assert estimated_sizes(dense)[0] == 3 * (attention + 64 * 3 * 256) + 6400
    assert estimated_sizes(experts)[0] == 3 * (attention + 8 * 64 * 3 * 32) + 6400
    assert estimated_sizes(experts)[1] == 2 * (4 * 64 + max(256, 3 * 64))


def layers_of(config: dict) -> list[LayerShape]:
    made = plan_of(config)
    assert not made.estimate, made.estimate
    return made.layers


def parameters(config: dict) -> float:
    """Of 16 bits."""
    return plan_of(config).weights / 2


def test_published_sizes():
    """Qwen3-4B has 4.02 billion weights and needs 4608 MiB at 32K; Gemma-3-1B has 1.0 billion."""
    assert parameters(QWEN3_4B) == pytest.approx(4.02e9, rel=0.01)
    assert parameters(GEMMA3_1B) == pytest.approx(1.0e9, rel=0.01)
    assert need(plan_of(QWEN3_4B), PRESETS["fp16"], 32768).cache == 4608 * 2**20
    layers = layers_of(GEMMA3_1B)
    assert [layer.kind for layer in layers].count("full") == 4
    assert sum(2 * layer.values(32768) for layer in layers if layer.kind == "full") == 128 * 2**20
    assert sum(2 * layer.values(32768) for layer in layers if layer.kind == "sliding") == 11 * 2**20


def test_compressed_layer_by_hand():
    layer, kv = LayerShape("full", 8, 128, 128), PRESETS["int4"]
    # 1000 tokens: 64 sink, 65 to 128 recent, 13 pages of 64, and the exact tokens of the page quantized last.
    packed = 13 * 64 * 8 * 256 * 4.5 / 8
    exact = 2 * (1000 - 13 * 64 + 64) * 8 * 256
    assert layer_bytes(layer, kv, 1000) == packed + exact
    room = 2 * (64 + 64 - (1000 - 64 - 13 * 64)) * 8 * 256
    assert need(ModelPlan("one", [layer], 0, ""), kv, 1000).cache == packed + exact + room
    assert layer_bytes(layer, kv, 100) == 2 * 100 * 8 * 256
    assert layer_bytes(layer, PRESETS["fp16"], 1000) == 2 * 1000 * 8 * 256
    following, static = parse_kv("oja-0.75+int4"), config_named("static-0.75+int4+windows")
    bases = 2 * 8 * 128 * 96 * 4  # of keys and values
    assert layer_bytes(layer, following, 1000) - layer_bytes(layer, static, 1000) == bases
    assert layer_bytes(layer, following, 8) == layer_bytes(layer, static, 8)
    sizes = (cache_shape(layer, kv).allocated(4 * CHUNK, CHUNK) for kv in (following, static))
    assert next(sizes) - next(sizes) == 2 * bases  # of two runs


def test_selection_needs_room_for_the_whole_prompt_first():
    queries = 2 * 36 * 32 * 32 * 128  # the last 32 of 32 heads, until the prompt is read
    for name in ("int4", "fp16"):
        whole, half = (
            need(plan_of(QWEN3_4B), config_named(kv), 32768) for kv in (name, f"{name}+keep0.5")
        )
        # fp16 that is selected from has pages, and keeps the last one twice.
        twice = 0 if name == "int4" else 2 * 36 * 64 * 8 * 256
        assert half.total == whole.total + queries + twice and half.cache < 0.6 * whole.cache


def test_layers_that_stay_in_16_bits():
    kv = PRESETS["hadamard-int4"]
    odd = LayerShape("full", 1, 96, 96)
    assert layer_bytes(odd, kv, 4096) == 2 * odd.values(4096)
    window = LayerShape("sliding", 1, 64, 64, window=512)
    assert layer_bytes(window, kv, 4096) == 2 * 512 * 128


def test_keys_that_keep_their_mean_stay_in_16_bits():
    """As loading decides: gpt-oss has a sink logit beside its scores, Gemma 2 a cap on them."""
    for family in ("gpt_oss", "gemma2"):
        full = next(x for x in layers_of(random_models.config_of(family)) if x.kind == "full")
        assert why_16_bits(full, parse_kv("centred-int2")) == TIED
        for dialled, stored in (("fill-2.25", "int2"), ("fill-3", "int3"), ("fill-5", "int4")):
            assert bits_in_pages(full, parse_kv(dialled)) == bits_in_pages(full, parse_kv(stored))
        assert bits_in_pages(full, parse_kv("centred-int2")) == 16
        assert why_16_bits(full, PRESETS["int4"]) is None
    plain = layers_of(random_models.config_of("llama"))[0]
    assert why_16_bits(plain, parse_kv("fill-2.25")) is None


def test_longest_is_the_last_that_fits():
    model, kv = plan_of(QWEN3_4B), PRESETS["int4"]
    usable = need(model, kv, 20000).total
    found = longest(model, kv, usable)
    assert need(model, kv, found).total <= usable < need(model, kv, found + 1).total
    assert longest(model, kv, 10) == 0
    assert longest(model, kv, 2**50) == 40960


def test_sizes():
    assert parse_size("16GB", "x") == parse_size("16 GiB", "x") == 16 * 2**30
    assert parse_size("512M", "x") == 512 * 2**20
    assert parse_tokens("32k", "x") == parse_tokens("32K", "x") == 32768
    assert parse_tokens("0.5k", "x") == 512
    assert human_bytes(1536) == "1.5 KiB" and human_bytes(3 * 2**30) == "3.00 GiB"
    for text in ("", "GB", "-1GB", "0GB", "16XB"):
        with pytest.raises(UserError, match="not a size"):
            parse_size(text, "--memory")
    for text in ("", "k", "0", "-5", "many"):
        with pytest.raises(UserError, match="not a number of tokens"):
            parse_tokens(text, "--context")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_4B))
    return str(path)


def test_the_command(config_file, capsys):
    args = ["fit", "--model", config_file, "--context", "32k", "--memory", "16GB"]
    assert main([*args, "--kv", "fp16", "--kv", "int8/int4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["context"], data["memory_bytes"]) == (32768, 16 * 2**30)
    assert data["weights_source"] == "computed from config.json"
    assert [row["preset"] for row in data["presets"]] == ["fp16", "int8/int4"]
    plain, pair = data["presets"]
    assert plain["kv_bytes"] == 4608 * 2**20 and not plain["fits"]
    assert 6.5 < pair["bits_per_value"] < 6.7 and pair["kv_bytes"] <= pair["kv_bytes_allocated"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "36 layers keep the whole context: 8 kv heads x 128" in out
    assert "more while reading a prompt" in out and "longest context" in out


def test_a_pack_has_the_bytes_in_use(config_file, capsys):
    words = ["fit", "--model", str(config_file), "--context", "8k", "--kv", "int4"]
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["presets"]
    assert main([*words, "--pack"]) == 0
    out = capsys.readouterr().out
    (head,) = [line.split() for line in out.splitlines() if " preset" in line]
    (line,) = [line for line in out.splitlines() if line.startswith(" int4")]
    assert head[2] == "pack" and f" {human_bytes(row['kv_bytes'])} " in line
    assert main(words) == 0 and " pack " not in capsys.readouterr().out
    assert main(["fit", "--pack"]) == 2
    assert "[--pack] is for one model" in capsys.readouterr().err


def test_every_alias_and_how_far_it_reaches(capsys, monkeypatch):
    names = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-coder-30b")
    monkeypatch.setattr(fit, "HUB", {name: HUB[name] for name in names})
    args = ["fit", "--memory", "16GB", "--kv", "fp16,int4"]
    assert main([*args, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert [row["model"] for row in rows] == ["qwen3-coder-30b", "llama-3.1-8b", "qwen3-0.6b"]
    assert rows[0]["longest_context"] == {"fp16": 0, "int4": 0}
    assert main(["fit", "-m", "llama-3.1-8b", *args[1:], "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    reach = {row["preset"]: row["longest_context"] for row in presets}
    assert rows[1]["longest_context"] == reach and 0 < reach["fp16"] < reach["int4"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "too large: qwen3-coder-30b\n" in out and "qwen3-coder-30b " not in out
    assert out.index("llama-3.1-8b") < out.index("qwen3-0.6b")
    monkeypatch.setattr(fit, "HUB", {name: HUB[name] for name in ("gpt-oss-20b", *names)})
    assert main(["fit", "--memory", "16GB"]) == 0
    replaced = "fill-4: int4 takes its place; fill-3: int3 takes its place; fill-2.25: int2 takes its place"
    assert f"\ngpt-oss-20b: {replaced}\n" in capsys.readouterr().out

    def stops_at_the_smallest(plan, *rest):
        if plan.name == HUB["qwen3-0.6b"]:
            raise KeyboardInterrupt
        return longest(plan, *rest)

    monkeypatch.setattr(fit, "longest", stops_at_the_smallest)
    main(args)
    out = capsys.readouterr().out
    assert "llama-3.1-8b " in out and "qwen3-0.6b" not in out


def test_a_context_beyond_the_model(config_file, capsys):
    assert main(["fit", "--model", config_file, "--context", "128k"]) == 2
    assert "takes 40960" in capsys.readouterr().err


def test_no_context_means_32k_or_what_the_model_takes(config_file, tmp_path, capsys):
    small = tmp_path / "small.json"
    small.write_text(json.dumps(QWEN3_4B | {"max_position_embeddings": 8192}))
    for path, tokens in ((config_file, 32768), (small, 8192)):
        assert main(["fit", "--model", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["context"] == tokens


def test_weights_are_read_from_the_files(tmp_path, model_folder):
    from mlxkv.catalog.hub import locate

    size = (model_folder / "model.safetensors").stat().st_size
    assert locate(str(model_folder)).weights == size
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)).weights is None
    index = {"metadata": {"total_size": 12345}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert locate(str(tmp_path)).weights == 12345


def test_fit_knows_the_aliases_without_the_hub(subtests, capsys, monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise AssertionError("reached for the hub")

    monkeypatch.setenv("MLXKV_MODELS", str(tmp_path))
    monkeypatch.setattr("mlxkv.catalog.hub.fetch", no_network)
    monkeypatch.setattr("mlxkv.catalog.hub.cached", lambda name: None)
    for alias in ("qwen3-4b", "gpt-oss-20b", "glm-4.7-flash"):
        with subtests.test(fit=alias):
            assert main(["fit", "-m", alias, "--memory", "64GB", "--json"]) == 0
            data = json.loads(capsys.readouterr().out)
            assert data["model"] == HUB[alias] and "not downloaded" in data["weights_source"]
            assert data["context_limit"] >= 8192
            stored = {row["preset"]: row["kv_bytes"] for row in data["presets"]}
            assert stored["fp16"] > stored["int4"] > stored["fill-2.25"]


DEEPSEEK_V3 = random_models.CONFIGS["deepseek_v3"]


def test_latents_by_hand():
    """DeepSeek-V3 has 671 billion weights; a token takes 61 layers of 512 + 64 numbers."""
    assert parameters(DEEPSEEK_V3) == pytest.approx(671e9, rel=0.002)
    (layer,) = set(layers_of(DEEPSEEK_V3))
    assert (layer.kind, layer.key_dim, layer.value_dim) == ("latent", 512, 64)
    assert need(plan_of(DEEPSEEK_V3), PRESETS["fp16"], 32768).cache == 32768 * 61 * 576 * 2
    # 1000 tokens: 13 pages of 64 latents at 4.5 bits, the rest and the last page in 16; rotary keys in pages by a byte
    # each and a scale a token, or exact.
    packed, exact = 13 * 64 * 512 * 4.5 / 8, 2 * (1000 - 13 * 64 + 64) * 576
    assert layer_bytes(layer, PRESETS["int4"], 1000) == packed + exact + 13 * 64 * (64 + 2)
    assert layer_bytes(layer, PRESETS["naive-int4"], 1000) == packed + exact + 13 * 64 * 64 * 2
    for kv in ("static-0.75", "polar"):
        assert layer_bytes(layer, PRESETS[kv], 1000) == 2 * 1000 * 576
    # A prefill makes keys and values of 128 heads from the latents of one layer.
    wide = need(plan_of(DEEPSEEK_V3), PRESETS["int4"], 32768).transient
    assert wide > 2 * 32768 * 128 * (128 + 128)


def test_deepseek_v2_caches_keys_and_values_of_every_head():
    rope = {"rope_scaling": random_models.FAMILIES["deepseek_v2"]["rope_scaling"]}
    (layer,) = set(layers_of(DEEPSEEK_V3 | {"model_type": "deepseek_v2"} | rope))
    assert (layer.kind, layer.kv_heads, layer.key_dim, layer.value_dim) == ("full", 128, 192, 128)


def test_fit_says_what_latents_are(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    main(["fit", "--model", str(path), "--kv", "int4,static-0.75", "--memory", "512g"])
    said = capsys.readouterr().out
    assert "61 layers keep a latent of 512 and a rotary key of 64 per token (MLA)" in said
    assert "static-0.75: some layers stay in 16 bits (a latent is of low rank already)" in said


def test_bits_of_latents_in_pages():
    (layer,) = set(layers_of(DEEPSEEK_V3))
    assert bits_in_pages(layer, PRESETS["int4"]) == (512 * 4.5 + 64 * 8 + 16) / 576
    assert bits_in_pages(layer, PRESETS["hadamard-int4"]) == (512 * 4.5 + 64 * 16) / 576
    assert bits_in_pages(layer, PRESETS["polar"]) == bits_in_pages(layer, PRESETS["fp16"]) == 16
    assert bits_in_pages(LayerShape("full", 8, 128, 128), PRESETS["int4"]) == 4.5
    assert bits_in_pages(LayerShape("sliding", 8, 128, 128, 512), PRESETS["int4"]) == 16


def test_what_takes_the_place_of_mixed_bits_is_named(capsys):
    """gpt-oss has sink logits; its fill-4 showed int4's figures without a word."""
    assert main(["fit", "-m", "gpt-oss-20b", "--kv", "int4,fill-4"]) == 0
    said = capsys.readouterr().out
    assert "fill-4: int4 takes its place" in said and "int4: " not in said
    main(["fit", "-m", "llama-3.1-8b", "--kv", "fill-4"])
    assert "takes its place" not in capsys.readouterr().out


def test_a_folder_without_a_model_says_so(tmp_path, capsys):
    assert main(["fit", "-m", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "config.json is missing; got" in said and said.count(str(tmp_path)) == 2
