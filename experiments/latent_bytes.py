"""`python -m experiments.latent_bytes [--tokens 32768] [--kv LIST]`: bytes of compressed latents, by format.

In pages, computed from the format; in all, allocated by a cache of so many random latents in bfloat16, with its exact
windows and its spare room, beside mlx-lm's own cache of the same tokens (whose spare room is not counted). The table of
docs/results/latents.md.
"""

from __future__ import annotations

import mlx.core as mx

from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.cache.latent.own import LatentKVCache
from mlxkv.codec.maps import sample
from mlxkv.formats.names import parse_kv

PRESETS = ("int8", "int8+rope8", "int4", "int4+rope16", "hadamard-int4", "turbo-int4", "int3")
PRESETS += ("naive-int3", "hadamard-int3", "turbo-int3", "balanced-int3", "hadamard-int3+rope8")
DIMS = 512, 64  # of a latent and of a rotary key: DeepSeek-V3, GLM-4.7-Flash
CHUNK = 4096


def allocated(kv: str, tokens: int) -> int:
    """Bytes of a cache of so many tokens."""
    config = parse_kv(kv).of_latents
    maps = sample(1, DIMS, config.fitted) if config.calibrated else None
    cache = LatentKVCache(config, maps)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        key = mx.random.key(start)
        cache.append(
            *(mx.random.normal((1, 1, count, n), mx.bfloat16, key=key) for n in DIMS), False
        )
        mx.eval(cache.arrays())
    return cache.nbytes


def row(kv: str, tokens: int) -> list[str]:
    """The cells of a preset."""
    bits, exact = parse_kv(kv).of_latents.bits_per_value(*DIMS), 2 * sum(DIMS)
    size, whole = bits * sum(DIMS) / 8, allocated(kv, tokens) / tokens
    cells = [kv, f"{bits:.2f}", f"{size:.0f}", f"{size / exact:.3f}"]
    return [*cells, f"{whole:.0f}", f"{whole / exact:.3f}"]


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("latent_bytes", __doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--kv", type=words, default=PRESETS)
    chosen = parser.parse_args(arguments)
    at_least("--tokens", chosen.tokens, 1)
    for kv in chosen.kv:
        parse_kv(kv)
    heads = ["preset", "bits/value", "bytes/token", "of 16 bits"]
    heads += [f"bytes/token at {chosen.tokens}", "of 16 bits"]
    console.print_table(heads, [row(kv, chosen.tokens) for kv in chosen.kv])


if __name__ == "__main__":
    console.run_tool(main)
