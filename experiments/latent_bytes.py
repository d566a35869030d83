"""`python -m experiments.latent_bytes [--tokens 32768] [--kv LIST]`: bytes of compressed latents, by format and shape.

In pages, computed from the format; in all, allocated by a cache of so many random latents in bfloat16, with its exact
windows and its spare room, beside mlx-lm's own cache of the same tokens (whose spare room is not counted). The table of
docs/results/latents.md.
"""

from __future__ import annotations

import mlx.core as mx

from experiments.latent_kl import PRESETS
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.cache.latent.own import LatentKVCache
from mlxkv.codec.maps import sample
from mlxkv.formats.names import parse_kv

SHAPES = {  # numbers of a latent and of a rotary key
    "GLM-4.7-Flash, DeepSeek-V3": (512, 64),
    "tiny-mla": (128, 32),
}
CHUNK = 4096


def allocated(kv: str, dims: tuple[int, int], tokens: int) -> int:
    """Bytes of a cache of so many tokens."""
    config = parse_kv(kv).of_latents
    maps = sample(1, dims, config.fitted) if config.calibrated else None
    cache = LatentKVCache(config, maps)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        key = mx.random.key(start)
        cache.append(
            *(mx.random.normal((1, 1, count, n), mx.bfloat16, key=key) for n in dims), False
        )
        mx.eval(cache.arrays())
    return cache.nbytes


def rows(
    name: str, dims: tuple[int, int], presets: tuple[str, ...], tokens: int
) -> list[list[str]]:
    exact, out = 2 * sum(dims), []
    for kv in presets:
        bits = parse_kv(kv).of_latents.bits_per_value(*dims)
        size, whole = bits * sum(dims) / 8, allocated(kv, dims, tokens) / tokens
        cells = [name, kv, f"{bits:.2f}", f"{size:.0f}", f"{size / exact:.3f}"]
        out.append([*cells, f"{whole:.0f}", f"{whole / exact:.3f}"])
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("latent_bytes", __doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--kv", type=words, default=PRESETS)
    chosen = parser.parse_args(arguments)
    at_least("--tokens", chosen.tokens, 1)
    for kv in chosen.kv:
        parse_kv(kv)
    heads = ["shape", "preset", "bits/value", "bytes/token", "of 16 bits"]
    heads += [f"bytes/token at {chosen.tokens}", "of 16 bits"]
    table = [r for name, dims in SHAPES.items() for r in rows(name, dims, chosen.kv, chosen.tokens)]
    console.print_table(heads, table)


if __name__ == "__main__":
    console.run_tool(main)
