"""The golden rows hold on this machine, planted faults transform them red, and the spec makes the stored tensors."""

import make_golden
import numpy as np
import pytest

from mlxkv.doctor.golden import TABLE as golden
from mlxkv.spec import bounds

FILES = sorted(path.stem for path in bounds.FOLDER.glob("*.safetensors"))
TABLES = {
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
    "peaks",
    "scales",
    "scores",
    "mix",
    "latent",
    "learned",
    "oja",
    "salience",
    "subspace",
}


@pytest.fixture(scope="module")
def rows():
    return [row for _, row in golden.by_set()]


def test_every_row_holds(rows):
    bad = [row for row in rows if not row.ok]
    assert not bad, "\n".join(map(str, bad))


def test_every_table_has_rows_and_codes_are_nearly_all_equal(rows):
    assert {row.table for row in rows} >= TABLES
    codes = [row for row in rows if row.table in ("encode", "seal", "clip")]
    assert sum(row.values for row in codes) > 400_000
    assert sum(row.differ for row in codes) < 1e-4 * sum(row.values for row in codes)


def test_golden_files_are_what_the_spec_makes(subtests):
    """All tables take 12 s, the longest 3 s."""
    for name in FILES:
        with subtests.test(name=name):
            tensors, header = make_golden.made(name)
            stored, found = bounds.read_golden(name)
            hint = "the spec has changed; hint: python tests/support/make_golden.py"
            assert not make_golden.faults(name, tensors, stored), hint
            assert header == {
                key: x for key, x in found.items() if key != "spec_hash"
            }  # of older files


def test_every_table_is_stored():
    assert sorted(make_golden.TABLES) == FILES


def test_off_by_one_is_allowed_at_a_boundary_only():
    spec = np.zeros(1000, np.uint8)
    codes = spec.copy()
    codes[0] = 1
    at = np.packbits(np.arange(1000) == 0)
    assert bounds.compare_codes("t", "c", codes, spec, at).ok
    codes[1] = 1
    assert not bounds.compare_codes("t", "c", codes, spec, at).ok
    codes[1], codes[0] = 0, 2
    assert not bounds.compare_codes("t", "c", codes, spec, at).ok


def test_a_limit_that_is_off_is_wrong_where_codes_agree(monkeypatch):
    encoded = type(golden)._encoded

    def coarser(self, *args):
        code, stored = encoded(self, *args)
        return code, stored | {"scale": stored["scale"] * 1.01}

    monkeypatch.setattr(type(golden), "_encoded", coarser)
    rows = list(golden.clip_rows())
    assert rows and not any(row.ok for row in rows)
