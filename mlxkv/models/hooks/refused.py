"""The families of mlx-lm that cannot be compressed, by their file in `mlx_lm/models`, and why.

A family can be compressed if it only passes what `cache.update_and_fetch` returns to
`scaled_dot_product_attention` or to a later layer, or where its own code is reached (`own_code`), or caches
latents. A test derives this table from the source of the installed mlx-lm.
"""

from __future__ import annotations

OWN_CACHE = "its code stores compressed groups of tokens in a cache of its own"
NO_PROMPTS = "its code in mlx-lm reads no prompt (adds the word causal to scores)"
ARRAYS = "its code needs the cached keys as an array ({})"

REFUSED: dict[str, str] = {
    "deepseek_v41": OWN_CACHE,
    "minimax_m3_vl": ARRAYS.format("selects blocks of keys by an index"),
    "olmo": NO_PROMPTS,
}

# Families whose code computes on cached latents (MLA): `hooks.latent` knows how.
LATENTS = {
    *("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
    *("kimi_k3", "kimi_linear", "longcat_flash", "mistral4"),
}

# Layers that reuse another layer's keys read its `.state` before 0.32, `keys_and_values()` since.
REFUSED_BEFORE_0_32: dict[str, str] = {
    "afm7": ARRAYS.format("reads the state of a cache of another layer"),
    "gemma3n": ARRAYS.format("reads the state of a cache of another layer"),
}


def refusal(files: list[str], mlx_lm_version: str) -> str | None:
    """Return why a model with classes in `files` (`mlx_lm.models.llama`) cannot be compressed, or None."""
    table = REFUSED
    if tuple(int(part) for part in mlx_lm_version.split(".")[:2]) < (0, 32):
        table = REFUSED | REFUSED_BEFORE_0_32
    for file in files:
        package, _, family = file.rpartition(".")
        if package == "mlx_lm.models" and family in table:
            return f"{family}: {table[family]}"
    return None
