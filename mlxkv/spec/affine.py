"""THE SPEC of transforms, affine codes, packing and attention, in NumPy float64.

Every backend must reproduce these integers and floats (golden tensors, `tests/support/make_golden.py`).
The rules below hold for every file of this package.

Letters: `B` batch, `H` query heads, `G` kv heads, `T` cached tokens, `L` new tokens, `D` head dim,
`R` stored dims, `W` words. Rounding is half to even. Scales and biases are rounded to float16 *before*
codes are computed, so that encoder and decoder use the same numbers.
"""

from __future__ import annotations

import numpy as np

SPEC_VERSION = 1

# --------------------------------------------------------------------------------------------------
# Transforms: stored = x @ down, x = stored @ up; orthogonal ones have up = down^T.


def splitmix(count: int, seed: int) -> np.ndarray:
    """Return the first numbers of stream `seed` of splitmix64, uint64 [count]."""
    mask, out = (1 << 64) - 1, np.empty(count, np.uint64)
    for i in range(count):
        z = ((seed << 32) + (i + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out[i] = z ^ (z >> 31)
    return out


def signs(dims: int, seed: int) -> np.ndarray:
    """Return the random sign diagonal, [D] of +-1: the lowest bits of `splitmix`."""
    return 1.0 - 2.0 * (splitmix(dims, seed) & np.uint64(1))


def hadamard(dims: int, seed: int = 0) -> np.ndarray:
    """Return the sign-randomised Hadamard matrix (SRHT) [D, D]: diag(signs) H / sqrt(D), Sylvester order,
    D a power of two."""
    if dims & (dims - 1):
        raise ValueError(f"[hadamard] head dim must be a power of two; got {dims}")
    h = np.ones((1, 1))
    while len(h) < dims:
        h = np.block([[h, h], [h, -h]])
    return signs(dims, seed)[:, None] * h / np.sqrt(dims)


def srft(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """Apply the sign-randomised Fourier transform to the last axis: real in, real out, D even (SRFT
    paper, eq. 1 and 2).

    y = F diag(signs) x with F the unitary DFT. The half spectrum is packed into D reals:
    (Re y_0, Re y_D/2) first, then sqrt(2) (Re y_k, Im y_k) for k = 1 .. D/2 - 1. Exactly
    orthonormal (Parseval).
    """
    dims = x.shape[-1]
    if dims % 2:
        raise ValueError(f"[srft] head dim must be even; got {dims}")
    y = np.fft.rfft(x * signs(dims, seed), norm="ortho")
    out = np.empty(x.shape)
    out[..., 0], out[..., 1] = y[..., 0].real, y[..., -1].real
    out[..., 2::2] = np.sqrt(2) * y[..., 1:-1].real
    out[..., 3::2] = np.sqrt(2) * y[..., 1:-1].imag
    return out


def transform(name: str, dims: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return (down, up), each [D, D], of "none", "hadamard" or "srft"."""
    if name == "none":
        return np.eye(dims), np.eye(dims)
    down = hadamard(dims, seed) if name == "hadamard" else srft(np.eye(dims), seed)
    return down, down.T


def scaled(down: np.ndarray, up: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale the channels after a transform by `scale` [R]: down diag(l), diag(1/l) up (SRFT paper, section
    7.1)."""
    return down * scale, up / scale[:, None]


def channel_scale(stored: np.ndarray) -> np.ndarray:
    """Return lambda_j = 1 / max |stored_j| over all tokens, [R] from [..., R] (SRFT paper, section 7.1)."""
    amax = np.abs(stored).reshape(-1, stored.shape[-1]).max(0)
    return 1.0 / np.where(amax > 0, amax, 1.0)


# --------------------------------------------------------------------------------------------------
# Affine quantizer: x ~ scale * code + bias.


HALF_MAX = 65504.0  # the largest float16


def half(x: np.ndarray, limit: float = HALF_MAX) -> np.ndarray:
    """Clip to +-limit and round to float16; return float64."""
    return np.clip(x, -limit, limit).astype(np.float16).astype(np.float64)


def group_size(group: int, size: int) -> int:
    """Return the values per scale of `size` dims (or tokens of a page); group 0: all."""
    return min(group or size, size)


def _grouped(x: np.ndarray, group: int, axis: str) -> np.ndarray:
    """Put groups of [..., T, R] on the last axis: [..., T, ceil(R/g), g] or [..., T/g, R, g].

    For axis "token" the last group may be short (R = 80, g = 64: 64 + 16); its last value is
    repeated, which changes no minimum or maximum. For axis "channel" g divides the page.
    """
    *lead, tokens, dims = x.shape
    if axis == "token":
        pad = [(0, 0)] * (x.ndim - 1) + [(0, -dims % group)]
        return np.pad(x, pad, mode="edge").reshape(*lead, tokens, -1, group)
    return x.reshape(*lead, tokens // group, group, dims).swapaxes(-1, -2)


def _ungrouped(x: np.ndarray, axis: str, dims: int) -> np.ndarray:
    """Invert `_grouped`."""
    if axis == "channel":
        x = x.swapaxes(-1, -2)
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])
    return x.reshape(*x.shape[:-2], -1)[..., :dims]


def clip_rows(x: np.ndarray, clip: float) -> np.ndarray:
    """Clip each row of x [..., R] to +-tau (OSCAR's code): tau is entry min(floor(clip R + 1e-9), R - 1)
    of the row's |x| in ascending order. All groups of a row share tau.

    1e-9 makes .29 * 100 count as 29, not as 28.999... tau moves no more than the entry of |x| that moves
    most, so a near tie in float32 is as harmless as rounding x.
    """
    dims = x.shape[-1]
    index = min(int(np.floor(clip * dims + 1e-9)), dims - 1)
    tau = np.sort(np.abs(x), -1)[..., index, None]
    return np.clip(x, -tau, tau)


def affine_encode(
    x: np.ndarray,
    bits: int,
    group: int,
    symmetric: bool = False,
    axis: str = "token",
    clip: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode x [..., T, R].

    clip < 1, for axis "token" alone: apply `clip_rows` first.
    symmetric (SRFT paper, section 3.2): scale = max|x| / m, m = 2^(b-1) - 1, code = round(x /
    scale) + 2^(b-1). min-max: bias = min x, scale = (max x - bias) / (2^b - 1), code = round((x -
    bias) / scale).
    Returns codes (uint8, [..., T, R]), scale and bias (float64 holding float16 values):
    [..., T, ceil(R/g)] for axis "token", [..., T/g, R] for axis "channel". The symmetric bias is
    -2^(b-1) scale and is not stored.
    """
    x = np.asarray(x, np.float64)
    if clip < 1:
        x = clip_rows(x, clip)
    g = _grouped(x, group, axis)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale = half(np.abs(g).max(-1) / (middle - 1), HALF_MAX / middle)
        bias = -middle * scale
        low = 1
    else:
        bias = half(g.min(-1))
        scale = half((g.max(-1) - bias) / top)
        low = 0
    divisor = np.where(scale > 0, scale, 1.0)[..., None]
    codes = np.clip(np.rint((g - bias[..., None]) / divisor), low, top)
    if symmetric:  # a group of zeros has scale 0: its code is the middle one
        codes = np.where(scale[..., None] > 0, codes, middle)
    return _ungrouped(codes, axis, x.shape[-1]).astype(np.uint8), scale, bias


def tensor_encode(x: np.ndarray, bits: int) -> tuple[np.ndarray, float]:
    """Encode x [G, T, R], the page of one sequence, by one abs-max scale (per-tensor scaling: SRFT paper,
    section 4.1, "one scale per layer per step").

    Returns codes (uint8, [G, T, R]) and the scale, a float16 value.
    """
    codes, scale, _ = affine_encode(x.reshape(1, -1), bits, x.size, symmetric=True)
    return codes.reshape(x.shape), float(scale[0, 0])


def affine_decode(
    codes: np.ndarray, scale: np.ndarray, bias: np.ndarray, group: int, axis: str = "token"
) -> np.ndarray:
    """Return scale * code + bias: [..., T, R]."""
    g = _grouped(codes.astype(np.float64), group, axis)
    return _ungrouped(g * scale[..., None] + bias[..., None], axis, codes.shape[-1])


# --------------------------------------------------------------------------------------------------
# Packing: a little-endian bit stream per token, padded with zeros to whole uint32 words.


def _places(bits: int | np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Return of each bit of a token's stream the code that it belongs to, and its place in that."""
    bits = np.broadcast_to(bits, dims)
    return np.repeat(np.arange(dims), bits), np.concatenate([np.arange(int(b)) for b in bits])


def pack(codes: np.ndarray, bits: int | np.ndarray) -> np.ndarray:
    """Pack codes [..., R] into uint32 [..., W]: one code behind the other in the stream, the lowest bit first, W =
    ceil(R b / 32). bits: b, or of each code [R]."""
    code, place = _places(bits, codes.shape[-1])
    stream = (codes[..., code].astype(np.uint32) >> place.astype(np.uint32)) & 1
    stream = np.pad(stream, [(0, 0)] * (codes.ndim - 1) + [(0, -len(code) % 32)])
    words = stream.reshape(*stream.shape[:-1], -1, 32) << np.arange(32, dtype=np.uint32)
    return words.sum(-1, dtype=np.uint32)


def unpack(words: np.ndarray, bits: int | np.ndarray, dims: int) -> np.ndarray:
    """Invert `pack`: words [..., W], signed or not, to uint8 [..., R]."""
    code, place = _places(bits, dims)
    stream = (words[..., None].astype(np.int64) >> np.arange(32)) & 1
    stream = stream.reshape(*words.shape[:-1], -1)[..., : len(code)] << place
    return np.add.reduceat(stream, np.flatnonzero(place == 0), -1).astype(np.uint8)


# --------------------------------------------------------------------------------------------------
# The cache: sink | pages | recent, and attention over it.


def split(tokens: int, sink: int, recent: int, page: int) -> tuple[int, int]:
    """Return (sink tokens, quantized pages) after `tokens` tokens have been appended.

    Nothing is quantized while all tokens fit into sink + recent + page. After that as few of the oldest
    pages are quantized as leave at most recent + page tokens in the recent window.
    """
    body = tokens - sink
    if body <= recent + page:
        return min(tokens, sink), 0
    return sink, -(-(body - recent - page) // page)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Return softmax(scale q k^T + mask) v [B, H, L, Dv] of q [B, H, L, D], k [B, G, T, D], v [B, G, T, Dv].

    mask: None, boolean (True: attend) or additive, broadcast to [B, H, L, T].
    sinks: [H] logits that take part in the softmax without a value (gpt-oss).
    softcap: scores s become c tanh(s / c) before the mask (Gemma 2, arXiv 2408.00118, section 2).
    """
    ratio = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, ratio, 1), np.repeat(v, ratio, 1)
    s = scale * (q @ k.swapaxes(-1, -2))
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    if sinks is not None:
        column = np.broadcast_to(sinks[None, :, None, None], (*s.shape[:-1], 1))
        s = np.concatenate([s, column], -1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return p[..., : k.shape[2]] @ v


def causal_mask(new: int, total: int, window: int | None = None) -> np.ndarray:
    """Return a boolean [L, T]: new token i, at position T - L + i, sees itself and the tokens before it (in
    its window)."""
    rows = np.arange(total - new, total)[:, None]
    columns = np.arange(total)[None]
    mask = columns <= rows
    return mask if window is None else mask & (columns > rows - window)


# --------------------------------------------------------------------------------------------------
# Attention over latents (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1). A token is
# cached as a latent c, from which every head makes its key and its value, and as one key k_pe with rotary
# positions, which all heads share. Here `R`: latent dims, `N`: rotary dims, `D`: dims of a head without
# positions, `Dv`: of its values.


def rotary_scores(q_pe: np.ndarray, k_pe: np.ndarray, scale: float) -> np.ndarray:
    """Return the term that positions add to the scores, [B, H, L, T], of q_pe [B, H, L, N] and k_pe [B, 1, T, N]
    (eq. 17: the key of a head is [k^C; k^R], so a score is the sum of two products)."""
    return scale * (q_pe @ k_pe.swapaxes(-1, -2))


def expanded(
    q: np.ndarray,
    latents: np.ndarray,
    up_keys: np.ndarray,
    up_values: np.ndarray,
    scale: float,
    bias: np.ndarray,
) -> np.ndarray:
    """Return attention with keys and values made from latents, [B, H, L, Dv] (eq. 10, 11 and 18).

    q: [B, H, L, D], without positions. latents: [B, 1, T, R]. up_keys: W^UK of each head, [H, D, R]. up_values:
    W^UV, [H, Dv, R]. bias: `rotary_scores`, and the mask.
    """
    keys = latents @ up_keys.swapaxes(-1, -2)
    values = latents @ up_values.swapaxes(-1, -2)
    return attention(q, keys, values, scale, bias)


def absorbed(
    q: np.ndarray,
    latents: np.ndarray,
    up_keys: np.ndarray,
    up_values: np.ndarray,
    scale: float,
    bias: np.ndarray,
) -> np.ndarray:
    """Return the same with W^UK in the queries and W^UV in the outputs (section 2.1.2): one latent is the key and
    the value of all heads, so what is stored of it is one record."""
    out = attention(q @ up_keys, latents, latents, scale, bias)
    return out @ up_values.swapaxes(-1, -2)


def latent_readers(
    queries: np.ndarray, up_values: np.ndarray, covariance: np.ndarray, scale: float
) -> np.ndarray:
    """Return M [R, R]: what reads a latent, as key and as value, summed over heads.

    queries: absorbed ones, [H, M, R]. up_values: W of each head, [H, Dv, R]. covariance: C [R, R], of latents. An
    error e of a latent with weight p moves the output of a head by p (scale q . e) W (c - mean) + p W e, to first
    order, with the mean of latents under p. Where q and c do not depend on each other its mean square, less p^2, is
    e^T M e with M = scale^2 tr(W C W^T) E[q q^T] + W^T W.
    """
    out = np.zeros(covariance.shape)
    for q, w in zip(queries, up_values, strict=True):
        out += scale**2 * np.trace(w @ covariance @ w.T) * (q.T @ q) / len(q) + w.T @ w
    return out
