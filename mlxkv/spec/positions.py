"""THE SPEC of second moments over positions, in NumPy float64. Rules as in `affine.py`.

RoPE (arXiv 2104.09864) rotates pair i of a key's channels, (a, b), by w_i t at position t: row vectors become x R(t)^T,
R orthogonal, R(s) R(t) = R(s + t), R(0) = I. Moments "at position 0" are those of keys rotated back, x R(t); what
scaling does to their size (YaRN's factor) is in them. A text of a few thousand tokens gives them for all positions:
what a key is before RoPE depends on the text, where it stands is R(t) alone.

The eigenvectors of R are those of its planes, (e_a - j e_b) / sqrt 2 with eigenvalue exp(j w_i t), their conjugates,
and e_c with 1 for channels that do not rotate. With U their unitary matrix [D, D], theta = (w, -w, 0) and S a second
moment at position 0,

    R(t) S R(t)^T = U (U^H S U * exp(j (theta_a - theta_b) t)) U^H,

so its mean over positions multiplies the entries by means of exp(j w t), which are geometric sums:

    mean over start <= t < start + n of exp(j w t) = exp(j w (start + (n - 1) / 2)) sin(n w / 2) / (n sin(w / 2)).

A pair keeps its energy (w = 0), gives up what tells its two channels apart (2 w), and its products with other pairs
(w_a - w_b, w_a + w_b) and with channels that do not rotate (w_a), each as soon as n is past a turn: slow pairs keep all
of it. The mean m rotates with w alone.

For keys without one fixed mean (`balanced.py`), that mean is the one over positions, and their second moment about it
is `over(S) - m m^T`: the covariance rotated, and what the mean's own rotating adds. Both are exact, whatever the text's
distribution is, as long as it does not depend on t.

A fixed map has noise e of one second moment N, in the frame that scores see. A query at position s reads it with
E (q . e)^2 = tr(N R(s) M R(s)^T), linear in the query's moment: the mean over the positions of a session is exact
too, and those of keys and of queries are taken apart, since e and q are independent.

`D` head dim, `N` rows, `P` pairs.
"""

from __future__ import annotations

import numpy as np

Span = tuple[int, int]  # positions from and to, without the last


def rotary_pairs(dims: int, first: int = 0, interleaved: bool = False) -> np.ndarray:
    """Return [dims / 2, 2], the channels that rotate together: halves, or neighbours (`traditional`)."""
    channels = np.arange(first, first + dims)
    return channels.reshape(-1, 2) if interleaved else channels.reshape(2, -1).T


def planes(pairs: np.ndarray, frequencies: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Return U [D, D], an eigenvector of R per column, and theta [D], radians a position."""
    still = np.setdiff1d(np.arange(dims), pairs)
    u, theta, count = np.zeros((dims, dims), complex), np.zeros(dims), len(pairs)
    for i, (a, b) in enumerate(pairs):
        u[a, i] = u[a, count + i] = np.sqrt(0.5)
        u[b, i], u[b, count + i] = -1j * np.sqrt(0.5), 1j * np.sqrt(0.5)
        theta[i], theta[count + i] = frequencies[i], -frequencies[i]
    u[still, 2 * count + np.arange(len(still))] = 1
    return u, theta


def rotation(t: float, pairs: np.ndarray, frequencies: np.ndarray, dims: int) -> np.ndarray:
    """Return R(t) [D, D]: a row x becomes x R(t)^T."""
    out, (a, b) = np.eye(dims), pairs.T
    out[a, a] = out[b, b] = np.cos(frequencies * t)
    out[b, a] = np.sin(frequencies * t)
    out[a, b] = -out[b, a]
    return out


def rotate(x: np.ndarray, t: np.ndarray, pairs: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Return x [..., N, D], row n rotated to position t[n]; t of -t[n] rotates back."""
    out, (a, b) = np.array(x, np.float64), pairs.T
    angle = np.asarray(t, np.float64)[:, None] * frequencies
    out[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
    out[..., b] = x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle)
    return out


def harmonic(w: np.ndarray, span: Span) -> np.ndarray:
    """Return the mean of exp(j w t) over the positions of `span`, for w of any shape."""
    start, stop = span
    cycles = np.asarray(w, np.float64) / (2 * np.pi)
    cycles = cycles - np.rint(cycles)  # whole turns of a position are none
    size = np.sinc(cycles * (stop - start)) / np.sinc(cycles)
    return np.exp(1j * np.pi * cycles * (start + stop - 1)) * size


def moment_over(
    moment: np.ndarray, span: Span, pairs: np.ndarray, frequencies: np.ndarray
) -> np.ndarray:
    """Return the mean of R(t) S R(t)^T over `span`, for S [D, D] at position 0."""
    u, theta = planes(pairs, frequencies, len(moment))
    factors = harmonic(theta[:, None] - theta, span)
    return np.real(u @ (u.conj().T @ moment @ u * factors) @ u.conj().T)


def mean_over(
    mean: np.ndarray, span: Span, pairs: np.ndarray, frequencies: np.ndarray
) -> np.ndarray:
    """Return the mean of m R(t)^T over `span`, for m [D] at position 0."""
    u, theta = planes(pairs, frequencies, len(mean))
    return np.real(u @ (harmonic(theta, span) * (u.conj().T @ mean)))


def contexts(longest: int, shortest: int = 1024) -> list[Span]:
    """Return the spans whose means count alike for a model of `longest` positions: sessions of that length, of half
    of it, and so on, down to `shortest`."""
    out = [(0, longest)]
    while out[-1][1] // 2 >= shortest:
        out.append((0, out[-1][1] // 2))
    return out
