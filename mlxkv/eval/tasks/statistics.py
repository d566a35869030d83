"""Statistics over tokens."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass

import numpy as np


@dataclass
class Tokens:
    """Measurements at each scored token, arrays [N] float64.

    nll, nll_base: negative log likelihood of the true token, nats. kl: KL(base || arm) of the whole
    distribution, nats. same: 1 if both have the same likeliest token.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kl: np.ndarray
    same: np.ndarray

    def __len__(self) -> int:
        return len(self.nll)

    def packed(self) -> dict[str, str]:
        """Return the arrays as float32 in base64, for JSON."""
        return {k: b64encode(x.astype("<f4").tobytes()).decode() for k, x in vars(self).items()}

    @staticmethod
    def unpacked(data: dict[str, str]) -> Tokens:
        """Return what `packed` made, to float32."""
        arrays = {k: np.frombuffer(b64decode(x), "<f4") for k, x in data.items()}
        return Tokens(**{k: x.astype(np.float64) for k, x in arrays.items()})

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(*(x[part] for x in vars(self).values()))


def joined(parts: list[Tokens]) -> Tokens:
    """Concatenate."""
    return Tokens(
        *(np.concatenate(xs) for xs in zip(*(vars(p).values() for p in parts), strict=True))
    )


def summary(tokens: Tokens) -> dict:
    """Return perplexities, KL divergence and the share of tokens with the same likeliest one, as plain data.
    Percentiles interpolate."""
    return {
        "tokens": len(tokens),
        "ppl": float(np.exp(tokens.nll.mean())),
        "ppl_base": float(np.exp(tokens.nll_base.mean())),
        "ppl_log_ratio": float((tokens.nll - tokens.nll_base).mean()),
        "kl": {
            "mean": float(tokens.kl.mean()),
            "max": float(tokens.kl.max()),
            "p99": float(np.percentile(tokens.kl, 99)),
        },
        "same_top": float(tokens.same.mean()),
    }
