"""The table of mlx-vlm's families: a dozen of them, and the page."""

import pytest

pytest.importorskip("mlx_vlm")

from experiments.families import found as survey  # noqa: E402
from experiments.families import vlm  # noqa: E402
from experiments.families.found import Family  # noqa: E402
from experiments.families.vlm import SURVEY, families, family  # noqa: E402
from mlxkv.errors import UserError  # noqa: E402

FULL = ["qwen3", "qwen2_5_vl", "smollm3"]
MIXED = ["gemma4", "gpt_oss", "qwen3_5", "falcon_h1", "deepseek_v3"]


@pytest.mark.slow
def test_the_text_is_that_of_plain_caches(subtests):
    """On pages that lose nothing."""
    for name in FULL + MIXED:
        with subtests.test(name=name):
            found = family(name)
            assert not found.fault and not found.skipped
            assert found.exact < survey.NEAR and found.int4
            assert len(found.compressed) == len(found.layers) if name in FULL else found.compressed


def test_what_is_not_compressed_runs_with_a_reason(subtests):
    for name in ["gemma2", "mamba2"]:
        with subtests.test(name=name):
            found = family(name)
            assert not found.fault and not found.skipped and not found.int4
            assert not found.compressed and found.why


def test_names_are_those_of_mlx_vlm():
    assert len(families()) > 150
    with pytest.raises(UserError, match="no family 'lama'"):
        vlm.main(["lama"])


def test_the_page_counts():
    skipped, plain = Family("a", skipped="no | language model"), Family("b")
    text = SURVEY.page([skipped, plain], "command")
    assert (
        "2 families: 1 built and compared, 0 of them with compressed layers, 1 run as they are"
        in text
    )
    assert "| a | no / language model |" in text
