"""Which values below a GGUF file's architecture are read, and which change nothing that is computed here.

Any other is refused: llama.cpp, or whoever wrote it, may compute by it what mlx-lm does not. Sources: load_hparams of
llama.cpp with the graphs of the architectures in `config.MODELS`, and what ollama's converters write.
"""

from __future__ import annotations

from typing import Any

from mlxkv.untrusted import Unsound

OTHER_FILE = "choose another file, or the model's folder in the hub's format"

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
# Sizes that tensors have, too; what is said of the model's making; the images' side; experts, where there are none.
UNUSED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
UNUSED_GROUPS = ("vision.", "audio.", "mm.", "expert_")
# What ollama calls the bases; the capping that it writes is Gemma 2's, and no Gemma 3 has one.
OWN = {"gemma3": ("rope.local.freq_base", "rope.global.freq_base", "final_logit_softcapping")}
# Read in no model here: the numbers with which they change nothing.
IDLE = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length"), (0,)),
    **dict.fromkeys(("attention.shared_kv_layers", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("leading_dense_block_count", "moe_every_n_layers"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "rope.scaling.yarn_ext_factor": (1, -1),  # -1: as the type of scaling says
    "rope.freq_scale": (1,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "pooling_type": (0, (1 << 32) - 1),  # none, not said; others make embeddings
}


def check(metadata: dict[str, Any], kind: str) -> None:
    """Raise Unsound for a value of the architecture `kind` by which something else may be computed."""
    known = (*READ, *UNUSED, *OWN.get(kind, ()))
    for key, value in metadata.items():
        architecture, _, name = key.partition(".")
        if architecture != kind or name in known or name.startswith(UNUSED_GROUPS):
            continue
        if name not in IDLE or isinstance(value, (str, list)) or value not in IDLE[name]:
            got = f" of {value:g}" if isinstance(value, (int, float)) else ""
            raise Unsound(f"has a {key[:80]!r}{got}, which is not read", OTHER_FILE)
