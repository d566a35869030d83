"""Check two orderings of the SRFT paper: `python -m experiments.orderings seeds|scales`.

seeds    SRFT against Hadamard over sign seeds, at every width (section 4: equal within noise)
scales   one scale per token, per group of 32, and per group after a calibrated scale per channel
         of every layer (section 7.1), with and without the transform

The measure is the KL divergence of decoding after a context, mean and 99 %, on stories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, stdev

import mlx.core as mx
from rich.console import Console
from rich.progress import Progress

from experiments.fixtures import QWEN
from experiments.options import Parser, at_least, write
from mlxkv import console
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Codes
from mlxkv.codec.codec import Codec
from mlxkv.codec.transform import Transform
from mlxkv.eval import feed
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.tasks import divergence
from mlxkv.formats.config import Affine, CacheConfig, Side
from mlxkv.models import load
from mlxkv.texts.sources import story_tokens

BITS = (2, 3, 4)
GROUP = 32
TRANSFORMS = ("srft", "hadamard")
CALIBRATION = 2048  # tokens


def both(bits: int, group: int, transform: str, seed: int = 0) -> CacheConfig:
    """Return the same abs-max codes for keys and values, as in the paper."""
    side = Side(Affine(bits, group, symmetric=True), transform, seed)
    return CacheConfig(side, side)


def seed_arms(seeds: int) -> dict[str, CacheConfig]:
    return {
        f"{transform} {bits} bits, seed {seed}": both(bits, GROUP, transform, seed)
        for bits in BITS
        for transform in TRANSFORMS
        for seed in range(seeds)
    }


def scale_arms() -> dict[str, CacheConfig]:
    arms = {}
    for bits in BITS:
        for transform in ("none", "srft"):
            head = f"{transform} {bits} bits"
            arms[f"{head}, per token"] = both(bits, 0, transform)
            arms[f"{head}, per group"] = both(bits, GROUP, transform)
            arms[f"{head}, per channel and group"] = both(bits, GROUP, transform)
    return arms


@dataclass
class ChannelScales:
    """The paper's lambda: 1 / (largest absolute value of each stored channel), per layer and side.

    keys_and_values: of each layer, from a text that is not judged."""

    keys_and_values: list[tuple[mx.array, mx.array]]
    _codecs: dict = field(default_factory=dict)

    def prepare(self, name: str, caches: list) -> None:
        """Replace the codecs in the caches of a "per channel" arm."""
        if "per channel" not in name:
            return
        for layer, (cache, pair) in enumerate(zip(caches, self.keys_and_values, strict=True)):
            if isinstance(cache, CompressedKVCache):
                store = Codes(cache.config, tuple(x.shape[-1] for x in pair))
                store.codecs = tuple(
                    self._codec(cache.config, layer, side, x) for side, x in enumerate(pair)
                )
                cache._store = store

    def _codec(self, config: CacheConfig, layer: int, side: int, x: mx.array) -> Codec:
        spec = (config.keys, config.values)[side]
        key = (spec, layer, side)
        if key not in self._codecs:
            code = Codec(spec, x.shape[-1], config.page)
            stored = code.store(x.astype(mx.float32))
            scale = 1.0 / mx.maximum(mx.abs(stored).max(axis=(0, 2), keepdims=True)[0], 1e-6)
            if code.transform is None:
                eye = mx.broadcast_to(mx.eye(x.shape[-1]), (x.shape[1], *(x.shape[-1],) * 2))
                code.transform = Transform(eye * scale, eye / scale)
            else:
                code.transform = code.transform.scaled(scale)
            self._codecs[key] = code
        return self._codecs[key]


def channel_scales(loaded) -> ChannelScales:
    """Return the scales of a calibration text, from its keys and values in full precision."""
    tokens = story_tokens(loaded, CALIBRATION, seed="calibration")
    cache = feed.prefill(loaded, tokens)  # mlx-lm's own caches: nothing is attached
    return ChannelScales([tuple(layer.state[:2]) for layer in cache])


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("orderings", __doc__)
    parser.add_argument("what", choices=("seeds", "scales"))
    add = parser.add_argument
    add("--model", default=QWEN, help="an alias, a hub name or a folder")
    add("--context", default="4096", help="tokens of the prompt")
    add("--decode", type=int, default=512, help="tokens decoded one by one after the context")
    add("--seeds", type=int, default=5, help="sign seeds (seeds)")
    args = parser.parse_args(arguments)
    context = console.parse_tokens(args.context, "--context")
    at_least("--context", context, 2)
    at_least("--decode", args.decode, 2)
    at_least("--seeds", args.seeds, 2)
    loaded = load(args.model, "fp16")
    if args.what == "seeds":
        arms = Arms(loaded, seed_arms(args.seeds))
    else:
        arms = Arms(loaded, scale_arms(), prepare=channel_scales(loaded).prepare)
    names = [name for name in arms.names if name != BASELINE]
    tokens = story_tokens(loaded, context + args.decode + 1)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(args.what, total=len(names) * (context + args.decode))
        found = divergence.measure(arms, names, tokens, context, lambda n: bars.advance(bar, n))
    kl = {name: found[name]["legs"]["decode"]["kl"] for name in names}
    title = f"{args.model}, {args.decode} tokens after {context}, KL against fp16 in nats"
    if args.what == "seeds":
        _show_seeds(kl, args.seeds, title)
    else:
        rows = [(n, f"{kl[n]['mean']:.6f}", f"{kl[n]['p99']:.5f}") for n in names]
        console.print_table(("scales", "KL mean", "KL 99 %"), rows, title)
    write({"model": args.model, "context": context, "what": args.what, "kl": kl}, None)


def _show_seeds(kl: dict[str, dict], seeds: int, title: str) -> None:
    rows = []
    for bits in BITS:
        for transform in TRANSFORMS:
            own = [kl[f"{transform} {bits} bits, seed {seed}"] for seed in range(seeds)]
            means, tails = [one["mean"] for one in own], [one["p99"] for one in own]
            rows.append(
                (
                    f"{transform} {bits} bits",
                    f"{mean(means):.6f} ± {stdev(means):.6f}",
                    f"{mean(tails):.5f} ± {stdev(tails):.5f}",
                )
            )
    console.print_table((f"{seeds} sign seeds", "KL mean", "KL 99 %"), rows, title)


if __name__ == "__main__":
    console.run_tool(main)
