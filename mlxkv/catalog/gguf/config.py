"""Translate a GGUF model to the hub's terms: the equivalent config.json, and the names of its tensors.

Sources: the converters of llama.cpp (gguf-py and convert_hf_to_gguf.py), and the assumptions of its graphs.
"""

from __future__ import annotations

from array import array
from math import isfinite, log, pi, prod, sqrt
from pathlib import Path
from typing import Any

from mlxkv import untrusted
from mlxkv.catalog.gguf.header import BY_NAME, OTHER_FILE
from mlxkv.catalog.gguf.header import read_header as read_header
from mlxkv.catalog.gguf.tokens import end_tokens, special, vocabulary
from mlxkv.untrusted import Tensor, TensorsHeader, Unsound, whole

MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
# Descriptions of files that are not models, by general.type.
OTHERS = {
    "adapter": "is an adapter (LoRA), which changes a model and is none",
    "mmproj": "is the images' side of a model (mmproj), without its language model",
    "imatrix": "is an importance matrix (imatrix), by which models are rounded",
}
# Names inside a layer, without their suffix.
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FACTORS = "rope_freqs.weight"
UNUSED = ("v.", "mm.")  # of the vision part, which ollama stores in the same file
# Bits of the affine codes that MLX computes with, in groups of 32; others are decoded to 16 bits.
CODES = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q8_0": 8}
GROUP = 32
GEMMA_27B = 62  # layers: the only Gemma 3 with scores scaled by hidden size / heads


class Values:
    """Values of the model by llama.cpp's names, of checked types."""

    def __init__(self, header: TensorsHeader):
        self._metadata = header.metadata
        kind = header.metadata.get("general.architecture")
        if not isinstance(kind, str) or kind not in MODELS:
            name = kind[:60] if isinstance(kind, str) else "none"
            raise Unsound(
                f"is of the architecture {name!r}, which is not read; those are {', '.join(MODELS)}",
                OTHER_FILE,
            )
        self.kind = kind

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a number above 0; in a list with one per layer, all must be equal."""
        value = self._metadata.get(f"{self.kind}.{name}", default)
        if isinstance(value, array) and value:
            if len(set(value)) > 1:
                raise Unsound(f"has layers that differ in {name}, which is not read", OTHER_FILE)
            value = value[0]
        return whole(value, name, 1, 1 << 31)

    def real(self, name: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self.kind}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Unsound(f"has no {name} above 0")
        if not isfinite(value) or value <= 0:
            raise Unsound(f"has no {name} above 0")
        # Stored in 32 bits: the intended number is the shortest that rounds to it.
        return float(f"{value:.7g}")

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.kind}.{name}", default)


def read_config(path: Path) -> tuple[TensorsHeader, dict[str, Any]]:
    """Return the checked header of a GGUF file, and the equivalent config.json. Raises FileNotFoundError and
    Unsound."""
    header = read_header(path)
    factors = header.tensors.get(FACTORS)
    if factors is None:
        return header, config(header)
    if factors.dtype != "F32" or not 1 <= factors.shape[0] == prod(factors.shape) <= 1 << 16:
        raise Unsound("scales positions by factors of another form")
    with untrusted.opened(path) as file:
        file.seek(factors.span[0])
        return header, config(header, tuple(array("f", file.read(4 * factors.shape[0]))))


def config(header: TensorsHeader, factors: tuple[float, ...] | None = None) -> dict[str, Any]:
    """Return the equivalent config.json. factors: the numbers of `FACTORS`, if the file has them.

    Raises Unsound for another architecture and for inconsistent values. mlx-lm's model checks the tensors.
    """
    is_clip = header.metadata.get("general.architecture") == "clip"  # older than general.type
    named = "mmproj" if is_clip else header.metadata.get("general.type")
    if isinstance(named, str) and named in OTHERS:
        raise Unsound(OTHERS[named], "name the file of the model itself")
    values = Values(header)
    if not header.tensors:
        raise Unsound(
            "has a vocabulary alone, without weights", "name the file of the model itself"
        )
    if type(count := header.metadata.get("split.count", 1)) is not int or count > 1:
        raise Unsound("is a part of a model", "join its files by llama-gguf-split --merge")
    if values.get("expert_count"):
        raise Unsound("has experts, which are not read", "choose a model without them")
    check_keys(header.metadata, values.kind)
    width, heads = values.whole("embedding_length"), values.whole("attention.head_count")
    dims = values.whole(
        "attention.key_length", values.get("rope.dimension_count") or max(1, width // heads)
    )
    widths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    for name in (*widths, *(f"{name}_swa" for name in widths)):
        if values.whole(name, dims) != dims:
            raise Unsound(f"has a {name} that differs from the width of a head, {dims}", OTHER_FILE)
    table = header.tensors.get("token_embd.weight")
    tokens = vocabulary(header.metadata)
    if table is None or len(table.shape) != 2 or table.shape[0] < len(tokens):
        raise Unsound("has no embedding for each of its tokens")
    out = {
        "model_type": MODELS[values.kind],
        "hidden_size": width,
        "intermediate_size": values.whole("feed_forward_length"),
        "num_hidden_layers": values.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.whole("attention.head_count_kv", heads),
        "head_dim": dims,
        "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": table.shape[0],
        "max_position_embeddings": values.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": end_tokens(header.metadata),
    }
    if heads % out["num_key_value_heads"]:
        raise Unsound("has kv heads whose number does not divide that of its heads")
    if (bos := special(header.metadata, "bos")) is not None:
        out["bos_token_id"] = bos
    if values.kind == "gemma3":
        out |= _gemma(values, out)
    else:
        out |= {"hidden_act": "silu", "rope_theta": values.real("rope.freq_base", 10000.0)}
        window = values.get("attention.sliding_window")
        if window and window < out["max_position_embeddings"]:
            raise Unsound("has layers with a sliding window, which is not read", OTHER_FILE)
    scale = values.get("attention.scale")
    if scale and abs(scale * sqrt(out.get("query_pre_attn_scalar", dims)) - 1) > 1e-4:
        raise Unsound("has an attention.scale of its own, which is not read", OTHER_FILE)
    if "blk.0.attn_output.bias" in header.tensors:
        out["attention_bias"] = True
    if (scaling := _scaling(values, out, factors)) is not None:
        out["rope_scaling"] = scaling
    out["dtype"] = _dtype(header.tensors)
    if codes := [bits for _, bits in _matrices(header.tensors) if bits]:
        out["quantization"] = {"group_size": GROUP, "bits": max(codes, key=codes.count)}
    return out


def _gemma(values: Values, config: dict[str, Any]) -> dict[str, Any]:
    layers, pattern = config["num_hidden_layers"], values.get("attention.sliding_window_pattern")
    if isinstance(pattern, array):  # per layer, whether it is a sliding window
        period = next((i + 1 for i, slides in enumerate(pattern) if not slides), layers + 1)
        if list(pattern) != [int((i + 1) % period != 0) for i in range(layers)]:
            raise Unsound("has sliding layers in no regular pattern", OTHER_FILE)
        pattern = period
    scale = config["hidden_size"] // config["num_attention_heads"]
    base = values.real("rope.freq_base", values.get("rope.global.freq_base") or 1e6)
    local = values.real("rope.freq_base_swa", values.get("rope.local.freq_base") or 1e4)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": base,
        "rope_local_base_freq": local,
        "sliding_window": values.whole("attention.sliding_window"),
        "sliding_window_pattern": whole(6 if pattern is None else pattern, "pattern", 1, 1 << 16),
        "query_pre_attn_scalar": scale if layers == GEMMA_27B else config["head_dim"],
    }


def _scaling(
    values: Values, config: dict[str, Any], factors: tuple[float, ...] | None
) -> dict[str, Any] | None:
    """Return rope_scaling of config.json. As in llama.cpp, a factor without a type is linear, and 0 means none."""
    kind = values.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        name = kind[:60] if isinstance(kind, str) else "none"
        raise Unsound(
            f"scales positions by {name!r}, which is not read; those are linear and yarn",
            OTHER_FILE,
        )
    names = ("rope.scaling.factor", "rope.scale_linear")  # the second: in files of 2023
    given = next((name for name in names if values.get(name) is not None), None)
    if given is None and values.kind == "gemma3" and values.get("vision.block_count"):
        factor = 8.0  # missing in ollama's files
    else:
        factor = values.real(given) if given and values.get(given) != 0 else 1.0
    if factors is not None:
        if kind != "none" and factor != 1:
            raise Unsound("scales positions in two ways, by factors and a number", OTHER_FILE)
        return _llama3(factors, config)
    if kind == "none" or factor == 1:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = values.whole(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    betas = {
        name: values.real(f"rope.scaling.yarn_{name}")
        for name in ("beta_fast", "beta_slow")
        if values.get(f"rope.scaling.yarn_{name}") is not None
    }
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **betas,
    }


def _llama3(factors: tuple[float, ...], config: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3's scaling, from the factors by which a file multiplies each wavelength."""
    dims, base, whole_factor = config["head_dim"], config["rope_theta"], max(factors)
    low, high, original = 1.0, 4.0, 8192
    expected = []
    for i in range(dims // 2):
        length = 2 * pi * base ** (2 * i / dims)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / whole_factor + smooth))
    sound = len(factors) == len(expected) and all(isfinite(x) and x >= 1 for x in factors)
    if not sound or any(abs(log(x / y)) > 1e-3 for x, y in zip(factors, expected, strict=True)):
        raise Unsound("scales positions by factors that are not Llama 3's", OTHER_FILE)
    return {
        "rope_type": "llama3",
        "factor": float(f"{whole_factor:.6g}"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def hub_name(name: str, kind: str) -> str | None:
    """Return the hub's name of a tensor; None if it is not a weight of the language model. Raises
    Unsound for an unknown name."""
    if name == FACTORS or name.startswith(UNUSED):
        return None
    if name in OUTSIDE:
        return OUTSIDE[name]
    block, _, tail = name.partition(".")
    layer, _, tail = tail.partition(".")
    part, _, end = tail.rpartition(".")
    part_name = (NAMES | GEMMA if kind == "gemma3" else NAMES).get(part)
    if block != "blk" or part_name is None or not (layer.isascii() and layer.isdigit()):
        raise Unsound(f"has a tensor that its architecture does not: {name[:60]!r}", OTHER_FILE)
    return f"model.layers.{layer}.{part_name}.{end}"


def _matrices(tensors: dict[str, Tensor]) -> list[tuple[Tensor, int]]:
    """Return the matrices with the bits of their codes, 0 if decoded."""
    weights = [x for name, x in tensors.items() if not name.startswith(UNUSED)]
    return [(x, CODES.get(x.dtype, 0)) for x in weights if len(x.shape) == 2]


def _dtype(tensors: dict[str, Tensor]) -> str:
    """Return the dtype to compute in: that of the matrices, or float16, as the scales, if there are codes."""
    kinds = [x.dtype for x, _ in _matrices(tensors)]
    if any(BY_NAME[kind].block > 1 for kind in kinds):
        return "float16"
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names[max(kinds, key=kinds.count)]


def memory(header: TensorsHeader) -> int:
    """Return the bytes of the weights in memory."""
    plain = 32 if _dtype(header.tensors) == "float32" else 16
    matrices = _matrices(header.tensors)
    return int(
        sum(prod(x.shape) * (code + 32 / GROUP if code else plain) / 8 for x, code in matrices)
    )


# -- keys of the architecture that are read, and keys without effect here
#
# Any other is refused: it may stand for a computation that mlx-lm lacks. Sources: load_hparams of llama.cpp with the
# graphs of the architectures in `MODELS`, and the output of ollama's converters.


READ = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "attention.scale"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
    *("attention.sliding_window", "attention.sliding_window_pattern"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "expert_count"),
)
# Sizes also given by tensors; notes on how the model was made; the vision part; experts in models without any.
WITHOUT_EFFECT = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
UNUSED_GROUPS = ("vision.", "audio.", "mm.", "expert_")
# ollama's names of the bases; the cap it writes is Gemma 2's, and no Gemma 3 has one.
OWN = {"gemma3": ("rope.local.freq_base", "rope.global.freq_base", "final_logit_softcapping")}
# Not read here: the values with which these keys have no effect.
IDLE = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), (0,)),
    **dict.fromkeys(("attention.shared_kv_layers", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("leading_dense_block_count", "moe_every_n_layers"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "rope.scaling.yarn_ext_factor": (1, -1),  # -1: as implied by the type of scaling
    "rope.freq_scale": (1,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "pooling_type": (0, (1 << 32) - 1),  # none, unspecified; others make embeddings
}


def check_keys(metadata: dict[str, Any], kind: str) -> None:
    """Raise Unsound for a value of the architecture `kind` that may change the computation."""
    known = (*READ, *WITHOUT_EFFECT, *OWN.get(kind, ()))
    for key, value in metadata.items():
        architecture, _, name = key.partition(".")
        if architecture != kind or name in known or name.startswith(UNUSED_GROUPS):
            continue
        if name not in IDLE or isinstance(value, (str, list)) or value not in IDLE[name]:
            got = f" of {value:g}" if isinstance(value, (int, float)) else ""
            raise Unsound(f"has a {key[:80]!r}{got}, which is not read", OTHER_FILE)
