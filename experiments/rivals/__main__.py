"""Compare siblings of the balanced maps on one model: `python -m experiments.rivals --model FOLDER`.

The arms are plain operations on a plain cache, which pay for no speed and save no memory: each codes the tokens
that have left the windows and decodes them at once. Fits see one calibration, the same for all; presets of
mlxkv stand beside them with the same calibration and windows. `mlxkv.spec.mixed.transform_coding` says which published
text each arm follows, and how far:

rotation           OSCAR at 2 bits, as a control: the preset oscar-int2 has to come out alike
  , keys centred   the same after OptR's key reparametrization
balanced           balanced maps, 2 bits for a token, as a control of balanced-int2
  , keys centred   maps of the keys that are left without their mean
grouped            NOVA-KV: keys by non-orthogonal maps and codebooks for every four numbers, values as "rotation"
  , balanced v     the same keys, values as "balanced"
allotted 2, 1.5    bits by direction for keys and values, 0 to 8 (the family of AATC)
flat keys          partly whitened keys, one direction in 16 bits (the family of Dual-QK), values as "rotation"
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean

import numpy as np
from mlx_lm.models.cache import KVCache
from rich.console import Console
from rich.progress import Progress

from experiments.fixtures import QWEN
from experiments.options import Parser, at_least, check_out, made_on, words, write
from experiments.rivals import coders
from experiments.rivals.caches import Lossy
from experiments.rivals.coders import Coder, Fit
from experiments.rivals.reading import CORPUS, STORIES, calibration_text, markdown, texts, told
from mlxkv import console
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence
from mlxkv.eval.tasks.divergence import LEGS
from mlxkv.formats.calibration.artifact import SIDES, Calibration
from mlxkv.formats.names import parse_kv
from mlxkv.models import load
from mlxkv.models.calibration import measure
from mlxkv.models.calibration.moments import Sample

WINDOWS = (64, 64)
PAGE = 64
PRESETS = "oscar-int2,balanced-int2,int2"
CLIPS = {
    "rotation": (0.96, 0.92),
    "balanced": (0.92, 0.94),
}  # of keys and values, as in the presets
POWER = 0.5  # of "flat keys": nothing that could be read says which
RATE = 2.125  # with the scale of a token 2.25 bits, as many as min-max codes have


def fits(made: Calibration, samples: dict[str, Sample]) -> dict[str, tuple[Fit, Fit]]:
    """Return what a calibration says of keys and values, by layer."""
    out = {}
    for name, layer in made.layers.items():
        sides = []
        for side in SIDES:
            basis = getattr(layer, side)
            rows = np.array(samples[name].rows(side), np.float64)
            down, sigma = (x.astype(np.float64) for x in (basis.balance.down, basis.balance.sigma))
            # What the map balances: T^T noise T = sigma = T^-1 reads T^-T.
            up = np.linalg.inv(down)
            noise = up.swapaxes(-1, -2) * sigma[:, None] @ up
            reads = down * sigma[:, None] @ down.swapaxes(-1, -2)
            sides.append(Fit(rows, noise, reads, basis.rotation(made.parts).astype(np.float64)))
        out[name] = tuple(sides)
    return out


def pair(arm: str, keys: Fit, values: Fit, grouped: Coder | None = None) -> tuple[Coder, Coder]:
    """Return the coders of an arm for one layer. grouped: those of its keys, which take long to fit."""
    name, _, more = arm.partition(", ")
    rotated = coders.rotated(values, CLIPS["rotation"][1])
    if name == "rotation":
        return coders.rotated(keys, CLIPS["rotation"][0], bool(more)), rotated
    if name == "balanced":
        key = coders.balanced(keys, CLIPS["balanced"][0], bool(more))
        return key, coders.balanced(values, CLIPS["balanced"][1])
    if name == "grouped":
        value = coders.balanced(values, CLIPS["balanced"][1]) if more else rotated
        return grouped or coders.grouped(keys), value
    if name == "flat keys":
        return coders.flat(keys, POWER, CLIPS["rotation"][0]), rotated
    rate = RATE if name == "allotted 2" else 1.375
    return coders.allotted(keys, rate)[0], coders.allotted(values, rate)[0]


ARMS = (
    "rotation",
    "rotation, keys centred",
    "balanced",
    "balanced, keys centred",
    "grouped",
    "grouped, balanced v",
    "allotted 2",
    "allotted 1.5",
    "flat keys",
)


def judge(
    loaded, arms: tuple[str, ...], presets: tuple[str, ...], context: int, decode: int, bars
) -> dict:
    """Return {arm: {"bits": per number, "kl": {text: {leg: mean KL}}}}."""
    samples: dict[str, Sample] = {}
    made = measure.calibrate(
        loaded.model,
        calibration_text(loaded),
        text="stories and corpus calibration",
        bos=measure.bos_of(loaded.tokenizer),
        samples=samples,
    )
    known, coded = fits(made, samples), {}
    bar = bars.add_task("fitting", total=len(arms) * len(known))
    for arm in arms:
        coded[arm] = {}
        for name, both in known.items():
            before = coded.get("grouped", {}).get(name)
            coded[arm][name] = pair(arm, *both, before and before[0])
            bars.advance(bar)

    def prepare(arm: str, caches: list) -> None:
        for name, both in coded.get(arm, {}).items():
            assert type(caches[int(name)]) is KVCache, name
            caches[int(name)] = Lossy(both, *WINDOWS, PAGE)

    plain = dict.fromkeys(arms, parse_kv("fp16"))
    configs = plain | {name: parse_kv(name) for name in presets}
    running = Arms(loaded, configs, WINDOWS, prepare, dict.fromkeys(presets, made))
    shapes = {r.index: r for r in loaded.layers if r.grows}
    out = {}
    for arm in configs:
        bits = [c.bits for both in coded.get(arm, {}).values() for c in both]
        dims = next(iter(known.values()))[0].rows.shape[-1]
        out[arm] = {
            "bits": mean(bits) if bits else configs[arm].bits_per_value(dims, dims),
            "kl": {},
        }
    assert len(shapes) == len(known)
    every = texts(loaded, context + decode + 1)
    bar = bars.add_task("reading", total=len(every) * len(configs) * (context + decode))
    for text, tokens in every.items():
        found = divergence.measure(
            running, list(configs), tokens, context, lambda n: bars.advance(bar, n)
        )
        for arm in configs:
            legs = found[arm]["legs"]
            out[arm]["kl"][text] = {leg: legs[leg]["kl"]["mean"] for leg in LEGS}
    return out


def rows(found: dict) -> list[list[str]]:
    """Return a row per arm: bits, per leg the mean KL over stories and over the corpus, and over all texts as a share
    of the last arm's with a 95 % interval from resampling texts, marked where it leaves out 1."""
    out, reference = [], list(found)[-1]
    for arm, one in found.items():
        cells = []
        for leg in LEGS:
            means = (mean(one["kl"][text][leg] for text in kind) for kind in (STORIES, CORPUS))
            cells.append(" / ".join(f"{x:.2g}" for x in means))
            ours, theirs = ([kl[leg] for kl in found[x]["kl"].values()] for x in (arm, reference))
            cells.append("1" if arm == reference else told(ours, theirs))
        out.append([arm, f"{one['bits']:.2f}", *cells])
    return out


def show(document: dict) -> None:
    reference = list(document["arms"])[-1]
    heads = ["arm", "bits"] + [h for leg in LEGS for h in (leg, f"{leg}, over {reference}")]
    print(
        f"{document['model']}, KL: stories / corpus\n\n{markdown(heads, rows(document['arms']))}\n"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rivals", __doc__)
    add = parser.add_argument
    add("--model", default=QWEN, help="an alias, a hub name or a folder")
    add("--kv", type=words, default=words(PRESETS), help="presets beside the arms, by commas")
    add("--context", default="768", help="tokens of the prompt")
    add("--decode", type=int, default=32, help="tokens decoded one by one after the context")
    add("--out", type=Path, help="write the document to this file")
    add("--read", type=Path, nargs="+", help="show the documents of earlier runs, measure nothing")
    args = parser.parse_args(arguments)
    if args.read:
        for file in args.read:
            show(json.loads(file.read_text(encoding="utf-8")))
        return
    context = console.parse_tokens(args.context, "--context")
    at_least("--context", context, 2)
    at_least("--decode", args.decode, 2)
    check_out(args.out)
    for name in args.kv:
        parse_kv(name)
    start = time.perf_counter()
    loaded = load(args.model, "fp16")
    with Progress(console=Console(stderr=True), transient=True) as bars:
        found = judge(loaded, ARMS, args.kv, context, args.decode, bars)
    document = {"model": args.model, "context": context, "decode": args.decode, "arms": found}
    show(document)
    write(document | made_on(start), args.out)


if __name__ == "__main__":
    console.run_tool(main)
