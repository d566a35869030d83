"""THE SPEC of reading fewer pages, in NumPy float64. Rules as in `affine.py`.

A decode step reads the records of some chunks of `CHUNK` tokens and leaves the others out. A chunk is ranked by what
two vectors say of the attention that it gets: the mean and the standard deviation of each stored dim of its keys, as
they are decoded, in codes of 8 bits with a step in float16 for each vector. If the scores of its tokens were Gaussian
and the stored dims independent, the logarithm of its mass would be

    ln CHUNK + q . mean + (q^2 . deviation^2) / 2

(the first two cumulants of ln E exp), q scaled as scores are. Query heads that share a kv head, and new tokens that are
read together, read the same chunks: those with the largest sum over the rows of their shares of all the mass, the exact
windows' included. So a row that looks at the windows needs no chunk. Its own work, not a paper's: Quest (Tang et al.,
arXiv 2406.10774, section 3.2) ranks pages by the largest score that a box around their keys allows.
"""

from __future__ import annotations

import numpy as np

CHUNK = 32  # tokens
PARTS = 256  # in which a share is counted
CODES = (
    (127, 128),
    (255, 0),
)  # of means and of deviations: the largest number of steps, and the code of none
Summaries = tuple[np.ndarray, np.ndarray]


def summary(keys: np.ndarray, chunk: int = CHUNK) -> Summaries:
    """Return what chunks of stored keys [.., T, R] are ranked by: codes [.., T / chunk, 2, R] uint8 of means and of
    standard deviations, and their steps [.., T / chunk, 2] float16."""
    x = keys.astype(np.float64)
    x = x.reshape(*x.shape[:-2], -1, chunk, x.shape[-1])
    both = np.stack([x.mean(-2), x.std(-2)], axis=-2)
    most, none = np.array(CODES).T
    step = np.minimum(np.abs(both).max(-1) / most, 65504).astype(np.float16)
    size = step.astype(np.float64)[..., None]
    code = np.rint(both / np.where(size > 0, size, 1))
    low = np.where(none > 0, -most, 0)[:, None]
    code = np.clip(code, low, most[:, None]) + none[:, None]
    return code.astype(np.uint8), step


def moments(summaries: Summaries) -> np.ndarray:
    """Return the means and the deviations that codes and steps stand for, [.., chunks, 2, R]."""
    code, step = (x.astype(np.float64) for x in summaries)
    return (code - np.array(CODES)[:, 1:]) * step[..., None]


def estimates(q: np.ndarray, summaries: Summaries, chunk: int = CHUNK) -> np.ndarray:
    """Return the estimated logarithm of each chunk's mass, [.., N, chunks], for scaled queries in the stored domain
    [.., N, R]."""
    q, both = q.astype(np.float64), moments(summaries)
    mean, deviation = both[..., 0, :], both[..., 1, :]
    score = q @ mean.swapaxes(-1, -2) + (q**2) @ (deviation**2).swapaxes(-1, -2) / 2
    return np.log(chunk) + score


def count(chunks: int, share: float) -> int:
    """Return how many of so many chunks are read: a share, in `PARTS`, rounded half up, and at least one."""
    parts = max(1, round(share * PARTS))
    return min(chunks, max(1, (chunks * parts + PARTS // 2) // PARTS))


def weights(logs: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """Return the sum over the rows of the shares of all the mass, [.., chunks], of logarithms [.., N, chunks]; beside:
    the logarithm of the mass of the windows, [.., N]."""
    both = np.concatenate([logs, beside[..., None]], axis=-1)
    share = np.exp(both - both.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return share[..., :-1].sum(-2)


def chosen(weight: np.ndarray, share: float) -> np.ndarray:
    """Return the chunks that are read, [.., count] int32, in order: those of the largest weight, the earlier one of
    equal ones."""
    order = np.argsort(-weight, axis=-1, kind="stable")
    return np.sort(order[..., : count(weight.shape[-1], share)], axis=-1).astype(np.int32)


def attend(q, keys, values, windows, share: float, chunk: int = CHUNK) -> np.ndarray:
    """Attend with scaled queries [N, R] to the chosen chunks of decoded keys and values [T, R], and to windows
    (keys, values) that every row sees; of one kv head. Returns [N, R]."""
    beside = q @ windows[0].T
    top = beside.max(-1, keepdims=True)
    held = np.log(np.exp(beside - top).sum(-1)) + top[..., 0]
    weight = weights(estimates(q, summary(keys, chunk), chunk), held)
    tokens = (chosen(weight, share)[:, None] * chunk + np.arange(chunk)).ravel()
    s = np.concatenate([q @ keys[tokens].T, beside], axis=-1)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ np.concatenate([values[tokens], windows[1]]) / p.sum(-1, keepdims=True)
