"""Measure OSCAR (2605.17757) beside its released code, its ablations and its rivals on real models.

Variants: the paper's, per kv head; `+layer`, one rotation a layer (first release); `+released`, the release's value
target; `+lloyd`, its four levels, `+centroids`, those of Lloyd and Max themselves; parts of the rotation and targets
(table 4); windows, `+SINKxRECENT`. KVarN (2606.03458, as its authors ship it: `kvarn-k4v2`), Block-GTQ (2606.24033),
Kitty (2511.18643; `kitty-SHARE` of channels in 4 bits).
`NAME+even`: means of keys off and channels made even before NAME, folded into the queries. `--zoo K.pt V.pt` adds
rotations of the authors' files. Presets of the product under their names. `--stages` adds rows of errors of keys,
scores and outputs (fig. 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cuda_track.models.taps import observing
from experiments.papers.rivals import block_gtq, coded, evened, kitty, kvarn
from experiments.papers.runner import (
    Layer,
    Subject,
    Variant,
    identity,
    parser,
    run,
    side_by_side,
    state_of,
)
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Affine
from mlxkv.spec import oscar as spec

PRESETS = (
    "oscar-int2", "oscar-int2@paper", "oscar-int2+layer", "kivi-int2", "hadamard-int2", "srft-int2", "srft-int4",
    "turbo-int2", "int3", "fill-3", "fill-2.25", "naive-int2", "naive-int4",
)  # fmt: skip
EVENED = (
    "oscar", "oscar+layer", "oscar+lloyd", "oscar+centroids", "kvarn-k2v2", "kvarn-k4v2", "hadamard-int2",
    "srft-int2", "srft-int4", "turbo-int2",
)  # fmt: skip
WINDOWS = ((0, 64), (0, 256), (16, 256), (64, 0), (64, 256), (64, 512), (128, 256))  # first, last
CLIPS = {"keys": 0.96, "values": 0.92}

# -- OSCAR.


def target(layer: Layer, side: str, kind: str) -> torch.Tensor:
    """Return the target [G, D, D] of a side; kind: "attention" (eq. 1, 2), "released" or "own"."""
    x = layer.keys if side == "keys" else layer.values
    if kind == "own":
        return x.double().mT @ x.double() / x.shape[1]
    if side == "keys":
        return layer.queries.double()
    if kind == "attention":
        return layer.outputs.double()
    keys, values = layer.keys.double(), layer.values.double()
    weights = (keys @ layer.queries.double() * keys).sum(-1, keepdim=True)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-12)
    return (values * weights).mT @ values


def rotations(layer: Layer, side: str, kind: str, parts: str, shared: bool) -> torch.Tensor:
    """Return R [G, D, D] float32, or [1, D, D] where one is shared by a layer."""

    def made() -> torch.Tensor:
        targets = target(layer, side, kind)
        if shared:
            targets = targets.mean(0, keepdim=True)
        own = [spec.rotation(x, parts) for x in targets.cpu().numpy()]
        return torch.from_numpy(np.stack(own)).float().to(layer.keys.device)

    return layer.once((side, kind, parts, shared), made)


def four_levels(x: torch.Tensor, exact: bool) -> torch.Tensor:
    """Code rows [..., R] and decode them. Spec: `mlxkv.spec.oscar.four_levels`."""
    mean, std = x.mean(-1, keepdim=True), (x.var(-1, correction=0, keepdim=True) + 1e-8).sqrt()
    z = (x - mean) / std
    codes = sum((z >= cut).long() for cut in (-spec.CUT, 0.0, spec.CUT))
    assert isinstance(codes, torch.Tensor)
    even = (np.arange(4) - 1.5) * (2 * spec.OUTER / 3) * spec.STRETCH
    table = torch.tensor(spec.CENTROIDS if exact else even, dtype=x.dtype, device=x.device)
    return table[codes] * std + mean


def clipped(x: torch.Tensor, clip: float) -> torch.Tensor:
    """Clip rows to an order statistic of their sizes. Spec: `mlxkv.spec.affine.clip_rows`."""
    at = min(int(np.floor(clip * x.shape[-1] + 1e-9)), x.shape[-1] - 1)
    tau = x.abs().sort(-1).values[..., at, None]
    return x.clamp(-tau, tau)


def oscar_side(
    layer: Layer,
    side: str,
    x: torch.Tensor,
    kinds: tuple[str, str] = ("attention", "attention"),
    parts: str = "uhp",
    shared: bool = False,
    code: str = "",
    group: int = 128,
    given: Mapping[tuple[int, str], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Rotate, clip, code in two bits, and go back. code: "lloyd" or "centroids" in place of min-max. given: rotations
    [D, D] by layer and side."""
    if given is None:
        rotation = rotations(layer, side, kinds[side == "values"], parts, shared)
    else:
        rotation = given[layer.index, side].to(x)[None]
    y = x @ rotation
    if code:
        return four_levels(clipped(y, CLIPS[side]), code == "centroids") @ rotation.mT
    return coded(Side(Affine(2, group, clip=CLIPS[side])), y) @ rotation.mT


def oscar(windows: tuple[int, int] = (64, 64), **options) -> Variant:
    side = partial(oscar_side, **options)

    def bits(dims: int) -> float:  # two numbers for each group, or each row
        return (
            2 + 32 / dims if options.get("code") else 2 + 32 / min(options.get("group", 128), dims)
        )

    return Variant(side_by_side(side, side), bits, *windows)


def zoo(keys: Path, values: Path) -> dict[tuple[int, str], torch.Tensor]:
    """Read rotations of the authors' files (rotation/compute_kv_rotation.py): "layers" by number, of each "rotation"
    [D, D]. Returns them by layer and side. Raises UserError."""
    out = {}
    for side, path in (("keys", keys), ("values", values)):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)["layers"]
            own = {(int(i), side): entry["rotation"].float() for i, entry in found.items()}
        except Exception as error:  # unpickling raises errors of any kind
            reason = str(error).partition("\n")[0]
            raise UserError(f"[--zoo] no rotations of OSCAR; got {path}: {reason}") from None
        for x in own.values():
            if x.ndim != 2 or not torch.allclose(x @ x.mT, torch.eye(len(x)), atol=1e-3):
                raise UserError(f"[--zoo] no rotation [D, D]; got {path}: {tuple(x.shape)}")
        out |= own
    return out


# -- The command.


def variants_of(subject: Subject, files: tuple[Path, Path] | None = None):
    """Return makers of all variants by name. files: `--zoo`."""
    released = {"kinds": ("attention", "released")}
    options = {
        "": {},
        "+layer": {"shared": True},
        "+released": released,
        "+lloyd": {"code": "lloyd"},
        "+centroids": {"code": "centroids"},
        "+released+layer+lloyd": released | {"shared": True, "code": "lloyd"},
        "+own": {"kinds": ("own", "own")},
        "+own-keys": {"kinds": ("own", "attention")},
        "+own-values": {"kinds": ("attention", "own")},
    }
    options |= {f"-{parts or 'none'}": {"parts": parts} for parts in ("", "u", "h", "uh", "hp")}
    # In a group of a whole head P moves values, and changes nothing.
    options |= {"+g32": {"group": 32}, "-uh+g32": {"group": 32, "parts": "uh"}}
    options |= {f"+{sink}x{recent}": {"windows": (sink, recent)} for sink, recent in WINDOWS}
    out: dict[str, Callable[[], Variant]]
    out = {f"oscar{name}": partial(oscar, **own) for name, own in options.items()}
    out |= {f"kvarn-k{k}v{v}": partial(kvarn, k, v) for k, v in ((4, 2), (2, 2), (3, 3), (4, 4))}
    for k, v in ((2, 2), (3, 2), (3, 3)):
        out[f"blockgtq-k{k}v{v}"] = partial(block_gtq, subject, k, v)
    out |= {f"kitty-{share:g}": partial(kitty, share) for share in (0.0, 0.125, 0.25)}
    out |= {name: partial(subject.preset, name) for name in PRESETS}
    out |= {f"{name}+even": partial(evened, out[name]) for name in EVENED}
    return out if files is None else out | {"oscar+zoo": partial(oscar, given=zoo(*files))}


@torch.no_grad()
def stages(subject: Subject, made, context: int, text: str, tokens, rows, dtype: str) -> None:
    """Add a row of each variant: squared error of stored keys, of values, of the scores of the queries behind the
    context (nats^2), and of attention's outputs, over their energies but for scores; means over layers."""
    state, missing = state_of(subject, tokens, dtype), {}
    for name, variant in made.items():
        own = identity(
            subject, "oscar-stages", name, f"{variant.sink},{variant.recent}", text, context
        )
        if rows.get(own, state) is None:
            missing[name] = own
    if not missing:
        return
    found: dict[str, list[list[float]]] = {name: [] for name in missing}
    exact_cache = subject.prefill(tokens[:context])
    stored = {name: subject.reconstruct(exact_cache, made[name]) for name in missing}

    def observe(call) -> None:
        if call.layer not in subject.growing:
            return
        group = call.queries.shape[1] // call.keys.shape[1]
        q = call.queries[0, :, context:].float().unflatten(0, (-1, group)) * call.scale
        k, v = call.keys[0].float(), call.values[0].float()
        mask = torch.ones(q.shape[2], k.shape[1], dtype=torch.bool, device=k.device)
        mask = mask.tril(context)

        def attended(keys, values):
            scores = q @ keys[:, None].mT
            return scores, scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, None]

        scores, out = attended(k, v)
        for name in missing:
            part = made[name].stored(context)
            pair = [x.float() for x in stored[name][call.layer]]
            own = [torch.cat([x, y[:, context:]], 1) for x, y in zip(pair, (k, v), strict=True)]
            noisy, moved = attended(*own)
            errors = [_share(x[:, part], y[:, part]) for x, y in zip(own, (k, v), strict=True)]
            errors.append(float((noisy - scores)[..., part].square().mean()))
            found[name].append([*errors, _share(moved, out)])

    with observing(subject.model, observe):
        ids = torch.tensor([tokens[:-1]], device=subject.model.device)
        subject.model(ids, use_cache=False, logits_to_keep=1)
    for name, own in missing.items():
        means = np.mean(found[name], 0)
        names = ("keys", "values", "scores", "outputs")
        rows.add(own, state, dict(zip(names, map(float, means), strict=True)))


def _share(x: torch.Tensor, of: torch.Tensor) -> float:
    return float((x - of).square().sum() / of.square().sum())


def main(arguments: list[str] | None = None) -> None:
    options = parser("oscar", __doc__)
    options.add_argument(
        "--zoo", type=Path, nargs=2, help="files of rotations, of keys and of values"
    )
    options.add_argument("--stages", action="store_true", help="rows of errors stage by stage")
    args = options.parse_args(arguments)
    then = partial(stages, dtype=args.dtype) if args.stages else None
    run("oscar", args, lambda subject: variants_of(subject, args.zoo), then)


if __name__ == "__main__":
    console.run_tool(main)
