"""The golden table on this machine, and proof that it bites."""

import numpy as np
import pytest
from make_golden import spec_hash

from mlxkv import bounds, golden, packing, rotation
from mlxkv.golden import tile
from mlxkv.quantizers import affine

FILES = sorted(path.stem for path in bounds.FOLDER.glob("*.safetensors"))


@pytest.fixture(scope="module")
def rows():
    return golden.run()


def test_every_row_holds(rows):
    bad = [row for row in rows if not row.ok]
    assert not bad, "\n".join(map(str, bad))


def test_every_file_is_read_and_codes_are_nearly_all_equal(rows):
    of_affine = {"affine", "attention", "clip", "encode", "oscar", "packing", "transforms"}
    assert set(FILES) == of_affine | {"balanced", "codebook", "dual_scale"} | {
        *("learned", "oja", "polar", "polar_tree")
    }
    assert {row.table for row in rows} >= {
        "transforms",
        "packing",
        "encode",
        "decode",
        "seal",
        "clip",
        "moments",
        "rotations",
        "levels",
        "codebook",
        "polar-tree",
        "balances",
        "balance",
        "scores",
        "mix",
        "learned",
        "oja",
        "salience",
        "subspace",
    }
    codes = [row for row in rows if row.table in ("encode", "seal", "clip")]
    assert sum(row.values for row in codes) > 400_000
    assert sum(row.differ for row in codes) < 1e-4 * sum(row.values for row in codes)


@pytest.mark.parametrize("name", FILES)
def test_golden_files_are_of_this_spec(name):
    _, header = golden.read(name)
    hint = "the spec has changed; hint: python tests/make_golden.py"
    assert header["spec_hash"] == spec_hash(name), hint


def test_golden_files_are_small():
    assert sum(path.stat().st_size for path in bounds.FOLDER.glob("*.safetensors")) < 4_300_000


def test_a_shuffled_code_is_red(monkeypatch):
    unpack = packing.unpack
    monkeypatch.setattr(packing, "unpack", lambda w, bits, dims: unpack(w, bits, dims)[..., ::-1])
    rows = list(golden.encode_rows())
    assert rows
    assert not any(row.ok for row in rows)


def test_a_scale_off_by_a_thousandth_is_red(monkeypatch):
    stored = golden._stored

    def off(*args):
        out = stored(*args)
        return {**out, "scale": (out["scale"].astype(golden.mx.float32) * 1.001)}

    monkeypatch.setattr(golden, "_stored", off)
    assert not any(row.ok for row in golden.affine_rows() if row.table == "decode")
    assert not any(row.ok for row in golden.attention_rows())


@pytest.mark.parametrize("step", (-1, 1))
def test_a_limit_one_entry_off_is_red(monkeypatch, step):
    limit = affine.clip_rows
    monkeypatch.setattr(affine, "clip_rows", lambda x, rank: limit(x, rank + step))
    rows = list(golden.clip_rows())
    assert rows
    assert not any(row.ok for row in rows)


def test_nan_is_red():
    assert golden.rms(np.array([np.nan, 1.0]), np.ones(2)) == float("inf")


def test_off_by_one_is_allowed_at_a_boundary_only():
    spec = np.zeros(1000, np.uint8)
    codes = spec.copy()
    codes[0] = 1
    at = np.packbits(np.arange(1000) == 0)
    assert golden.compare_codes("t", "c", codes, spec, at).ok
    codes[1] = 1
    assert not golden.compare_codes("t", "c", codes, spec, at).ok
    codes[1], codes[0] = 0, 2
    assert not golden.compare_codes("t", "c", codes, spec, at).ok


def test_a_rotation_without_its_order_is_red(monkeypatch):
    monkeypatch.setattr(
        rotation,
        "ordered",
        lambda dims: rotation.hadamard(dims) if dims in (64, 128) else np.eye(dims),
    )
    assert not any(row.ok for row in golden.oscar_rows() if row.table == "rotations")


def test_moments_of_the_wrong_rows_are_red(monkeypatch):
    moment = golden.second_moment
    monkeypatch.setattr(
        golden, "second_moment", lambda x, heads: moment(x[..., ::-1, :], heads)[..., ::-1]
    )
    assert not any(row.ok for row in golden.oscar_rows() if row.table == "moments")


def test_a_floor_elsewhere_is_red(monkeypatch):
    monkeypatch.setattr(tile.dual_scale, "LOG_RANGE", (-10.0, 10.0))
    rows = [row for row in tile.dual_scale_rows() if row.table == "balance"]
    assert rows
    assert not all(row.ok for row in rows)


def test_pairs_of_neighbours_are_red(monkeypatch):
    monkeypatch.setattr(tile.polar, "_halves", lambda x: [x[..., ::2], x[..., 1::2]])
    rows = list(tile.polar_rows())
    assert not any(row.ok for row in rows if row.table == "encode")


def test_the_lower_end_of_a_step_is_red(monkeypatch):
    angles = tile.polar._angles
    monkeypatch.setattr(tile.polar, "_angles", lambda stored, codes: angles(stored, codes - 0.5))
    assert not any(row.ok for row in tile.polar_rows() if row.table in ("decode", "scores", "mix"))
