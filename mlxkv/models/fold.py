"""The transform of values in the weights (OSCAR, section 1.3 of its code; QuaRot): `Fold`.

Per kv head with maps (down, up) [D, D] (stored = v @ down, v = stored @ up; of a rotation up is
down^T): rows of that head in W_v become down^T W_v, its bias b down; columns of the query heads of
its group in W_o become W_o up^T. The cache is then handed v down, and what attention gives out needs
no turn back. In float32, cast back to the dtype of the weights.

Nothing is told by names: two dry runs on a few tokens show which linear map gives out exactly the
values that the cache is handed, which one takes exactly what attention gives out, and whether the
model computes the same afterwards. The arrays that are replaced are kept, so that they can be put back bit
by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxkv.calibrated import Rotations
from mlxkv.models.dryrun import Run, run
from mlxkv.models.layers import FOLDED
from mlxkv.models.probe import Place
from mlxkv.models.taps import joined
from mlxkv.transform import Transform

# Largest change of what an output projection or the model gives out, rms against rms, for which
# rounding is to blame. Measured on a CPU at up to 24 layers: 1.4e-6, 2.4e-3, 0.025; heads mixed up:
# 1.3. Float32 leaves room for GPUs that round the factors of products.
BOUNDS = {mx.float32: 5e-3, mx.float16: 3e-2, mx.bfloat16: 0.15}


class Refused(Exception):
    """Why the values of a cache stay turned at run time."""


@dataclass(frozen=True)
class Site:
    """Where the values of one cache come from and go to.

    source: its output is [B, L, blocks, D], and block blocks[g] is the value of kv head g (a fused
    projection has others too). target: takes [B, L, H * D].
    """

    source: nn.Linear
    blocks: tuple[int, ...]
    target: nn.Linear


@dataclass
class Fold:
    """What was replaced: (map, name of the array, before, now). reasons: per cache, FOLDED or why
    not."""

    arrays: dict[Place, list[tuple[nn.Module, str, mx.array, mx.array]]]
    reasons: dict[Place, str]

    def undo(self, place: Place | None = None) -> None:
        """Put back what was there, at all places or at one, for good."""
        for one in [place] if place is not None else list(self.arrays):
            for module, name, before, _ in self.arrays.pop(one):
                module[name] = before

    def swap(self, folded: bool) -> None:
        """Take the plain arrays, or the folded ones again."""
        for replaced in self.arrays.values():
            for module, name, before, now in replaced:
                module[name] = now if folded else before

    @property
    def kept_bytes(self) -> int:
        """Memory that the replaced arrays take."""
        return sum(x[2].nbytes for replaced in self.arrays.values() for x in replaced)


def fold_values(
    model: nn.Module,
    make_cache: Callable[[], list],
    rotations: Mapping[Place, Rotations],
) -> Fold:
    """Fold what can be folded; the rest is left as it was, with the reason.

    make_cache: the model's own. The attention function must be rebound. What goes wrong in the
    model's own code becomes a reason, never an error.
    """
    out = Fold({}, {})
    places = list(rotations)
    try:
        before = run(model, make_cache, places)
    except Exception as error:  # a foreign model may raise anything at all
        reason = f"a dry run of the model failed ({type(error).__name__})"
        return Fold({}, dict.fromkeys(places, reason))
    sites = {}
    for place in places:
        try:
            sites[place] = _site(before, place)
        except Refused as refused:
            out.reasons[place] = str(refused)
    for place in _shared(sites):
        del sites[place]
        out.reasons[place] = "its weights serve other layers too"
    try:
        for place, site in sites.items():
            out.arrays[place] = _replace(site, rotations[place].values)
        _check(out, before, lambda: run(model, make_cache, places), sites)
    except BaseException:
        out.undo()
        raise
    out.reasons |= dict.fromkeys(out.arrays, FOLDED)
    return out


def _site(found: Run, place: Place) -> Site:
    """Raises Refused."""
    seen = found.seen[place]
    if len(seen.handed) != 1 or len(seen.calls) != 1:
        raise Refused("its values are read more than once")
    values, call = seen.handed[0], seen.calls[0]
    source, blocks = _source(seen.before, values)
    flat = joined(call.out)
    target = next((m for m, x, _ in seen.after if _same(x, flat)), None)
    if target is None:
        raise Refused("a gate or a norm comes between attention and its output projection")
    for module, what in ((source, "values"), (target, "outputs")):
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            kind = "are quantised" if "Quantized" in kind else f"belong to a {kind}"
            raise Refused(f"the weights of {what} {kind}")
    return Site(source, blocks, target)


def _same(x: mx.array, y: mx.array) -> bool:
    return x.shape == y.shape and mx.array_equal(x, y.astype(x.dtype)).item()


def _source(linears: list, values: mx.array) -> tuple[nn.Module, tuple[int, ...]]:
    """The linear map whose output holds `values` [1, G, T, D], and where: the nearest one."""
    _, heads, count, dims = values.shape
    for module, _, y in reversed(linears):
        if y.shape[:-1] != (1, count) or y.shape[-1] % dims or y.shape[-1] < heads * dims:
            continue
        blocks = y.astype(values.dtype).reshape(count, -1, dims).swapaxes(0, 1)  # [blocks, T, D]
        match = (blocks[None] == values[0][:, None]).all(axis=(2, 3))  # [G, blocks]
        found = [[b for b, yes in enumerate(row) if yes] for row in match.tolist()]
        if not all(found):
            continue
        if any(len(row) > 1 for row in found) or len({row[0] for row in found}) < heads:
            raise Refused("kv heads share one value")
        return module, tuple(row[0] for row in found)
    raise Refused(
        "values are not what a linear map gives out (a norm or another change comes first)"
    )


def _shared(sites: Mapping[Place, Site]) -> list[Place]:
    """Places whose maps belong to other places too."""
    ids = [id(m) for site in sites.values() for m in (site.source, site.target)]
    return [
        p for p, s in sites.items() if max(ids.count(id(s.source)), ids.count(id(s.target))) > 1
    ]


def _replace(site: Site, turn: Transform) -> list[tuple[nn.Module, str, mx.array, mx.array]]:
    """Fold maps [D, D] or [G, D, D] into both linear ones. Returns what `Fold.arrays` keeps."""
    heads, dims = len(site.blocks), turn.down.shape[-1]
    down, up = (mx.broadcast_to(x, (heads, dims, dims)) for x in (turn.down, turn.up))
    rows = mx.array(site.blocks)

    def source(x: mx.array) -> mx.array:  # [blocks * D, hidden], or a bias with hidden = 1
        parts = x.astype(mx.float32).reshape(-1, dims, x.size // x.shape[0])
        parts[rows] = down.swapaxes(-1, -2) @ parts[rows]
        return parts.reshape(x.shape)

    def target(x: mx.array) -> mx.array:  # [hidden, H * D]: query heads of a kv head stand together
        parts = x.astype(mx.float32).reshape(x.shape[0], heads, -1, dims).swapaxes(0, 1)
        turned = parts.reshape(heads, -1, dims) @ up.swapaxes(-1, -2)
        return turned.reshape(parts.shape).swapaxes(0, 1).reshape(x.shape)

    plan = [(site.source, "weight", source), (site.target, "weight", target)]
    if "bias" in site.source:
        plan.append((site.source, "bias", source))
    # On the CPU: GPUs may round the factors of float32 products to 11 bits.
    with mx.stream(mx.cpu):
        out = [
            (m, name, m[name], change(m[name]).astype(m[name].dtype)) for m, name, change in plan
        ]
        mx.eval([now for *_, now in out])  # one layer's float32 copies at a time
    for module, name, _, now in out:
        module[name] = now
    return out


def _check(
    out: Fold,
    before: Run,
    again: Callable[[], Run],
    sites: Mapping[Place, Site],
) -> None:
    """Undo what changes the model beyond rounding, first the places that are to blame."""
    bounds = {place: _bound(before, place, site) for place, site in sites.items()}
    while out.arrays:
        after = again()
        for place in list(out.arrays):
            pair = (_output(found, place, sites[place].target) for found in (before, after))
            change = _change(*pair)
            if not change <= bounds[place]:
                break
        else:
            change = _change(before.logits, after.logits)
            if not change <= max(bounds[place] for place in out.arrays):
                left = list(out.arrays)
                out.undo()
                out.reasons |= dict.fromkeys(left, f"the model's output changed by {change:.0%}")
            return
        out.undo(place)
        out.reasons[place] = f"the output of its attention changed by {change:.0%}"


def _bound(found: Run, place: Place, site: Site) -> float:
    """The coarsest of weights and values decides."""
    dtypes = (site.source.weight.dtype, site.target.weight.dtype)
    return max(BOUNDS.get(x, 0.0) for x in (*dtypes, found.seen[place].handed[0].dtype))


def _output(found: Run, place: Place, target: nn.Module) -> mx.array:
    return next(y for module, _, y in found.seen[place].after if module is target)


def _change(x: mx.array, y: mx.array) -> float:
    """rms(x - y) / rms(x)"""
    x, y = (part.astype(mx.float32) for part in (x, y))
    return (mx.sqrt(mx.mean((x - y) ** 2)) / mx.sqrt(mx.mean(x**2))).item()
