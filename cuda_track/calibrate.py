"""`python -m cuda_track.calibrate --model NAME -o FILE`: compute the rotations (OSCAR) and balanced transforms of
every kv head in one pass over some text. The file is one of `mlxkv calibrate`.

Moments are taken where attention is computed; NumPy code of `mlxkv.formats` makes the maps. Letters: `G`
kv heads, `D` head dim.
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
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import artifact, balance
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.formats.calibration.balance import Balance
from mlxkv.texts import corpus

if TYPE_CHECKING:
    from cuda_track.models.loader import Loaded
    from cuda_track.models.taps import Call

TOKENS = 8900  # about what the paper takes
LEAST = 512
WINDOW = 4096  # tokens that see each other
SINK = 64  # first tokens of a window, which presets keep exact


@dataclass
class Moments:
    """Sums of one layer, [G, D, D] float64. peaks: [G, D] by side, of the channels after SRFT. total: [G, D]
    float64, the sum of the `counted` keys of each kv head behind the first ones. output: how errors in values
    weigh, [G, D, D], or None."""

    kv_heads: int
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, np.ndarray] = field(default_factory=dict)
    total: np.ndarray | float = 0.0
    counted: int = 0
    output: np.ndarray | None = None

    def add(self, call: Call) -> None:
        self._add("keys", call.queries)
        self._add("values", call.out)
        self._add("stored keys", call.keys[:, :, SINK:])
        self._add("stored values", call.values[:, :, SINK:])
        rest = call.keys[:, :, SINK:]
        self.total = self.total + rest.float().sum((0, 2)).cpu().double().numpy()
        self.counted += rest.shape[0] * rest.shape[2]
        for side, x in zip(SIDES, (call.keys, call.values), strict=True):
            if x.shape[2] > SINK:
                found = peaks(x[:, :, SINK:]).cpu().numpy()
                self.peaks[side] = np.maximum(self.peaks.get(side, found), found)
        if self.output is None and call.output is not None:
            squares = call.output.double() @ call.output.double().mT
            dims = squares.shape[-1]
            grouped = squares.reshape(self.kv_heads, -1, dims, dims).sum(1)
            self.output = grouped.cpu().numpy()

    def _add(self, name: str, x: torch.Tensor) -> None:
        moment = second_moment(x, self.kv_heads).double().cpu().numpy()
        self.sums[name] = self.sums.get(name, 0.0) + moment
        rows = x.numel() // (self.kv_heads * x.shape[-1])
        self.rows[name] = self.rows.get(name, 0) + rows

    def mean(self, name: str, where: str) -> np.ndarray:
        """Raises MachineError for NaN or infinity."""
        mean = self.sums[name] / self.rows[name]
        if not np.isfinite(mean).all():
            raise MachineError(f"[calibrate] NaN or infinity in {where}; try another --dtype")
        return mean


def second_moment(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """x^T x over the rows of each kv head's group: [B, H, L, D] -> [G, D, D] float32."""
    rows = x.float().reshape(x.shape[0], kv_heads, -1, x.shape[3])
    rows = rows.swapaxes(0, 1).reshape(kv_heads, -1, x.shape[3])
    return rows.mT @ rows


def peaks(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute values of the channels after SRFT: [B, G, L, D] -> [G, D] float32."""
    return transform.make("srft", x.shape[-1], 0, x.device).store(x).abs().amax((0, 2))


def calibrate(
    loaded: Loaded,
    tokens: Sequence[int],
    text: str = "",
    window: int = WINDOW,
    bos: int | None = None,
) -> Calibration:
    """Compute the maps of all layers that grow with the context. Raises UserError, MachineError."""
    from cuda_track.models.latent import modules_of
    from cuda_track.models.layers import plain_layers, replaceable
    from cuda_track.models.parallel import insist_on_one
    from cuda_track.models.taps import observing

    if len(tokens) < LEAST:
        raise UserError(
            f"[calibrate] too little text; got {len(tokens)} tokens; choose at least {LEAST}"
        )
    model = loaded.model
    insist_on_one(model, "calibrate", "moments are taken")
    if modules_of(model):
        raise UserError(
            "[calibrate] moments of latents (MLA) are taken by mlxkv calibrate; got a model with latents; make "
            "the file there, and name it by --calibration FILE"
        )
    growing = {i for i, layer in enumerate(plain_layers(model)) if replaceable(layer)}
    moments: dict[int, Moments] = {}

    def observe(call: Call) -> None:
        if call.layer in growing:
            one = moments.setdefault(call.layer, Moments(call.keys.shape[1]))
            one.add(call)

    with observing(model, observe), torch.no_grad():
        for part in windows(tokens, window):
            ids = [*([] if bos is None else [bos]), *part]
            model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    if not moments:
        raise UserError("[calibrate] this model has nothing to compress; got no layer that grows")
    layers = {
        str(i): Layer(one.kv_heads, *(_basis(one, side, f"layer {i}, {side}") for side in SIDES))
        for i, one in sorted(moments.items())
    }
    return Calibration(
        fingerprint=loaded.fingerprint or "",
        model=loaded.name,
        model_type=str(model.config.model_type),
        target="attention",
        parts=matrices.PARTS,
        per_layer=False,
        tokens=len(tokens),
        text=text,
        text_digest=sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16],
        layers=layers,
    )


def windows(tokens: Sequence[int], most: int) -> list[Sequence[int]]:
    """Cut `tokens` into parts of one length, at most `most`; the last may be a little shorter."""
    size = -(-len(tokens) // max(1, -(-len(tokens) // most)))
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def _basis(moments: Moments, side: str, where: str) -> Basis:
    mean = moments.mean(side, where)
    values, vectors, floored = matrices.eigenbasis(mean)
    pair = _balance(moments, side, where, mean)
    found = moments.peaks.get(side)
    if found is not None:
        found = np.where(found > 0, found, 1.0).astype(np.float32)
    values, vectors = values.astype(np.float32), vectors.astype(np.float32)
    key_mean = None
    if side == "keys" and moments.counted:
        key_mean = (moments.total / moments.counted).astype(np.float32)
    return Basis(values, vectors, floored, balance=pair, peaks=found, mean=key_mean)


def _balance(moments: Moments, side: str, where: str, queries: np.ndarray) -> Balance:
    """queries: their second moment, where `side` is keys."""
    noise, reads = moments.mean(f"stored {side}", where), queries
    if side == "values":
        eye = np.broadcast_to(np.eye(noise.shape[-1]), noise.shape)
        reads = eye if moments.output is None else moments.output
    down, sigma, floored = balance.balance(noise, reads)
    if side == "values":  # errors have no unit: stored values stay as large
        size = np.trace(noise, axis1=-2, axis2=-1) / sigma.sum(-1)
        down, sigma = down * np.sqrt(size)[:, None, None], sigma * size[:, None]
    return Balance(down.astype(np.float32), sigma.astype(np.float32), floored)


def main() -> None:
    from cuda_track import cli
    from cuda_track.models.loader import load

    parser = cli.parser(__doc__)
    cli.model_options(parser, kv="fp16")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="what is read; by default the corpus of mlxkv")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    asked = parser.parse_args()
    loaded = load(asked.model, "fp16", asked.dtype, asked.device)
    text = asked.text.read_text() if asked.text else "\n\n".join(corpus.interleaved("calibration"))
    tokens = loaded.tokenizer(text, add_special_tokens=False)["input_ids"][: asked.tokens]
    window = min(WINDOW, getattr(loaded.model.config, "max_position_embeddings", None) or WINDOW)
    name = asked.text.name if asked.text else "corpus calibration"
    made = calibrate(loaded, tokens, name, window, loaded.tokenizer.bos_token_id)
    artifact.write(asked.output, made)
    cli.note(f"calibrated on {made.tokens} tokens: {asked.output}")


if __name__ == "__main__":
    from cuda_track import cli

    cli.run(main)
