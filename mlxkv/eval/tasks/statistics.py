"""Statistics over tokens, in the form of llama.cpp's `perplexity --kl-divergence`."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from math import sqrt

import numpy as np

KL_LEVELS = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0)
DELTA_LEVELS = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass
class Tokens:
    """Measurements at each scored token, arrays [N] float64.

    nll, nll_base: negative log likelihood of the true token, nats. kl: KL(base || arm) of the whole
    distribution, nats. delta: probability of the true token, arm minus base. same: 1 if both have
    the same likeliest token.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kl: np.ndarray
    delta: np.ndarray
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
    """Return perplexities, KL divergence and token probabilities with standard errors, as plain data.

    The errors of the ratio and the difference of perplexities allow for their correlation.
    Percentiles interpolate. `same_top` and `delta_p` are shares.
    """
    ppl, ppl_error = _perplexity(tokens.nll)
    base, base_error = _perplexity(tokens.nll_base)
    log_ratio, log_error = _mean(tokens.nll - tokens.nll_base)
    ratio = float(np.exp(log_ratio))
    covariance = _covariance(tokens.nll, tokens.nll_base)
    variance = ppl_error**2 + base_error**2 - 2 * ppl * base * covariance / max(1, len(tokens) - 1)
    rms, rms_error = _rms(tokens.delta)
    same = float(tokens.same.mean())
    return {
        "tokens": len(tokens),
        "ppl": ppl,
        "ppl_error": ppl_error,
        "ppl_base": base,
        "ppl_base_error": base_error,
        "ppl_correlation": _correlation(tokens.nll, tokens.nll_base),
        "ppl_log_ratio": log_ratio,
        "ppl_log_ratio_error": log_error,
        "ppl_ratio": ratio,
        "ppl_ratio_error": ratio * log_error,
        "ppl_difference": ppl - base,
        "ppl_difference_error": sqrt(max(0.0, variance)),
        "kl": _spread(tokens.kl, KL_LEVELS),
        "delta_p": _spread(tokens.delta, DELTA_LEVELS) | {"rms": rms, "rms_error": rms_error},
        "same_top": same,
        "same_top_error": sqrt(same * (1 - same) / max(1, len(tokens) - 1)),
    }


def _mean(x: np.ndarray) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = float(x.std(ddof=1) / sqrt(len(x))) if len(x) > 1 else 0.0
    return float(x.mean()), error


def _perplexity(nll: np.ndarray) -> tuple[float, float]:
    mean, error = _mean(nll)
    return float(np.exp(mean)), float(np.exp(mean)) * error


def _covariance(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - a.mean()) * (b - b.mean())).mean())


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    spread = sqrt(_covariance(a, a) * _covariance(b, b))
    return _covariance(a, b) / spread if spread else 1.0


def _spread(x: np.ndarray, levels: tuple[float, ...]) -> dict:
    mean, error = _mean(x)
    out = {"mean": mean, "error": error, "max": float(x.max()), "min": float(x.min())}
    values = np.percentile(x, levels)
    return out | {f"p{level:g}": float(v) for level, v in zip(levels, values, strict=True)}


def _rms(x: np.ndarray) -> tuple[float, float]:
    mean, error = _mean(x * x)
    rms = sqrt(mean)
    return rms, 0.5 * error / rms if rms else 0.0


def block(s: dict) -> str:
    """Format a `summary` as llama.cpp prints it."""
    kl, delta = s["kl"], s["delta_p"]
    lines = [
        "====== Perplexity statistics ======",
        _line("Mean PPL(Q)", s["ppl"], s["ppl_error"]),
        _line("Mean PPL(base)", s["ppl_base"], s["ppl_base_error"]),
        f"{'Cor(ln(PPL(Q)), ln(PPL(base)))':<30}: {100 * s['ppl_correlation']:6.2f}%",
        _line("Mean ln(PPL(Q)/PPL(base))", s["ppl_log_ratio"], s["ppl_log_ratio_error"]),
        _line("Mean PPL(Q)/PPL(base)", s["ppl_ratio"], s["ppl_ratio_error"]),
        _line("Mean PPL(Q)-PPL(base)", s["ppl_difference"], s["ppl_difference_error"]),
        "",
        "====== KL divergence statistics ======",
        _line("Mean    KLD", kl["mean"], kl["error"]),
        _line("Maximum KLD", kl["max"]),
        *(_line(f"{_level(level)} KLD", kl[f"p{level:g}"]) for level in KL_LEVELS),
        _line("Minimum KLD", kl["min"]),
        "",
        "====== Token probability statistics ======",
        f"{'Mean    Δp':<30}: {100 * delta['mean']:6.3f} ± {100 * delta['error']:5.3f} %",
        f"{'Maximum Δp':<30}: {100 * delta['max']:6.3f}%",
        *(
            f"{_level(level) + ' Δp':<30}: {100 * delta[f'p{level:g}']:6.3f}%"
            for level in DELTA_LEVELS
        ),
        f"{'Minimum Δp':<30}: {100 * delta['min']:6.3f}%",
        f"{'RMS Δp':<30}: {100 * delta['rms']:6.3f} ± {100 * delta['rms_error']:5.3f} %",
        f"{'Same top p':<30}: {100 * s['same_top']:6.3f} ± {100 * s['same_top_error']:5.3f} %",
    ]
    return "\n".join(lines)


def _level(level: float) -> str:
    return "Median" if level == 50 else f"{level:4.1f}%"


def _line(name: str, value: float, error: float | None = None) -> str:
    return f"{name:<30}: {value:10.6f}" + ("" if error is None else f" ± {error:10.6f}")
