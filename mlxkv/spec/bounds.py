"""Criteria of equality: rows, ties and bounds of the golden table, for every backend.

Imports no framework. `mlxkv.spec.rows` passes the golden tensors to a backend and compares by these criteria.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from mlxkv.formats.matrices import gaussian

Arrays = dict[str, np.ndarray]
FOLDER = Path(__file__).parents[2] / "tests" / "golden"  # in a clone: a file a table
SAMPLE = Path(__file__).parent / "golden.safetensors"  # in the wheel: some cases of each method
BOUNDS = {"transforms": 2e-6, "decode": 1e-6, "attention": 5e-6, "moments": 5e-6, "learned": 2e-5}
# Of codebooks: an angle that changes sides moves a fitted one a little.
LEVELS_BOUND, FITTED_BOUND = 1e-7, 3e-4
PRODUCT_BOUND = 2e-6  # float32 sums over dims or tokens
# Of low rank that follows. Pages are float16, where a product in float32 may round to the other side; a
# small residual is the difference of large numbers.
OJA_BOUNDS = {"basis": 2e-6, "update": 2e-5, "attention": 1e-4, "float16": 1e-3}
TIES = 0.01  # largest share of codes that may differ by one, all of them at rounding boundaries


@dataclass(frozen=True)
class Row:
    """One line of the table. differ: codes off by one at a boundary; wrong: any other
    difference."""

    table: str
    case: str
    values: int
    differ: int = 0
    wrong: int = 0
    rms: float = 0.0
    bound: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong and self.differ <= TIES * self.values and self.rms <= self.bound

    def as_dict(self) -> dict:
        return {**asdict(self), "ok": self.ok}


def read_golden(table: str, sample: bool = not FOLDER.is_dir()) -> tuple[Arrays, dict[str, str]]:
    """Return the tensors and the header of a golden table.

    sample: from the cases that the wheel has, which is all that there is outside of a clone.
    """
    path, start = (SAMPLE, f"{table}/") if sample else (FOLDER / f"{table}.safetensors", "")
    with safe_open(path, "numpy") as file:
        names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118 (no iterator)
        header = file.metadata()
        if sample:
            header = json.loads(header.get(table, "{}"))
        return {name.removeprefix(start): file.get_tensor(name) for name in names}, header


def rms(x: np.ndarray, spec: np.ndarray) -> float:
    """rms(x - spec) / rms(spec), NaN counted as infinite."""
    error = float(
        np.sqrt(np.mean((x.astype(np.float64) - spec) ** 2) / np.mean(spec.astype(np.float64) ** 2))
    )
    return error if np.isfinite(error) else float("inf")


def close(table: str, case: str, values: np.ndarray, spec: np.ndarray, bound: float) -> Row:
    """Compare numbers with the spec's."""
    return Row(table, case, spec.size, rms=rms(values, spec), bound=bound)


def compare_codes(
    table: str, case: str, codes: np.ndarray, spec: np.ndarray, ties: np.ndarray
) -> Row:
    """Compare codes with the spec's. ties: packed bit mask of values at a rounding boundary."""
    gap = np.abs(codes.astype(np.int64) - spec)
    at_boundary = np.unpackbits(ties, count=spec.size).astype(bool).reshape(spec.shape)
    allowed = (gap == 1) & at_boundary
    return Row(table, case, spec.size, int(allowed.sum()), int(((gap > 0) & ~allowed).sum()))


def steps_off(values: np.ndarray, spec: np.ndarray) -> int:
    """Return how many float16 numbers are more than a step away; 0 has no steps."""
    return int((np.abs(values - spec) > np.spacing(np.abs(spec))).sum())


def mask_at(places: np.ndarray, size: int) -> np.ndarray:
    """Return packed bits that are 1 at `places`, for `compare_codes`."""
    mask = np.zeros(size, bool)
    mask[places] = True
    return np.packbits(mask)


def keys(tensors: Arrays, ending: str = ".codes") -> list[str]:
    return [name.removesuffix(ending) for name in tensors if name.endswith(ending)]


def under(tensors: Arrays, name: str) -> Arrays:
    """Return the tensors called `name.*`, without that prefix."""
    return {n.removeprefix(f"{name}."): x for n, x in tensors.items() if n.startswith(f"{name}.")}


def by_dims(table: str) -> Iterator[tuple[int, Arrays]]:
    """(head dim, its tensors) of each case that has an output."""
    tensors, _ = read_golden(table)
    for dims in keys(tensors, ".out"):
        yield int(dims), under(tensors, dims)


def method_cases(table: str) -> Iterator[tuple[str, int, Arrays]]:
    """(key, head dim, the tensors of the case and those shared by its head dim)."""
    tensors, _ = read_golden(table)
    for key in keys(tensors):
        dims = key.split(".")[0]
        shared = {name: tensors[f"{dims}.{name}"] for name in ("x", "q", "p")}
        yield key, int(dims), shared | under(tensors, key)


# Of mixed bits: moments are too large to be stored.


def mixed_bits_moments(dims: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two second moments [2, D, D] float64 of heads whose directions differ by much."""
    rows = gaussian((2, 2, 4 * dims, dims), seed)
    rows = rows * np.exp(gaussian((2, 1, 1, dims), seed + 50))
    return tuple(x.swapaxes(-1, -2) @ x / x.shape[1] for x in rows)


def mixed_bits_sample(down: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return some numbers of maps [G, D, R] and [G, R, D], float32 [32]."""
    samples = (x.ravel()[np.linspace(0, x.size - 1, 16).astype(int)] for x in (down, up))
    return np.concatenate(list(samples)).astype(np.float32)
