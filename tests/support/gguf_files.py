"""Write small GGUF files from random weights, and the same numbers as a folder in the hub's format.

What llama.cpp's converters do to tensors is written here from their side: rows of q and k of a llama are put in its
order, and one is added to Gemma's norms.
"""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Types
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file
from small_models import TINY

TOKENIZER = Path(TINY)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 3072, 256, 512, 2, 4, 2
DIMS = HIDDEN // HEADS
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"IQ4_XS": (0,), "IQ4_NL": (0,), "IQ3_S": (0,)}  # where a block has float16 numbers
CODED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}


def raw(rng: np.random.Generator, shape: tuple[int, ...], kind: str, scale: float) -> np.ndarray:
    """A tensor as GGUF stores it."""
    numbers = (scale * rng.standard_normal(shape)).astype(np.float32)
    if kind in CODED or kind in ("F32", "F16", "BF16"):
        return quantize(numbers, Types[kind])
    block, size = GGML_QUANT_SIZES[Types[kind]]
    data = rng.integers(0, 256, (numbers.size // block, size), dtype=np.uint8)
    small = (rng.uniform(0.5, 1, (len(data), 1)) * scale / 512).astype(np.float16)
    for at in HALVES[kind]:
        data[:, at : at + 2] = small.view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def plain(data: np.ndarray, kind: str) -> np.ndarray:
    return dequantize(data, Types[kind]).astype(np.float32)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads dims, ...] from the hub's order to llama.cpp's, for which it transforms pairs side by
    side."""
    order = np.arange(len(rows)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return rows[order]


def tensors(
    arch: str, kinds: list[str], seed: int = 0, tied: bool = True
) -> dict[str, tuple[np.ndarray, str]]:
    """Tensors by llama.cpp's names, in the hub's order of rows, with their types: `kinds` in turn."""
    rng = np.random.default_rng(seed)
    queries, keys = HEADS * DIMS, KV_HEADS * DIMS
    matrices = {
        "attn_q": (queries, HIDDEN),
        "attn_k": (keys, HIDDEN),
        "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if arch in ("qwen3", "gemma3"):
        norms |= {"attn_q_norm": DIMS, "attn_k_norm": DIMS}
    if arch == "gemma3":
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
    wanted = {"token_embd.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        wanted |= {f"blk.{i}.{name}.weight": shape for name, shape in matrices.items()}
        wanted |= {f"blk.{i}.{name}.weight": (size,) for name, size in norms.items()}
        if arch == "qwen2":
            wanted |= {f"blk.{i}.attn_{x}.bias": (queries if x == "q" else keys,) for x in "qkv"}
    wanted["output_norm.weight"] = (HIDDEN,)
    if not tied:
        wanted["output.weight"] = (VOCAB, HIDDEN)
    out, count = {}, 0
    for name, shape in wanted.items():
        if len(shape) == 1:
            numbers = 0.1 * rng.standard_normal(shape) + ("norm" in name)
            out[name] = numbers.astype(np.float32), "F32"
        else:
            out[name] = raw(rng, shape, kinds[count % len(kinds)], 0.06), kinds[count % len(kinds)]
            count += 1
    return out


NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA = NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hub_name(name: str, arch: str) -> str:
    *front, part, end = name.split(".")
    if not front:
        return f"{OUTSIDE[part]}.{end}"
    return f"model.layers.{front[1]}.{(GEMMA if arch == 'gemma3' else NAMES)[part]}.{end}"


def write_folder(folder: Path, arch: str, made: dict, **more) -> Path:
    """The numbers of `tensors` as a folder that mlx-lm and transformers load, in float32."""
    folder.mkdir()
    weights = {
        hub_name(name, arch): plain(data, kind) - (arch == "gemma3" and "norm" in name)
        for name, (data, kind) in made.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "gemma3_text" if arch == "gemma3" else arch,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIMS,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_theta": 50000.0,
        "tie_word_embeddings": "output.weight" not in made,
        "dtype": "float32",
    }
    if arch == "gemma3":
        config |= {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": DIMS}
    (folder / "config.json").write_text(json.dumps(config | more))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    return folder


def write_gguf(path: Path, arch: str, made: dict, leave: tuple[str, ...] = (), **more) -> Path:
    """The same as a GGUF file, with the tokenizer of the small Gemma. leave: values to leave out; more: others, by
    their name with _ for a dot."""
    writer = GGUFWriter(path, arch)
    for name, value in {
        "context_length": 1024,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": DIMS,
        "attention.value_length": DIMS,
        **({"attention.sliding_window": 16} if arch == "gemma3" else {}),
    }.items():
        if name not in leave:
            writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 50000.0)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    if arch == "gemma3":  # two layers: one slides, one does not
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [True, False])
    for name, value in more.items():
        name = f"{arch}.{name.replace('__', '.')}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add |= {bool: writer.add_bool, list: writer.add_array}
        add[type(value)](name, value)
    write_tokenizer(writer)
    for name, (data, kind) in made.items():
        part = name.split(".")[-2]
        if arch == "llama" and part in ("attn_q", "attn_k"):
            data = unpermuted(data, HEADS if part == "attn_q" else KV_HEADS)
        writer.add_tensor(name, data, raw_dtype=Types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: GGUFWriter) -> None:
    data = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"] | {one["content"]: one["id"] for one in data["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    special = {one["content"] for one in data["added_tokens"] if one["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-r1-qwen")  # its split, without a normal form
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = data["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(vocab["<bos>"])
    writer.add_eos_token_id(vocab["<end_of_turn>"])
    about = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    writer.add_chat_template(about["chat_template"])
