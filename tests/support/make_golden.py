"""Make the golden tensors from the spec, and compare them with the stored ones.

`python tests/support/make_golden.py` writes the tables that the spec no longer makes as stored; the
others keep their file. It also writes the cases that go into the wheel, for `mlxkv doctor` outside of a clone.
"""

import json
import re

import golden.affine
import golden.calibrated
import golden.codebook
import golden.methods
import golden.oja
import numpy as np
from safetensors.numpy import save_file

from mlxkv.spec import affine, bounds, cases

TABLES = {
    **golden.affine.TABLES,
    **golden.calibrated.TABLES,
    **golden.codebook.TABLES,
    **golden.oja.TABLES,
    **golden.methods.TABLES,
}
# BLAS decides the last bits of eigenvectors, and through them codes and scales at rounding boundaries.
EIGEN = ("oscar", "oscar_released", "balanced", "fill_maps")
# What the wheel has of each table, by the start of a tensor's name: every method, at its smallest head dim.
SAMPLE = {
    "attention": r"ratio5",
    "centred": r"16",
    "clip": r"x\.64|64\.(2\.asym\.32\.92|3\.asym\.64\.96)",
    "codebook": r"64",
    "encode": r"x\.64|(srft-int3|channel-int2)\.64",
    "fill_maps": r"[01]\.",
    "latent": r"x\.64|srft-int4\.64",
    "learned": r"rotation",
    "oja": r"16",
    "oscar": r"16",
    "packing": r"64|80\.3",
    "polar_tree": r"64|book|online",
    "scaled": r"32",
    "transforms": r"(srft|hadamard)\.64|srft\.80",
    **{name: next(iter(of.quantizers)).split(".")[0] for name, of in cases.METHODS.items()},
}
ATTENDED = ("centred", "scaled")  # whose queries nothing but attention of the last ones reads
FLIPPED = 0.01  # share of the bits of their `near` masks that may differ


def made(name: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Make the tensors and the header of a table."""
    seed, make, more = TABLES[name]
    header = {"spec_version": str(affine.SPEC_VERSION), "seed": str(golden.affine.SEED), **more}
    return make(np.random.default_rng(seed)), header


def faults(name: str, ours: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> list[str]:
    """Name the tensors of a table that are not as stored.

    Integers, booleans and float16 must be equal; float32 may be a step off, as float64 sums in another
    order are 1e-12 of the largest off. In tables of EIGEN float32 may be 2e-6 of the largest off, float16
    a step, and codes by one where the stored `near` allows it.
    """
    if ours.keys() != stored.keys():
        return sorted(ours.keys() ^ stored.keys())
    return [key for key in stored if not _same(name in EIGEN, key, ours[key], stored)]


def _same(eigen: bool, key: str, x: np.ndarray, stored: dict[str, np.ndarray]) -> bool:
    y = stored[key]
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    if y.dtype == np.float32 or (eigen and y.dtype == np.float16):
        share = 0.0 if y.dtype == np.float16 else 2e-6 if eigen else 1e-12
        within = np.spacing(np.abs(y)).astype(np.float64) + share * np.abs(y).max()
        return bool((np.abs(x.astype(np.float64) - y) <= within).all())
    if eigen and key.endswith(".near"):
        return np.unpackbits(x ^ y).mean() <= FLIPPED
    if eigen and key.endswith(".codes"):
        near = stored[f"{key.removesuffix('.codes')}.near"]
        return bounds.compare_codes("", key, x, y, near).ok
    return np.array_equal(x, y)


def sample() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors of the cases in SAMPLE, as TABLE/NAME, and the header of each table."""
    tensors, headers = {}, {}
    for name, pattern in SAMPLE.items():
        stored, header = bounds.read_golden(name, sample=False)
        chosen = {key: x for key, x in stored.items() if re.match(pattern, key)}
        if name in ATTENDED:  # a sample has them alone
            for key in [key for key in chosen if key.endswith(".q")]:
                last = chosen[f"{key.removesuffix('.q')}.out"].shape[2]
                chosen[key] = np.ascontiguousarray(chosen[key][:, :, -last:])
        if "cases" in header:
            cases = json.loads(header["cases"])
            header["cases"] = json.dumps(
                {key: x for key, x in cases.items() if f"{key}.q" in chosen}
            )
        headers[name] = json.dumps(header)
        tensors |= {f"{name}/{key}": x for key, x in chosen.items()}
    return tensors, headers


def main() -> None:
    for name in TABLES:
        path = bounds.FOLDER / f"{name}.safetensors"
        tensors, header = made(name)
        stored = bounds.read_golden(name)[0] if path.exists() else {}
        changed = faults(name, tensors, stored)
        if changed:
            save_file(tensors, path, header)
        said = f"written, {len(changed)} tensors changed" if changed else "as the spec makes it"
        print(f"{path.name:24} {path.stat().st_size:>9,} bytes, {said}")
    tensors, headers = sample()
    save_file(tensors, bounds.SAMPLE, headers)
    print(
        f"{bounds.SAMPLE.name:24} {bounds.SAMPLE.stat().st_size:>9,} bytes, the cases of the wheel"
    )


if __name__ == "__main__":
    main()
