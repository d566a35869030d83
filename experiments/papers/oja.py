"""OjaKV's low-rank codes (2509.21623), with a basis that stays or follows the text. Spec: `mlxkv.spec.oja`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from cuda_track.cache import adaptive, following
from cuda_track.cache.view import View
from cuda_track.codec.codec import Codec
from cuda_track.codec.transform import Transform
from cuda_track.models.taps import Call, observing
from experiments.papers.runner import Layer, Pair, Subject, Variant
from mlxkv.formats.calibration import subspace
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.formats.lowrank import STAY, LowRank
from mlxkv.formats.presets import low_rank
from mlxkv.formats.quantizers import Affine, Half
from mlxkv.spec import oja as spec

SHARES = (0.6, 0.75, 0.8, 0.9)
ENERGIES = (0.9, 0.95)
PAGE = 32  # tokens: T of the paper
NORMAL, RAW, TOKEN = RULES = "normal", "raw", "token"
PLAIN = Variant(lambda layer, keys, values: (keys, values), 16, 32, 32, PAGE)


@dataclass(frozen=True)
class Rank:
    """What is stored of both sides, and how its basis follows.

    low: rank, rates, salient tokens. bits: of codes, 0: float16. rule: of updates. oracle: the context's own basis.
    exact: first and last tokens that are not stored. prompt: its tokens; 0: all of the context, so nothing is decoded.
    """

    low: LowRank
    bits: int = 0
    rule: str = NORMAL
    oracle: bool = False
    exact: int = 32
    prompt: int = 0


def named() -> dict[str, Rank]:
    """Return the variants by name."""
    sizes = {f"{x:g}": LowRank(x) for x in SHARES} | {
        f"e{x:g}": LowRank(energy=x) for x in ENERGIES
    }
    out = {}
    for size, low in sizes.items():
        still, moving = Rank(low), Rank(replace(low, follows=True))
        for name, own in ((f"static-{size}+windows", still), (f"oja-{size}", moving)):
            out |= {name: own, f"{name}+int4": replace(own, bits=4)}
        out[f"static-{size}"] = replace(still, exact=0)
        out[f"oja-{size}+all"] = replace(moving, exact=0)
        out |= {f"oja-{size}+{rule}": replace(moving, rule=rule) for rule in (RAW, TOKEN)}
        out[f"oracle-{size}"] = replace(still, oracle=True)
    return {name: own for name, own in out.items() if not (own.bits and own.low.energy)}


class Reading:
    """What attention was called with as the model read a context last: queries, keys and values of all its tokens."""

    def __init__(self, subject: Subject):
        self.subject, self.calls = subject, {}
        self._weights: dict[tuple[int, int, int], torch.Tensor] = {}
        plain = subject.prefill

        def prefill(tokens: Sequence[int]):
            self.calls, self._weights = {}, {}
            with observing(subject.model, self._observe):
                return plain(tokens)

        subject.prefill = prefill

    def _observe(self, call: Call) -> None:
        if call.layer in self.subject.growing:
            self.calls[call.layer] = call

    def weights(self, layer: int, prompt: int, window: int) -> torch.Tensor:
        """Return how much the last `window` queries of a prompt look at each token, [1, G, T] (section 5.2)."""
        key = layer, prompt, window
        if key not in self._weights:
            call = self.calls[layer]
            view = View((call.keys[:, :, :prompt], call.values[:, :, :prompt]))
            queries = call.queries[:, :, max(0, prompt - window) : prompt]
            self._weights[key] = adaptive.importance(queries, view, call.scale)
        return self._weights[key]

    def salient(self, layer: int, prompt: int, low: LowRank) -> torch.Tensor:
        """Return positions [N] of the prompt's tokens that teach a basis."""
        count = max(1, round(low.salient * prompt))
        return adaptive.salient(self.weights(layer, prompt, low.window), count)[0]


# -- Bases.


def moment(layer: Layer, side: str) -> torch.Tensor:
    """Return what a basis is made of, [G, D, D]: the second moment of values, or of keys with that of queries."""
    x = getattr(layer, side).double()
    second = x.mT @ x / x.shape[1]
    if side != SIDES[0]:
        return second
    return torch.from_numpy(
        spec.stacked(layer.queries.double().cpu().numpy(), second.cpu().numpy())
    )


def first_basis(layer: Layer, side: str, low: LowRank) -> torch.Tensor:
    """Return the basis of a layer's calibration rows [G, D, R] (A.2)."""

    def made() -> torch.Tensor:
        own = moment(layer, side).cpu().numpy()
        rank = low.dims(own.shape[-1])
        if low.energy:
            rank = int(subspace.ranks(own, low.energy).max())
        u = np.ascontiguousarray(subspace.basis(own, rank, low.mixed))
        return torch.from_numpy(u).float().to(layer.keys.device)

    return layer.once((side, low.share, low.energy, low.mixed), made)


def step(u: torch.Tensor, x: torch.Tensor, rate: float, rule: str) -> torch.Tensor:
    """Update u [G, D, R] by a batch x [G, N, D]; a head is left as it was where the result is not finite."""
    if rule != TOKEN:
        return following.update(u[None], x[None], rate, rule == RAW)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        moved = spec.update_by_token(u.cpu().numpy(), x.float().cpu().numpy(), rate)
    moved = torch.from_numpy(moved).to(u)
    sound = moved.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(sound, following.orthonormal(torch.where(sound, moved, u)), u)


def variant(reading: Reading, rank: Rank) -> Variant:
    """Return the variant that stores each page by the basis of its time."""
    quantizer = Affine(rank.bits, 64) if rank.bits else Half()
    config = low_rank(rank.low, quantizer, quantizer, rank.exact, PAGE)

    def one(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        form, call = getattr(config, side), reading.calls[layer.index]
        whole = getattr(call, side)[0].float()
        prompt = rank.prompt or whole.shape[1]
        u = first_basis(layer, side, form.low)
        if rank.oracle:
            call_rows = {name: getattr(call, name)[0].float() for name in SIDES}
            q = call.queries[0].double().reshape(len(whole), -1, whole.shape[-1])
            own = replace(layer, **call_rows, queries=q.mT @ q / q.shape[1], cache={})
            u = first_basis(own, side, form.low)
        if rank.low.follows:
            at = reading.salient(layer.index, prompt, rank.low)
            u = step(u, whole[:, at], rank.low.prefill_rate, rank.rule)
        head = min(prompt - rank.exact, x.shape[1])
        parts = [x[:, :head], *x[:, head:].split(PAGE, 1)]
        stored = []
        for i, part in enumerate(parts):
            if i and rank.low.follows:
                u = step(u, part, rank.low.decode_rate, rank.rule)
            if part.shape[1]:
                codec = Codec(form, x.shape[-1], PAGE, Transform(u, u.mT), x.device)
                stored.append((codec.decode_stored(codec.encode(part[None]), torch.float32)[0], u))
        newest = rank.low.stored == STAY
        return torch.cat([y @ (u if newest else own).mT for y, own in stored], 1)

    def store(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        return one(layer, SIDES[0], keys), one(layer, SIDES[1], values)

    def bits(dims: int) -> float:
        if not rank.low.energy:
            return config.bits_per_value(dims, dims)
        layers = reading.subject.layers.values()
        ranks = [first_basis(x, side, rank.low).shape[-1] for x in layers for side in SIDES]
        return 16 * float(np.mean(ranks)) / dims

    return Variant(store, bits, sink=rank.exact, recent=rank.exact, page=PAGE)


def variants_of(subject: Subject, reading: Reading) -> Mapping[str, Callable[[], Variant]]:
    out = {name: partial(variant, reading, rank) for name, rank in named().items()}
    return out | {"exact": lambda: PLAIN, "int4": lambda: subject.preset("int4")}
