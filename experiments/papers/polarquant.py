"""PolarQuant of Wu (arXiv 2502.00527) and of Han (2502.02617), and TurboQuant (2504.19874), claim by claim.

    python -m experiments.papers.polarquant MODEL.. --contexts 4k

Names are KEYS/VALUES; one name is for both. Windows: first and last 64 tokens exact, @paper the paper's own.

Wu: keys as radius and angle of the pairs that RoPE turns, `rbits` and `tbits` of each, pages of 128 tokens.
    wu-r4t4/fp16            "near lossless": keys alone, values exact; @paper leaves n mod 128 last tokens exact
    wu-rRtT/fp16            which of the two needs the bits (both sums of 7, 6 and 5)
    wu-rRtT+unwrapped/fp16  ours: angles from the mean direction of a page on. The paper's begin at 0, so pairs that
                            point there, nearly all alike, have a range of the whole circle. Costs no bit
    channel-B+g128/fp16     KIVI's codes of keys at the same bits: 4.25, 3.25, 2.25
Han: a rotation, then one radius and 15 angles for 16 dims: 3.875 bits.
    han, han+plain          preconditioned by a random rotation (section 4.1) or not: LongBench 48.29 against 48.11
    han+hadamard            the same by a Hadamard rotation
    ..+offline, ..+online   codebooks of the calibration text, or of each prompt and head (48.37): k-means
    ..+even                 means of keys off, channels made even before (`rivals.even`)
    channel-4, turbo-4      scalar codes beside: "outperforms KIVI" (46.70)
TurboQuant: a random rotation, the best scalar codebook, a norm a token (algorithm 1).
    turbo-2.5, turbo-3.5    a quarter of the channels, the largest, with one bit more. The paper calls 32 of 128 at 3
                            and 96 at 2 bits 2.5 bits (section 4.3); it is 2.25, and norms. ..+half: a half, so 2.5
    turbo-B+qjl             algorithm 2, "unbiased inner products": B - 1 bits, and signs of the rest's projections
    turbo-B+qjl/turbo-B     the same of keys alone, which are what inner products are taken with

After the rows comes a table of ratios, PAIRS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from cuda_track.codec import polar_tree, transform
from cuda_track.codec.affine import half
from cuda_track.codec.codec import Codec
from experiments.papers import runner
from experiments.papers.ratios import ratios
from experiments.papers.rivals import evened
from experiments.papers.runner import Layer, Subject, Variant
from mlxkv import console
from mlxkv.eval.rows import read
from mlxkv.formats import matrices
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Affine, Codebook, Polar, PolarTree, Quantizer

PAPER = "polarquant"
GROUP = 128  # tokens of a page of radii and angles, and of the scalar codes beside
ROWS = 16_384  # vectors that offline codebooks are fitted to
PROJECTIONS = 1  # seed of QJL's matrix; the rotation has runner.SEED

Reconstruct = Callable[[Layer, str, torch.Tensor], torch.Tensor]
Form = tuple[Reconstruct, Callable[[int], float]]  # of one side, and its bits a value of a head dim
FP16: Form = (runner.exact, lambda dims: 16.0)


def form(quantizer: Quantizer, rotation: str = "none", page: int = 64) -> Form:
    """Return what the codec of a quantizer makes of a side [G, T, D], and its bits. page: 0 for all tokens."""

    def reconstruct(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        own = Side(quantizer, rotation, runner.SEED)
        codec = Codec(own, x.shape[-1], page or x.shape[1], device=x.device)
        return codec.decode(codec.encode(x[None]), torch.float32)[0]

    return reconstruct, lambda dims: quantizer.bits_per_value(dims, page or 1 << 30)


def offline(subject: Subject, rotation: str) -> PolarTree:
    """Return polar trees with one set of codebooks for all layers and heads, by k-means on the calibration text
    (Han, section 4.1, "offline")."""
    per_side = ROWS // (2 * len(subject.layers))
    parts = []
    for layer in subject.layers.values():
        for side in SIDES:
            rows = getattr(layer, side).flatten(0, 1)
            parts.append(rows[:: max(1, len(rows) // per_side)])
    rows = torch.cat(parts)
    turn = transform.make(rotation, rows.shape[-1], runner.SEED, rows.device)
    return PolarTree(polar_tree.fit(rows if turn is None else turn.store(rows)))


def fitted(tree: Callable[[str], PolarTree], rotation: str) -> Form:
    """Return the form of offline codebooks, which are fitted when a text is first read."""

    def reconstruct(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        return form(tree(rotation), rotation)[0](layer, side, x)

    return reconstruct, form(PolarTree())[1]


def unwrapped(radius: int, angle: int) -> Form:
    """Wu's codes of pairs that are turned until the mean of a page's points away from the seam at angle 0; a code of
    an angle begins at any number, so the turn is stored nowhere."""
    reconstruct, bits = form(Polar(radius, angle), page=GROUP)

    def turned(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(*x.unflatten(1, (-1, GROUP)).chunk(2, -1))
        by = -z.mean(2, keepdim=True).sgn()
        by = by.where(by != 0, 1.0)
        y = torch.view_as_real(z * by.conj()).movedim(-1, -2).flatten(-2).flatten(1, 2)
        made = reconstruct(layer, side, y).unflatten(1, (-1, GROUP))
        back = torch.view_as_real(torch.complex(*made.chunk(2, -1)) * by)
        return back.movedim(-1, -2).flatten(-2).flatten(1, 2)

    return turned, bits


def qjl(bits: int) -> Form:
    """TurboQuant's algorithm 2: a codebook of bits - 1, and the signs of random projections of what it leaves.

    Spec: `mlxkv.spec.codebook.qjl_encode`, `qjl_decode`.
    """

    def reconstruct(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        dims = x.shape[-1]
        turn = transform.make("random", dims, runner.SEED, x.device)
        assert turn is not None
        y = turn.store(x)
        first = form(Codebook(bits - 1))[0](layer, side, y)
        by = torch.from_numpy(matrices.gaussian((dims, dims), PROJECTIONS)).float().to(x.device)
        rest = y - first
        signs = torch.where(rest @ by > 0, 1.0, -1.0)
        length = half(rest.norm(dim=-1, keepdim=True)).float()
        return turn.restore(first + math.sqrt(math.pi / 2) / dims * length * (signs @ by.T))

    return reconstruct, lambda dims: bits + 32 / dims


def outliers(bits: int, share: float) -> Form:
    """TurboQuant's outlier channels (section 4.3): a share of the channels has bits + 1, each part with a rotation,
    a codebook and a norm of its own.

    Channels: those of a kv head with most energy in the calibration text; the paper does not say whose energy.
    Spec: `mlxkv.spec.codebook.split_decode`.
    """

    def reconstruct(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        count = int(x.shape[-1] * share)
        energy = getattr(layer, side).square().sum(1)
        order = energy.sort(dim=-1, descending=True, stable=True).indices
        out = torch.empty_like(x)
        for part, width in ((order[:, :count], bits + 1), (order[:, count:], bits)):
            part = part.sort(dim=-1).values[:, None].expand(-1, x.shape[1], -1)
            made = form(Codebook(width), "random")[0](layer, side, x.gather(-1, part))
            out.scatter_(-1, part, made)
        return out

    return reconstruct, lambda dims: bits + int(dims * share) / dims + 32 / dims


def channels(bits: int, group: int = GROUP) -> tuple[Form, Form]:
    """KIVI's codes: min-max per channel of keys over `group` tokens, per token of values."""
    return form(Affine(bits, group, axis="channel"), page=group), form(Affine(bits, group))


def forms(subject: Subject) -> dict[str, tuple[Form, Form]]:
    """Return the forms of keys and of values by name."""
    tree, out = cache(partial(offline, subject)), {}
    for radius, angle in WIDTHS:
        out[f"wu-r{radius}t{angle}/fp16"] = form(Polar(radius, angle), page=GROUP), FP16
        out[f"wu-r{radius}t{angle}+unwrapped/fp16"] = unwrapped(radius, angle), FP16
    out["wu-r4t4/fp16@paper"] = out["wu-r4t4/fp16"]
    for bits in (4, 3, 2):
        keys, turbo = channels(bits)[0], form(Codebook(bits), "random")
        out[f"channel-{bits}+g128"] = channels(bits)
        out[f"channel-{bits}+g128/fp16"] = keys, FP16
        out[f"turbo-{bits}"] = turbo, turbo
        out[f"turbo-{bits}/fp16"] = turbo, FP16
        out[f"turbo-{bits}+qjl"] = qjl(bits), qjl(bits)
        out[f"turbo-{bits}+qjl/turbo-{bits}"] = qjl(bits), turbo
    for name, rotation in (("han", "random"), ("han+plain", "none")):
        of_all, online = form(PolarTree(), rotation), form(PolarTree(online=True), rotation, page=0)
        out[name] = of_all, of_all
        out[f"{name}/fp16"] = of_all, FP16
        out[f"{name}+offline"] = (fitted(tree, rotation),) * 2
        out[f"{name}+online"] = online, online
    out["han+hadamard"] = (form(PolarTree(), "hadamard"),) * 2
    for name, bits, share in SPLITS:
        out[name] = (outliers(bits, share),) * 2
    return out


WIDTHS = ((4, 4), (3, 4), (4, 3), (2, 4), (4, 2), (3, 3), (2, 3), (3, 2), (2, 2))
SPLITS = (
    ("turbo-2.5", 2, 1 / 4),
    ("turbo-2.5+half", 2, 1 / 2),
    ("turbo-3.5", 3, 1 / 4),
    ("turbo-3.5+half", 3, 1 / 2),
)
EVENED = ("wu-r4t4/fp16", "han")  # `rivals.even` in front
PAIRS = (
    ("wu-r4t4/fp16", "channel-4+g128/fp16"),
    ("wu-r3t3/fp16", "channel-3+g128/fp16"),
    ("wu-r2t2/fp16", "channel-2+g128/fp16"),
    ("wu-r4t4/fp16", "turbo-4/fp16"),
    ("wu-r4t4/fp16@paper", "wu-r4t4/fp16"),
    ("wu-r4t4+unwrapped/fp16", "wu-r4t4/fp16"),
    ("wu-r3t3+unwrapped/fp16", "wu-r3t3/fp16"),
    ("wu-r4t4+unwrapped/fp16", "channel-4+g128/fp16"),
    ("wu-r3t3+unwrapped/fp16", "channel-3+g128/fp16"),
    ("wu-r2t2+unwrapped/fp16", "channel-2+g128/fp16"),
    ("wu-r4t3+unwrapped/fp16", "wu-r3t4+unwrapped/fp16"),
    ("wu-r4t3/fp16", "wu-r3t4/fp16"),
    ("wu-r4t2/fp16", "wu-r2t4/fp16"),
    ("wu-r3t3/fp16", "wu-r2t4/fp16"),
    ("wu-r3t2/fp16", "wu-r2t3/fp16"),
    ("han", "turbo-4"),
    ("han", "channel-4+g128"),
    ("han/fp16", "wu-r4t4/fp16"),
    ("han+plain", "han"),
    ("han+plain/fp16", "han/fp16"),
    ("han+plain+offline", "han+offline"),
    ("han+plain+online", "han+online"),
    ("han+hadamard", "han"),
    ("han+even", "han"),
    ("wu-r4t4/fp16+even", "wu-r4t4/fp16"),
    ("han+offline", "han"),
    ("han+online", "han+offline"),
    ("han+plain+online", "han+plain+offline"),
    ("turbo-2+qjl", "turbo-2"),
    ("turbo-3+qjl", "turbo-3"),
    ("turbo-4+qjl", "turbo-4"),
    ("turbo-3+qjl/turbo-3", "turbo-3"),
    ("turbo-4+qjl/turbo-4", "turbo-4"),
    ("turbo-2.5", "turbo-2"),
    ("turbo-2.5", "channel-2+g128"),
    ("turbo-2.5+half", "turbo-2.5"),
    ("turbo-3.5", "turbo-3"),
    ("turbo-3.5+half", "turbo-4"),
)


def variants(subject: Subject) -> dict[str, Callable[[], Variant]]:
    """Return what this experiment measures of a model, by name."""

    def make(name: str, sides: tuple[Form, Form]) -> Variant:
        (keys, key_bits), (values, value_bits) = sides
        ends = {"sink": 0, "recent": 0} if name.endswith("@paper") else {}
        store = runner.side_by_side(keys, values)
        return Variant(store, lambda d: (key_bits(d) + value_bits(d)) / 2, page=GROUP, **ends)

    out = {name: partial(make, name, sides) for name, sides in forms(subject).items()}
    return out | {f"{name}+even": partial(evened, out[name]) for name in EVENED}


def main(arguments: list[str] | None = None) -> None:
    args = runner.parser(PAPER, __doc__).parse_args(arguments)
    runner.run(PAPER, args, variants)
    for model in args.models:
        name = Path(model).name.removesuffix(".gguf")
        print("\n" + ratios(read([args.out / f"{name}.jsonl"]), PAPER, name, PAIRS))


if __name__ == "__main__":
    console.run_tool(main)
