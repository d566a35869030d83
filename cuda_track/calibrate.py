"""`python -m cuda_track.calibrate --model NAME -o FILE`: compute the rotations (OSCAR) and balanced transforms of
every kv head in one pass over some text. The file is one of `mlxkv calibrate`.

Moments are taken where attention is computed, of keys and queries over all positions of the model; NumPy code of
`mlxkv.formats` makes the maps. Letters: `G` kv heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from cuda_track.codec import transform
from cuda_track.codec.codec import both
from mlxkv import console
from mlxkv.catalog.shapes import context_limit
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact, rotary, sums
from mlxkv.formats.calibration.artifact import SIDES, Calibration, Layer
from mlxkv.formats.calibration.rotary import DEFAULT_CONTEXT, Rotary, contexts
from mlxkv.formats.calibration.sums import KEYS, READ, WEIGHED, Exchange, LayerSums, Sums, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cuda_track.models.loader import Loaded
    from cuda_track.models.taps import Call

TOKENS = 8900  # about what the paper takes


@dataclass
class Moments(LayerSums):
    """Sums of one layer."""

    kv_heads: int = field(kw_only=True)

    def add(self, call: Call) -> None:
        """Add a whole window."""
        keys = self._at_zero(call.keys)
        queries = self._at_zero(call.queries)
        self._add("keys", queries)
        self._add("values", call.out)
        if keys.shape[2] > sums.SINK:
            self._add(KEYS, keys[:, :, sums.SINK :])
            self._add("stored values", call.values[:, :, sums.SINK :])
            exchange = self.exchange
            root = None if exchange is None else torch.from_numpy(sums.root(exchange.fisher))
            if (heard := received(call, root)) is not None:
                self._add(READ, keys[:, :, sums.SINK :], heard.attention[:, sums.SINK :])
                if exchange is not None:
                    exchange.keys = exchange.keys + heard.costs.double().sum(1).cpu().numpy()
                    exchange.values = exchange.values + heard.squares.double().cpu().numpy()
                    exchange.queries += heard.costs.shape[1]
                    self._add(WEIGHED, queries[:, :, heard.asked], heard.costs)
            for side, x in zip(SIDES, (call.keys, call.values), strict=True):
                self.raise_peaks(side, peaks(x[:, :, sums.SINK :]).cpu().numpy())
        if self.output is None and call.output is not None:
            squares = call.output.double() @ call.output.double().mT
            dims = squares.shape[-1]
            grouped = squares.reshape(self.kv_heads, -1, dims, dims).sum(1)
            self.output = grouped.cpu().numpy()

    def _at_zero(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate keys or queries of a window [B, H, L, D] back to position 0, float32."""
        if self.rotary is None or not len(self.rotary.pairs):
            return x.float()
        partner, *factors = self.rotary.wheel(-np.arange(x.shape[2]), x.shape[3])
        cos, sin = (torch.from_numpy(factor).float().to(x.device) for factor in factors)
        return x.float() * cos + x.float()[..., torch.from_numpy(partner).to(x.device)] * sin

    def _add(self, name: str, x: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add rows x [B, H, L, D] to a sum. weights: [G, L] of the rows of each kv head; None for 1."""
        rows = grouped(x, self.kv_heads)
        if name not in self.sums:
            centre = self.sums[KEYS].centre if name == READ else rows.mean(1).cpu().numpy()
            self.sums[name] = Sums(centre)
        centre = torch.from_numpy(self.sums[name].centre).to(rows.device)
        count = np.float64(rows.shape[1])
        if weights is not None:
            count = weights.sum(1).double().cpu().numpy()
        added = products(rows, centre, weights)
        self.sums[name].add(*both(lambda x: x.cpu().numpy(), added), count)


def grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the rows of each kv head's group: [B, H, L, D] -> [G, N, D] float32."""
    rows = x.float().reshape(x.shape[0], kv_heads, -1, x.shape[3])
    return rows.swapaxes(0, 1).reshape(kv_heads, -1, x.shape[3])


def products(
    rows: torch.Tensor, centre: torch.Tensor, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of w y^T y [G, D, D] and of w y [G, D] over y = x - centre, of rows x [G, N, D]. weights: w [G,
    N]."""
    y = rows - centre[:, None]
    weighted = y if weights is None else y * weights[..., None]
    return weighted.mT @ y, weighted.sum(1)


@dataclass(frozen=True)
class Heard:
    """Attention of far queries in a window. asked: [N], their tokens. attention: [G, T] that each key gets from them.
    costs: [G, H / G N], of a nat^2 of noise in their scores: the sum of p^2 |v - out|^2 in F over tokens behind the
    first ones. squares: [G], of p^2."""

    asked: torch.Tensor
    attention: torch.Tensor
    costs: torch.Tensor
    squares: torch.Tensor


def received(call: Call, root: torch.Tensor | None = None) -> Heard | None:
    """Ask one query in `sums.EVERY` of a window; None where none is far from a key behind the first ones.

    root: L [G, D, D] of F = L L^T; None for I.
    """
    queries, keys = call.queries, call.keys
    at = torch.arange(0, keys.shape[2], sums.EVERY, device=keys.device)
    at = at[at - sums.AWAY > sums.SINK]
    if not len(at):
        return None
    group = queries.shape[1] // keys.shape[1]
    place = torch.arange(keys.shape[2], device=keys.device)
    attention = torch.zeros(keys.shape[1:3], device=keys.device)
    transform = torch.eye(call.out.shape[-1])[None] if root is None else root
    values = call.values[0].float() @ transform.to(keys.device)  # [G, T, D]
    out = call.out[0].float().unflatten(0, (-1, group)) @ transform.to(keys.device)[:, None]
    squares, costs = torch.zeros(keys.shape[1], device=keys.device), []
    for block in at.split(64):
        q = queries[0, :, block].float().unflatten(0, (-1, group)) * call.scale  # [G, H / G, N, D]
        scores = q @ keys[0, :, None].float().mT
        scores = scores.masked_fill(place > block[:, None], float("-inf"))
        p = scores.softmax(-1).masked_fill(place >= block[:, None] - sums.AWAY, 0)
        attention += p.sum((1, 2))
        apart = torch.cdist(out[:, :, block], values[:, None, sums.SINK :]) ** 2
        p = p[..., sums.SINK :] ** 2
        costs.append((p * apart).sum(-1))
        squares += p.sum((1, 2, 3))
    return Heard(at, attention, torch.cat(costs, -1).flatten(1), squares)


def fisher(
    model: PreTrainedModel, layers: set[int], tokens: Sequence[int], start: Sequence[int] = ()
) -> dict[int, np.ndarray]:
    """Return F [G, D, D] of what attention of each of `layers` hands on, the sum over the query heads of a kv head: the
    second moment of the gradient of the log-likelihood of tokens that the model draws (`mlxkv.spec.mixed_bits`).
    {}, and a line on stderr, where the model cannot be differentiated or gradients are no numbers or all 0."""
    from cuda_track.models.taps import observing

    totals = {layer: np.zeros(()) for layer in layers}
    count = 0
    shifts: dict[int, torch.Tensor] = {}
    heads: dict[int, int] = {}

    def shifted(call: Call) -> torch.Tensor | None:
        if call.layer not in layers:
            return None
        heads[call.layer] = call.keys.shape[1]
        shifts[call.layer] = torch.zeros_like(call.out, requires_grad=True)
        return shifts[call.layer]

    try:
        with observing(model, shifted), torch.enable_grad():
            for i in range(sums.TIMES):
                part = list(tokens[i * sums.DIFFERENTIATED : (i + 1) * sums.DIFFERENTIATED])
                if len(part) <= sums.FIRST:
                    break
                ids = torch.tensor([[*start, *part]], device=model.device)
                logits = model(ids, use_cache=False).logits[0].float()
                seeded = torch.Generator(logits.device).manual_seed(i)
                drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=seeded)
                likelihood = logits.log_softmax(-1).gather(-1, drawn).sum()
                gradients = torch.autograd.grad(likelihood, [shifts[layer] for layer in totals])
                count += ids.shape[1] - sums.FIRST
                for layer, g in zip(totals, gradients, strict=True):
                    g = g[0, :, sums.FIRST :].double().reshape(heads[layer], -1, g.shape[-1])
                    totals[layer] = totals[layer] + (g.mT @ g).cpu().numpy()
    except (RuntimeError, NotImplementedError, KeyError) as error:  # equal layers serve, too
        reason = str(error).partition("\n")[0]
        console.note(f"[calibrate] errors count alike in all layers: no gradient ({reason})")
        return {}
    return sums.information(totals, count)


def peaks(x: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute values of the channels after SRFT: [B, G, L, D] -> [G, D] float32."""
    srft = transform.make("srft", x.shape[-1], 0, x.device)
    assert srft is not None
    return srft.store(x).abs().amax((0, 2))


def calibrate(
    loaded: Loaded,
    tokens: Sequence[int],
    text: str = "",
    window: int = sums.WINDOW,
    start: Sequence[int] = (),
) -> Calibration:
    """Compute the maps of all layers that grow with the context. Raises UserError, MachineError."""
    from cuda_track.models.latent import modules_of
    from cuda_track.models.layers import plain_layers, replaceable
    from cuda_track.models.taps import observing
    from cuda_track.models.transformers_compat import check_one_process

    if len(tokens) < sums.LEAST:
        raise UserError(
            f"[calibrate] too little text; got {len(tokens)} tokens; choose at least {sums.LEAST}"
        )
    model = loaded.model
    check_one_process(model, "calibrate", "moments are taken")
    if modules_of(model):
        raise UserError(
            "[calibrate] moments of latents (MLA) are taken by mlxkv calibrate; got a model with latents; make "
            "the file there, and name it by --calibration FILE"
        )
    growing = {i for i, layer in enumerate(plain_layers(model)) if replaceable(layer)}
    positions = context_limit(model.config.to_dict()) or DEFAULT_CONTEXT
    rotaries = rotations(model, tokens[: sums.PROBES], max(positions, window))
    spans = contexts(positions)
    moments: dict[int, Moments] = {}
    information = fisher(model, growing, tokens, start)

    def observe(call: Call) -> None:
        if call.layer in growing:
            new = Moments(rotaries[call.layer], spans, kv_heads=call.keys.shape[1])
            if call.layer in information:
                new.exchange = Exchange(information[call.layer])
            moments.setdefault(call.layer, new).add(call)

    with observing(model, observe), torch.no_grad():
        for part in windows(tokens, window):
            ids = [*start, *part]
            model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    if not moments:
        raise UserError("[calibrate] this model has nothing to compress; got no layer that grows")
    if blind := [rotaries[layer] for layer in moments].count(None):
        positions = min(positions, len(windows(tokens, window)[0]))
        # Numbers of 16 bits can hide it, as bfloat16 does for Qwen2.5-Coder 0.5B.
        advice = "" if model.dtype == torch.float32 else "; try --dtype float32"
        console.note(
            f"[calibrate] {blind} of {len(moments)} layers do not show how keys rotate: "
            f"the file holds for positions up to {positions:,}{advice}"
        )
    costs = sums.floored({i: layer.costs() for i, layer in moments.items()})
    layers = {}
    for i, layer in sorted(moments.items()):
        keys, values = (layer.basis(side, f"layer {i}, {side}") for side in SIDES)
        layers[str(i)] = Layer(layer.kv_heads, keys, values, costs.get(i))
    return Calibration(
        fingerprint=loaded.fingerprint or "",
        model=loaded.name,
        model_type=str(model.config.model_type),
        tokens=len(tokens),
        text=text,
        text_digest=sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16],
        layers=layers,
        positions=positions,
    )


def rotations(
    model: PreTrainedModel, tokens: Sequence[int], longest: int
) -> dict[int, Rotary | None]:
    """Return how keys of each layer rotate up to position `longest`; None where it is not as RoPE does. Tokens that see
    themselves alone compute the same at every position."""
    from cuda_track.models.taps import exact_ropes, observing

    keys_at: dict[int, dict[int, np.ndarray]] = {}
    dtypes: dict[int, torch.dtype] = {}
    ids = torch.tensor(tokens, device=model.device)[:, None]
    with observing(model, lambda call: dtypes.update({call.layer: call.keys.dtype})):
        with torch.no_grad():
            model(ids[:1], use_cache=False, logits_to_keep=1)
    if not dtypes:  # attention of its own, which takes no float32 either
        return {}
    for t in rotary.positions(longest):

        def observe(call: Call, t: int = t) -> None:
            dtypes[call.layer] = call.keys.dtype
            keys_at.setdefault(call.layer, {})[t] = call.keys.float().flatten(0, 2).cpu().numpy()

        with observing(model, observe), exact_ropes(model), torch.no_grad():
            at = torch.full_like(ids, t)
            model(ids, position_ids=at, use_cache=False, logits_to_keep=1)
    usual = torch.finfo(model.dtype).eps
    return {
        layer: rotary.measured(rows, torch.finfo(dtypes[layer]).eps, usual)
        for layer, rows in keys_at.items()
    }


def main() -> None:
    from cuda_track import cli
    from cuda_track.models.loader import load

    parser = cli.parser(__doc__, kv="fp16", reads=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    loaded = load(options.model, "fp16", options.dtype, options.device)
    text = sources.calibration_tokens(loaded, options.tokens, options.text)
    window = min(sums.WINDOW, context_limit(loaded.model.config.to_dict()) or sums.WINDOW)
    start = sources.start_of(loaded)
    calibration = calibrate(loaded, text.tokens, text.name, window, start)
    artifact.write_calibration(options.output, calibration)
    console.note(f"calibrated on {calibration.tokens} tokens: {options.output}")


if __name__ == "__main__":
    console.run_tool(main)
