"""How the work of a kernel is shared out."""

from mlxkv.metal.lengths import Splits


def test_each_run_has_threadgroups_by_its_share():
    assert Splits.of_runs((8, 2), (100,)) == Splits(8, 2, 8)
    assert Splits.of_runs((8, 2), (75, 25)) == Splits(8, 2, 6)
    assert (
        Splits.of_runs((8, 1), (1, 999)).first == 1 and Splits.of_runs((8, 1), (999, 1)).first == 7
    )
    one_each = Splits.of_runs((1, 1), (5, 5))
    assert (one_each.pages, one_each.first, one_each.total) == (2, 1, 3)
