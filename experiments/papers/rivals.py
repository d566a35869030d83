"""KVarN (2606.03458), Block-GTQ (2606.24033), Kitty (2511.18643), and a free transform in front of any variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from cuda_track.codec.codec import Codec
from cuda_track.codec.transform import make
from experiments.papers.runner import Layer, Store, Subject, Variant, side_by_side
from mlxkv.formats import levels
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Affine, Codebook
from mlxkv.spec import kvarn as kvarn_spec

LEAST_DIMS = 8  # whose levels can be computed at all widths
KITTY = 128  # tokens of a group of keys


def coded(side: Side, x: torch.Tensor, page: int = 64) -> torch.Tensor:
    """Encode x [G, T, D] by a codec of the product, and decode."""
    codec = Codec(side, x.shape[-1], page, device=x.device)
    return codec.decode(codec.encode(x[None]), torch.float32)[0]


# -- The transform that mends others.


def even(store: Store) -> Store:
    """Return `store` of keys without their mean, channel i times (M_ii / C_ii)^(1/4): M the second moment of queries, C
    the covariance of keys. Folded into the queries it costs nothing, and softmax does not see a mean."""

    def stored(layer: Layer, keys: torch.Tensor, values: torch.Tensor):
        mean = layer.once("mean", lambda: layer.keys.mean(1, keepdim=True))

        def scales() -> torch.Tensor:
            parts = layer.queries.diagonal(dim1=-2, dim2=-1), (layer.keys - mean).square().mean(1)
            read, held = (x.clamp(min=1e-8 * float(x.mean())) for x in parts)
            return (read / held).pow(0.25)[:, None]

        scale = layer.once("scale", scales)
        if "even" not in layer.cache:
            queries = layer.queries / scale / scale.mT
            own = replace(layer, keys=(layer.keys - mean) * scale, queries=queries, cache={})
            layer.cache["even"] = own
        made, values = store(layer.cache["even"], (keys - mean) * scale, values)
        return made / scale + mean, values

    return stored


def evened(make: Callable[[], Variant]) -> Variant:
    """Return the variant that `make` makes, behind `even`."""
    variant = make()
    return replace(variant, store=even(variant.store))


# -- Rivals.


def kvarn_side(layer: Layer, side: str, x: torch.Tensor, bits: Mapping[str, int]) -> torch.Tensor:
    """Code tiles behind a Hadamard matrix (an SRFT for other dims). Spec: `mlxkv.spec.kvarn`."""
    turn = make("srft" if x.shape[-1] & (x.shape[-1] - 1) else "hadamard", x.shape[-1], 0, x.device)
    assert turn is not None
    tiles = turn.store(x).unflatten(1, (-1, kvarn_spec.TILE))
    made = kvarn_tiles(tiles, bits[side], side).flatten(1, 2)
    return turn.restore(made)


def kvarn_tiles(x: torch.Tensor, bits: int, side: str) -> torch.Tensor:
    """Reconstruct tiles [..., T, R]."""

    def half(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-65504, 65504).half().to(x.dtype)

    def imbalance(x: torch.Tensor) -> torch.Tensor:
        spreads = [x.std(axis, keepdim=True) for axis in (-2, -1)]
        ends = [(s.amax((-2, -1), True), s.amin((-2, -1), True)) for s in spreads]
        return sum(
            (a / b.clamp(min=kvarn_spec.LEAST) for a, b in ends), torch.zeros_like(ends[0][0])
        )

    kept, over = kvarn_spec.AXES[side]
    logs = {axis: torch.zeros_like(x.std(axis, keepdim=True)) for axis in (kept, over)}
    best, lowest, current = logs[kept], imbalance(x), x
    for _ in range(kvarn_spec.ITERATIONS):
        for axis in (kept, over):
            step = current.std(axis, keepdim=True).clamp(*kvarn_spec.STD_RANGE).log()
            logs[axis] = (logs[axis] + step).clamp(*kvarn_spec.LOG_RANGE)
            current = x / logs[-1].exp() / logs[-2].exp()
        reached = imbalance(current)
        best = logs[kept].where(reached < lowest, best)
        lowest = reached.minimum(lowest)
    outer = half(best.exp())
    y, top = x / outer, 2**bits - 1
    low = half(y.amin(over, True))
    scale = half((y.amax(over, True) - low).clamp(min=0) / top)
    codes = ((y - low) / scale.where(scale > 0, torch.ones_like(scale))).round().clamp(0, top)
    return (scale * codes + low) * outer


def kvarn(keys: int, values: int) -> Variant:
    """Two numbers of each row of codes and one of each of the other axis, 16 bits, in a tile of 128 tokens."""

    def bits(dims: int) -> float:
        of_keys = 32 / kvarn_spec.TILE + 16 / dims
        of_values = 32 / dims + 16 / kvarn_spec.TILE
        return (keys + values + of_keys + of_values) / 2

    side = partial(kvarn_side, bits={"keys": keys, "values": values})
    return Variant(side_by_side(side, side), bits, page=kvarn_spec.TILE)


def block_bits(scores: np.ndarray, rate: float, least: int = 1, most: int = 8) -> np.ndarray:
    """Return the bits of each RoPE pair [D / 2], `rate` on average: bit by bit to the largest score 4^-b (Block-GTQ,
    section 3; scores: mean energy of queries and keys in the pair)."""
    bits = np.full(len(scores), least)
    for _ in range(round(rate * len(scores)) - bits.sum()):
        gains = np.where(bits < most, scores * 4.0**-bits, -1.0)
        bits[gains.argmax()] += 1
    return bits


def block_gtq_keys(layer: Layer, side: str, x: torch.Tensor, rate: float) -> torch.Tensor:
    """Code the channels of one width together by TurboQuant: a random rotation, a norm, the sphere's levels. Fewer than
    LEAST_DIMS channels have the levels of so many, scaled."""
    out = torch.empty_like(x)
    for head, bits in enumerate(pair_bits(layer, rate)):
        for width in np.unique(bits):
            at = torch.from_numpy(np.flatnonzero(bits == width)).to(x.device)
            turn = make("random", len(at), 0, x.device)
            assert turn is not None
            y, dims = turn.store(x[head][:, at]), max(LEAST_DIMS, len(at))
            scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True).half().float()
            table = levels.sphere(dims, int(width)) * (dims / len(at)) ** 0.5
            table = torch.from_numpy(table).to(y)
            codes = torch.bucketize(y / scale.clamp(min=1e-8), (table[1:] + table[:-1]) / 2)
            out[head][:, at] = turn.restore(table[codes] * scale)
    return out


def pair_bits(layer: Layer, rate: float) -> np.ndarray:
    """Return the bits of each channel [G, D]; pairs are (i, i + D / 2)."""

    def made() -> torch.Tensor:
        energy = layer.queries.diagonal(dim1=-2, dim2=-1) + layer.keys.square().mean(1)
        first, second = energy.double().chunk(2, -1)
        own = [block_bits(x, rate) for x in ((first + second) / 2).cpu().numpy()]
        return torch.from_numpy(np.stack([np.concatenate([x, x]) for x in own]))

    return layer.once(("rope pairs", rate), made).numpy()


def block_gtq(subject: Subject, keys: float, values: int) -> Variant:
    def bits(dims: int) -> float:  # a norm of 16 bits for each width that a head has
        widths = [len(set(x)) for i in subject.growing for x in pair_bits(subject.layers[i], keys)]
        return (keys + 16 * float(np.mean(widths)) / dims + values + 16 / dims) / 2

    def of_values(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        return coded(Side(Codebook(values), "random"), x)

    return Variant(side_by_side(partial(block_gtq_keys, rate=keys), of_values), bits)


def kitty_keys(layer: Layer, side: str, x: torch.Tensor, share: float) -> torch.Tensor:
    """Code keys per channel of KITTY tokens from min to max, in 2 bits, and in 4 for the `share` of the channels that
    are largest there on average (its section 3; magnitude, as released)."""
    tiles = x.unflatten(1, (-1, KITTY))
    size = tiles.abs().mean(2, keepdim=True)
    boosted = torch.zeros_like(size, dtype=torch.bool)
    most = size.topk(int(share * x.shape[-1]), dim=-1).indices
    top = torch.where(boosted.scatter(-1, most, True), 15.0, 3.0)
    low = tiles.amin(2, keepdim=True).half().float()
    scale = ((tiles.amax(2, keepdim=True) - low) / top).half().float()
    codes = ((tiles - low) / scale.where(scale > 0, torch.ones_like(scale))).round()
    return (codes.clamp(min=0).minimum(top) * scale + low).flatten(1, 2)


def kitty(share: float) -> Variant:
    """Two numbers of 16 bits for a channel of KITTY tokens, or a row of values; a bit says which channels have 4."""

    def bits(dims: int) -> float:
        of_keys = 2 + 2 * int(share * dims) / dims + (32 + (share > 0)) / KITTY
        return (of_keys + 2 + 32 / min(KITTY, dims)) / 2

    def of_values(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        return coded(Side(Affine(2, KITTY)), x)

    return Variant(side_by_side(partial(kitty_keys, share=share), of_values), bits, page=KITTY)
