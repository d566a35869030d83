"""Measure bases that follow the text: `python -m experiments.following shift|stored|drift|bytes`.

shift    KL of decoding a text of another kind than the prompt, per preset
stored   relative error of the stored tokens, of the prompt and of decoded ones, per preset
drift    orthonormality and memory over many decoded tokens; the presets must be oja-NUMBER
bytes    allocated bytes of a cache of --context tokens and --decode decoded ones, bases included,
         as a share of 16 bits and as bits per value; random keys and values of one kv head
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np

from experiments.ablation.domains import JUDGED, judged_on
from experiments.fixtures import QWEN
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.questions.prompts import encode
from mlxkv.eval.tasks import divergence
from mlxkv.formats.names import parse_kv
from mlxkv.metal.whiten import off_orthonormal
from mlxkv.models import load
from mlxkv.models.hooks.layers import find
from mlxkv.models.hooks.mark import own_make_cache
from mlxkv.models.hooks.probe import put
from mlxkv.models.hooks.rebind import bind, release
from mlxkv.models.hooks.taps import AttentionCall, PlainObserver
from mlxkv.texts import corpus

KV = "static-0.75+windows,oja-0.75,oja-0.75+transport,oja-0.75+stay,oja-0.75+fast+all,oja-0.75+raw"
CHUNK, STEP = 512, 8  # tokens at once, of the prompt and of decoding
HEADS, DIMS = 2, 128  # of the keys and values in `drift`
TEXTS = (*JUDGED, *(f"corpus {kind}" for kind in corpus.KINDS))


def text(loaded, kind: str, count: int) -> list[int]:
    """Return `count` tokens of a kind of TEXTS. Raises UserError if there are fewer."""
    if kind in JUDGED:
        return judged_on(loaded, kind, count)
    pieces = corpus.pieces("evaluation")[kind.removeprefix("corpus ")]
    tokens = encode(loaded, "\n\n".join(pieces))
    if len(tokens) < count:
        raise UserError(f"[following] {kind} has {len(tokens)} tokens; got {count}; choose fewer")
    return tokens[:count]


def shift(args: argparse.Namespace) -> list[list[str]]:
    loaded = load(args.model, "fp16")
    arms = Arms(loaded, args.kv)
    tokens = text(loaded, args.first, args.context) + text(loaded, args.second, args.decode + 1)
    names = [name for name in arms.names if name != BASELINE]
    found = divergence.measure(arms, names, tokens, args.context, lambda _: None)
    legs = {name: found[name]["legs"]["decode"] for name in names}
    return [
        [n, f"{x['kl']['mean']:.5f}", f"{x['kl']['p99']:.4f}", f"{100 * x['same_top']:.1f}"]
        for n, x in legs.items()
    ]


def exact(loaded, tokens: list[int]) -> dict[tuple, AttentionCall]:
    """Return the attention call of each layer that can be compressed, in one pass over `tokens`."""
    own, slots, calls = own_make_cache(loaded.model), bind(loaded.model), {}
    try:
        caches = own()
        for place in find(loaded.model, own).shapes:
            put(
                caches,
                place,
                PlainObserver(lambda call, place=place: calls.setdefault(place, call)),
            )
        mx.eval(loaded.model(mx.array(tokens)[None], cache=caches))
    finally:
        release(slots)
    return calls


def stored(args: argparse.Namespace) -> list[list[str]]:
    loaded = load(args.model, "fp16")
    prompt = text(loaded, args.first, args.context)
    sources = [exact(loaded, t) for t in (prompt, text(loaded, args.second, args.decode))]
    arms, rows = Arms(loaded, args.kv), []
    for name in args.kv:
        config = parse_kv(name)
        made = maps.of(arms.calibration(name), config.fitted)
        errors = [
            _left(AdaptiveKVCache(config, made[".".join(map(str, place))]), call, sources[1][place])
            for place, call in sources[0].items()
        ]
        rows.append([name, *(f"{x:.4f}" for x in np.mean(errors, axis=0))])
    return rows


def _left(cache: AdaptiveKVCache, prompt: AttentionCall, rest: AttentionCall) -> list[float]:
    """Return relative errors: keys of the prompt, decoded keys, values of the prompt, decoded."""
    for start in range(0, prompt.queries.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        view, _ = cache.update_and_fetch(*(x[:, :, part] for x in prompt.exact))
        q = prompt.queries[:, :, part]
        heard = q if view.observer is None else view.observer(q, q, prompt.scale, None)
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
        cache = AdaptiveKVCache(config, maps.sample(HEADS, (DIMS, DIMS), config.fitted))
        mix = 0.0
        for step in range(args.decode):
            if step % 1000 == 0:  # change the distribution
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


def allocated(args: argparse.Namespace) -> list[list[str]]:
    tokens, rows = args.context + args.decode, []
    for name in args.kv:
        config = parse_kv(name)
        fitted = maps.sample(1, (DIMS, DIMS), config.fitted) if config.calibrated else None
        cache = AdaptiveKVCache(config, fitted)
        sizes = [min(CHUNK, args.context - i) for i in range(0, args.context, CHUNK)]
        for size in [*sizes, *[1] * args.decode]:
            mx.random.seed(cache.offset)
            x = mx.random.normal((3, 1, 1, size, DIMS), mx.float16)
            view, _ = cache.update_and_fetch(x[0], x[1])
            heard = x if view.heard is None else view.heard(x[2], x[2], DIMS**-0.5, None)
            mx.eval(heard, cache.state)
        bits = 8 * cache.nbytes / (2 * tokens * DIMS)
        rows.append([name, f"{bits / 16:.1%}", f"{bits:.2f}"])
    return rows


COLUMNS = {
    "shift": ("preset", "KL", "KL 99 %", "top %"),
    "stored": ("preset", "keys: prompt", "decoded", "values: prompt", "decoded"),
    "drift": ("preset", "largest |U^T U - I|", "bytes"),
    "bytes": ("preset", "of 16 bits", "bits per value"),
}
WHAT = {"shift": shift, "stored": stored, "drift": drift, "bytes": allocated}


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("following", __doc__)
    add = parser.add_argument
    add("what", choices=WHAT)
    add("--model", default=QWEN, help="an alias, a hub name or a folder (shift, stored)")
    add("--kv", type=words, default=words(KV), help="presets, by commas")
    add("--first", default="stories", choices=TEXTS, help="kind of text of the prompt")
    add("--second", default="corpus code", choices=TEXTS, help="kind of text that is decoded")
    add("--context", default="1024", help="tokens of the prompt")
    add("--decode", type=int, default=512, help="tokens decoded")
    args = parser.parse_args(arguments)
    args.context = console.parse_tokens(args.context, "--context")
    at_least("--context", args.context, 256)
    at_least("--decode", args.decode, 128 if args.what == "stored" else 2)  # some are sealed
    for name in args.kv:
        config = parse_kv(name)
        if args.what == "drift" and not config.follows:
            raise UserError(f"[--kv] does not follow the text; got {name!r}; choose oja-NUMBER")
        if args.what == "stored" and not config.low:
            raise UserError(
                f"[--kv] not of low rank; got {name!r}; choose static-NUMBER or oja-NUMBER"
            )
    size = f"{args.decode} tokens after {args.context}"
    title = {"drift": f"{args.decode} tokens", "bytes": size}.get(
        args.what, f"{args.model}, {size}"
    )
    console.print_table(COLUMNS[args.what], WHAT[args.what](args), title)


if __name__ == "__main__":
    console.run_tool(main)
