"""Check the SRFT paper by its own metric: `python -m experiments.placement --model MODEL`.

Every key and value of every layer is replaced by what codes of 4 bits (abs-max, scales not rounded) make of it, while
texts of 512 tokens are read at once: no window is exact, nothing is stored. Three questions of arXiv 2605.05699:

    place     behind RoPE, where caches store keys, or before it, at the outputs of k_proj and v_proj, as the paper's
              hook does (section 3.3)
    transform none, SRHT, SRFT, over seeds of signs (section 4)
    scales    a scale a token or a group of 32, and lambda = 1 / max of each channel in front (7.1), from other text,
              from all texts that are read, from the first tokens of these, or of each call by itself (7.3)

Printed: nats a token more than full precision's, the mean of the texts, with an interval of 95 %, paired by text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from experiments.options import Parser, at_least, check_out, made_on, write
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.models import load
from mlxkv.models.calibration.measure import bos_of
from mlxkv.models.hooks.taps import hook, restore_classes
from mlxkv.spec import affine as spec
from mlxkv.texts import sources

BITS, LENGTH, GROUP, PREFIX = 4, 512, 32, 64
PLACES = ("behind", "before")
FROM = ("other text", "all texts", "first tokens", "each call")
LEAST = 1e-6  # of a channel's peak


@dataclass(frozen=True)
class Arm:
    """place: of PLACES. transform: of `spec.affine.transform`. group: values per scale, 0 all of a token. peaks: of
    FROM, or "" without lambda."""

    place: str
    transform: str
    seed: int = 0
    group: int = 0
    peaks: str = ""

    @property
    def label(self) -> str:
        scale = f"group {self.group}" if self.group else "token"
        peaks = f", lambda of {self.peaks}" if self.peaks else ""
        return f"{self.place} RoPE, {self.transform}, a scale a {scale}{peaks}"


def arms(seeds: int) -> list[Arm]:
    """Return what is measured; behind RoPE SRFT and SRHT have `seeds` diagonals of signs each."""
    out = []
    for place, count in zip(PLACES, (seeds, 1), strict=True):
        out.append(Arm(place, "none"))
        out += [Arm(place, name, seed) for name in ("hadamard", "srft") for seed in range(count)]
        out += [Arm(place, "srft", group=GROUP), Arm(place, "srft", group=GROUP, peaks=FROM[1])]
    out.append(Arm(PLACES[0], "srft", peaks=FROM[1]))
    return out + [Arm(PLACES[0], "srft", group=GROUP, peaks=p) for p in FROM if p != FROM[1]]


@dataclass
class Tap:
    """What happens to keys and values [B, G, T, D] on their way. peaks: the largest absolute value behind the transform
    by layer and side, [G, 1, D]; noting: tokens to take them of, 0 for none."""

    arm: Arm | None = None
    peaks: dict[tuple[int, str], mx.array] = field(default_factory=dict)
    noting: int = 0
    _maps: dict[tuple, mx.array] = field(default_factory=dict)

    def __call__(self, x: mx.array, key: tuple[int, str]) -> mx.array:
        if self.arm is None:
            return x
        down = self._down(x.shape[-1])
        stored = x.astype(mx.float32) @ down
        if self.noting:
            peak = mx.abs(stored[:, :, : self.noting]).max(axis=(0, 2))[:, None]
            self.peaks[key] = mx.maximum(self.peaks.get(key, LEAST), peak)
            return x
        scale = mx.array(1.0)
        if self.arm.peaks == FROM[3]:
            scale = mx.maximum(mx.abs(stored).max(axis=(0, 2))[:, None], LEAST)
        elif self.arm.peaks:
            scale = self.peaks[key]
        return ((decoded(stored / scale, BITS, self.arm.group) * scale) @ down.T).astype(x.dtype)

    def _down(self, dims: int) -> mx.array:
        name = self.arm.transform, dims, self.arm.seed
        if name not in self._maps:
            self._maps[name] = mx.array(spec.transform(*name)[0].astype(np.float32))
        return self._maps[name]


def decoded(x: mx.array, bits: int, group: int) -> mx.array:
    """Return x [..., D] behind abs-max codes of `bits` bits, with a scale for each `group` values (0: all D)."""
    parts = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    top = 2 ** (bits - 1) - 1
    scale = mx.maximum(mx.abs(parts).max(axis=-1, keepdims=True) / top, 1e-30)
    return (mx.clip(mx.round(parts / scale), -top, top) * scale).reshape(x.shape)


class Tapped(KVCache):
    """A plain cache whose keys and values go through a Tap."""

    def __init__(self, tap: Tap, layer: int):
        super().__init__()
        self.tap, self.layer = tap, layer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(
            self.tap(keys, (self.layer, "keys")), self.tap(values, (self.layer, "values"))
        )


@contextmanager
def projections(model, tap: Tap) -> Iterator[None]:
    """Put a Tap behind k_proj and v_proj of every layer. Raises UserError for a model without them."""
    hooked = []
    try:
        for index, layer in enumerate(model.layers):
            attention = getattr(layer, "self_attn", None)
            heads = getattr(attention, "n_kv_heads", None)
            for side, name in (("keys", "k_proj"), ("values", "v_proj")):
                linear = getattr(attention, name, None)
                if heads is None or linear is None:
                    raise UserError(
                        f"[--model] no {name} in layer {index}; got {model.model_type}; choose a Llama, Qwen or Gemma"
                    )

                def around(call: Callable, x, heads=heads, key=(index, side)):
                    flat = call(x)
                    rows = flat.reshape(*flat.shape[:-1], heads, -1).swapaxes(1, 2)
                    return tap(rows, key).swapaxes(1, 2).reshape(flat.shape)

                hooked.append(hook(linear, around))
        yield
    finally:
        restore_classes(hooked)


def measure(
    loaded, texts: Sequence[Sequence[int]], other: Sequence[Sequence[int]], wanted: Sequence[Arm]
) -> dict:
    """Return the negative log likelihood a token of each text, by arm and "full precision"."""
    tap, model, out = Tap(), loaded.model, {}

    def read(place: str, parts: Sequence[Sequence[int]]) -> list[float]:
        nll = []
        for tokens in parts:
            cache = [
                Tapped(tap if place == PLACES[0] else Tap(), i) for i in range(len(model.layers))
            ]
            logits = model(mx.array(tokens)[None, :-1], cache=cache)[0].astype(mx.float32)
            true = mx.take_along_axis(logits, mx.array(tokens)[1:, None], axis=-1)[:, 0]
            nll.append((mx.logsumexp(logits, axis=-1) - true).mean().item())
        return nll

    out["full precision"] = read(PLACES[0], texts)
    noted: dict[tuple, dict] = {}
    for place in PLACES:
        with projections(model, tap if place == PLACES[1] else Tap()):
            for arm in (arm for arm in wanted if arm.place == place):
                start, tap.arm = time.perf_counter(), arm
                peaks_of = place, arm.transform, arm.seed, arm.peaks
                if arm.peaks in FROM[:3] and peaks_of not in noted:
                    tap.peaks, tap.noting = {}, PREFIX if arm.peaks == FROM[2] else LENGTH
                    read(place, other if arm.peaks == FROM[0] else texts)
                    noted[peaks_of], tap.noting = tap.peaks, 0
                tap.peaks = noted.get(peaks_of, {})
                name = arm.label + (f", seed {arm.seed}" if arm.seed else "")
                out[name] = read(place, texts)
                more = np.subtract(out[name], out["full precision"]).mean()
                console.note(f"{name}: {more:+.4f}, {time.perf_counter() - start:.0f} s")
        tap.arm = None
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("placement", __doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="an alias, a hub name or a folder")
    add("--texts", type=int, default=6, help=f"texts of {LENGTH} tokens")
    add("--seeds", type=int, default=3, help="diagonals of signs")
    add("--out", type=Path, help="write the JSON document to this file")
    args = parser.parse_args(arguments)
    at_least("--texts", args.texts, intervals.LEAST)
    at_least("--seeds", args.seeds, 1)
    check_out(args.out)
    start, loaded = time.perf_counter(), load(args.model, "fp16", dtype="float32")
    bos = bos_of(loaded.tokenizer)
    lead = [] if bos is None else [bos]
    room = LENGTH - len(lead)
    texts = [lead + text.tokens for text in sources.evaluation_texts(loaded, room, args.texts)]
    tokens = sources.calibration_tokens(loaded, room * args.texts).tokens
    other = [lead + tokens[i : i + room] for i in range(0, len(tokens), room)]
    measured = measure(loaded, texts, other, arms(args.seeds))
    base, rows = measured["full precision"], []
    for name, nll in measured.items():
        more = intervals.share([a - b for a, b in zip(nll, base, strict=True)])
        rows.append((name, f"{more.value:+.4f} [{more.low:+.4f}, {more.high:+.4f}]"))
    console.print_table(
        ("codes of 4 bits", "nats a token more"), rows, f"{args.model}, {len(texts)} texts"
    )
    write({"model": args.model, "nll": measured, **made_on(start)}, args.out)


if __name__ == "__main__":
    console.run_tool(main)
