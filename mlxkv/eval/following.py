"""Bases that follow the text, measured: `python -m mlxkv.eval.following shift|stored|drift`.

shift    KL of decoding a text of another kind than the prompt, per preset
stored   what is left of stored tokens, of the prompt and of those decoded, per preset
drift    orthonormality and memory over many decoded tokens
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np

from mlxkv import calibrated, console
from mlxkv.adaptive import AdaptiveKVCache
from mlxkv.config import parse_kv
from mlxkv.eval import divergence
from mlxkv.eval.ablation.domains import DOMAINS, judged_on
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.prompts import encode
from mlxkv.models import load
from mlxkv.models.layers import find
from mlxkv.models.probe import put
from mlxkv.models.rebind import bind, release
from mlxkv.models.seam import own_make_cache
from mlxkv.models.taps import Call, Ear
from mlxkv.whitening import off_orthonormal

KV = "static-0.75+windows,oja-0.75,oja-0.75+transport,oja-0.75+stay,oja-0.75+fast+all,oja-0.75+raw"
CHUNK, STEP = 512, 8  # tokens of a prompt read at once, and decoded
HEADS, DIMS = 2, 128  # of drift


def text(loaded, kind: str, count: int) -> list[int]:
    """`count` tokens (or all there are) of "stories", "corpus" or, say, "corpus code"."""
    from mlxkv import corpus

    if kind in ("stories", "corpus"):
        return judged_on(loaded, kind, count)
    pieces = corpus.pieces("evaluation")[kind.removeprefix("corpus ")]
    return encode(loaded, "\n\n".join(pieces))[:count]


def shift(args: argparse.Namespace) -> list[list[str]]:
    loaded = load(args.model)
    arms = Arms(loaded, args.kv)
    tokens = text(loaded, args.first, args.context) + text(loaded, args.second, args.decode + 1)
    names = [name for name in arms.names if name != BASELINE]
    found = divergence.measure(arms, names, tokens, args.context, lambda _: None)
    legs = {name: found[name]["legs"]["decode"] for name in names}
    return [
        [n, f"{x['kl']['mean']:.5f}", f"{x['kl']['p99']:.4f}", f"{100 * x['same_top']:.1f}"]
        for n, x in legs.items()
    ]


def exact(loaded, tokens: list[int]) -> dict[tuple, Call]:
    """One call of attention over `tokens` per layer that could be compressed."""
    own, slots, calls = own_make_cache(loaded.model), bind(loaded.model), {}
    try:
        caches = own()
        for place in find(loaded.model, own).shapes:
            put(caches, place, Ear(lambda call, place=place: calls.setdefault(place, call)))
        mx.eval(loaded.model(mx.array(tokens)[None], cache=caches))
    finally:
        release(slots)
    return calls


def stored(args: argparse.Namespace) -> list[list[str]]:
    loaded = load(args.model)
    prompt = text(loaded, args.first, args.context)
    sources = [exact(loaded, t) for t in (prompt, text(loaded, args.second, args.decode))]
    arms, rows = Arms(loaded, args.kv), []
    for name in args.kv:
        config = parse_kv(name)
        made = calibrated.of(arms.calibration(name), config.fitted)
        errors = [
            _left(AdaptiveKVCache(config, made[".".join(map(str, place))]), call, sources[1][place])
            for place, call in sources[0].items()
        ]
        rows.append([name, *(f"{x:.4f}" for x in np.mean(errors, axis=0))])
    return rows


def _left(cache: AdaptiveKVCache, prompt: Call, rest: Call) -> list[float]:
    """Relative error of keys, of the prompt and decoded, then of values."""
    for start in range(0, prompt.queries.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        view, _ = cache.update_and_fetch(*(x[:, :, part] for x in prompt.exact))
        q = prompt.queries[:, :, part]
        heard = q if view.heard is None else view.heard(q, q, prompt.scale, None)
        mx.eval(heard, cache.state)
    for start in range(0, rest.queries.shape[2], STEP):
        cache.update_and_fetch(*(x[:, :, start : start + STEP] for x in rest.exact))
        mx.eval(cache.state)
    view, out = cache.keys_and_values()[0], []
    first = view.sink[0].shape[2] if view.sink else 0
    cut = prompt.queries.shape[2] - first
    for side in (0, 1):
        whole = mx.concatenate([prompt.exact[side], rest.exact[side]], axis=2).astype(mx.float32)
        whole = whole[:, :, first : first + view.pages.tokens]
        error = view.pages.decode(side, mx.float32) - whole
        for part in (slice(0, cut), slice(cut, None)):
            ratio = mx.square(error[:, :, part]).sum() / mx.square(whole[:, :, part]).sum()
            out.append(mx.sqrt(ratio).item())
    return out


def drift(args: argparse.Namespace) -> list[list[str]]:
    rows = []
    for name in args.kv:
        config, rng, worst = parse_kv(name), np.random.default_rng(0), 0.0
        cache = AdaptiveKVCache(config, calibrated.sample(HEADS, (DIMS, DIMS), config.fitted))
        mix = 0.0
        for step in range(args.decode):
            if step % 1000 == 0:  # the text turns
                turn = rng.standard_normal((HEADS, DIMS, DIMS)) * np.exp(-0.05 * np.arange(DIMS))
                mix = 0.5 * mix + 0.5 * turn
            x = mx.array((rng.standard_normal((2, HEADS, 1, DIMS)) @ mix).astype(np.float32))
            cache.update_and_fetch(x[0][None], x[1][None])
            if step % 32 == 31:
                mx.eval(cache.state)
                now = cache.basis
                worst = max(worst, *(off_orthonormal(t.down) for t in (now.keys, now.values)))
        rows.append([name, f"{worst:.1e}", str(cache.nbytes)])
    return rows


COLUMNS = {
    "shift": ("preset", "KL", "KL 99 %", "top %"),
    "stored": ("preset", "keys: prompt", "decoded", "values: prompt", "decoded"),
    "drift": ("preset", "largest |U^T U - I|", "bytes"),
}
WHAT = {"shift": shift, "stored": stored, "drift": drift}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=WHAT)
    add("--model", default="tiny-hard")
    add("--kv", type=lambda names: names.split(","), default=KV.split(","), help="by commas")
    add("--first", default="stories", choices=DOMAINS, help="kind of the prompt")
    add("--second", default="corpus code", choices=DOMAINS, help="kind of what is decoded")
    add("--context", type=int, default=1024, help="tokens of the prompt")
    add("--decode", type=int, default=512, help="tokens decoded")
    args = parser.parse_args(arguments)
    console.print_table(COLUMNS[args.what], WHAT[args.what](args), f"{args.model}, {args.what}")


if __name__ == "__main__":
    console.run_tool(main)
