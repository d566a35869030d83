"""Shapes of the models, and their config.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Shape of a model. All kinds tie input and output embeddings."""

    kind: str  # "gemma3_text", "qwen2" or "deepseek_v3"
    vocab: int
    width: int
    layers: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    window: int = 512
    theta: float = 1e6
    theta_local: float = 1e4
    eps: float = 1e-6
    pattern: int = 2  # Gemma: every `pattern`-th layer sees everything
    context: int = 8192
    dtype: str = "float16"  # of the exported weights
    gain: float = 1.3  # of q_norm and k_norm at the start
    offsets: bool = True  # Qwen: start with large constant K channels
    rank: int = 0  # DeepSeek: numbers of a latent
    rope: int = 0  # DeepSeek: dims of the rotary key, of `head_dim`

    @property
    def gemma(self) -> bool:
        return self.kind == "gemma3_text"

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kind == "deepseek_v3"

    @property
    def turned(self) -> int:
        """Dims of a head that the rotary embedding turns."""
        return self.rope or self.head_dim

    def local(self, layer: int) -> bool:
        """Return whether a layer sees the last `window` tokens only: all but every `pattern`-th layer."""
        return self.gemma and (layer + 1) % self.pattern != 0

    def hub(self) -> dict:
        """Return config.json as transformers and mlx-lm read it."""
        common = {
            "model_type": self.kind,
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": [4, 2],
            "pad_token_id": 0,
            "torch_dtype": self.dtype,
        }
        if self.latent:  # dense layers alone: experts begin behind the last one
            return common | {
                "architectures": ["DeepseekV3ForCausalLM"],
                "hidden_act": "silu",
                "attention_bias": False,
                "q_lora_rank": None,
                "kv_lora_rank": self.rank,
                "qk_rope_head_dim": self.rope,
                "qk_nope_head_dim": self.head_dim - self.rope,
                "v_head_dim": self.head_dim,
                "rope_interleave": True,
                "first_k_dense_replace": self.layers,
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0,
            }
        if not self.gemma:
            return common | {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_act": "silu",
                "use_sliding_window": False,
            }
        return common | {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": self.head_dim,
            "query_pre_attn_scalar": self.head_dim,
            "sliding_window": self.window,
            "sliding_window_pattern": self.pattern,
            "layer_types": [
                "sliding_attention" if self.local(i) else "full_attention"
                for i in range(self.layers)
            ],
            "rope_local_base_freq": self.theta_local,
            "attention_bias": False,
        }

    @staticmethod
    def from_hub(config: dict) -> "Config":
        """Read a config.json of this folder's models."""
        rope = config.get("qk_rope_head_dim", 0)
        each = config["hidden_size"] // config["num_attention_heads"]
        return Config(
            kind=config["model_type"],
            vocab=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            ff=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["v_head_dim"] if rope else config.get("head_dim", each),
            window=config.get("sliding_window") or 512,
            pattern=config.get("sliding_window_pattern", 2),
            context=config["max_position_embeddings"],
            dtype=config["torch_dtype"],
            offsets=False,  # the weights that follow say what they are
            theta=config["rope_theta"],
            rank=config.get("kv_lora_rank", 0),
            rope=rope,
        )


CONFIGS = {
    "tiny": Config("gemma3_text", vocab=3072, width=256, layers=8, ff=736, heads=4, kv_heads=1),
    "tiny-qwen": Config("qwen2", vocab=3072, width=512, layers=5, ff=320, heads=4, kv_heads=2),
    "tiny-mla": Config(
        "deepseek_v3",
        vocab=3072,
        width=256,
        layers=7,
        ff=640,
        heads=8,
        kv_heads=8,
        head_dim=64,
        theta=1e4,
        rank=128,
        rope=32,
    ),
}
