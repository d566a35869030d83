"""Which families run on compressed caches: a few of each library, and the page."""

import os
import time

import pytest

from experiments.families import __main__ as table
from experiments.families import found
from experiments.families import mlx as mlx_table
from experiments.families.building import NOT_BUILT, families
from experiments.families.found import Family, apart
from mlxkv.catalog.reports import LayerReport
from mlxkv.errors import MachineError, UserError


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(found, "apart", lambda measure, names: map(measure, names))


@pytest.mark.slow
def test_families_of_transformers(in_process, capsys):
    table.main(["bamba", "deepseek_v3", "llama", "xlnet"])
    text = capsys.readouterr().out
    assert "4 families: 4 built and compared" in text and "0 with a fault" in text
    assert "| llama | LlamaForCausalLM | 0-3 of 4 | - | yes | yes |" in text
    assert "| deepseek_v3 | DeepseekV3ForCausalLM | 0-3 of 4 | - | yes | yes |" in text


@pytest.mark.slow
def test_model_files_of_mlx_lm(in_process, capsys):
    mlx_table.main(["gemma2", "mamba2", "stablelm", "olmo"])
    out = capsys.readouterr().out
    assert "4 files: 3 built and compared, 2 of them with compressed layers, 1 with none" in out
    assert "| gemma2 | 0-3 of 4 | - | yes | yes |" in out and "| olmo | asks for a package" in out


@pytest.mark.slow
def test_families_of_mlx_vlm(subtests):
    pytest.importorskip("mlx_vlm")
    from experiments.families import vlm

    assert len(vlm.families()) > 150
    for name, compressed in {"qwen3": "all", "gemma4": "some", "mamba2": "none"}.items():
        with subtests.test(name=name):
            family = vlm.family(name)
            assert not family.fault and not family.skipped and family.exact < found.NEAR
            assert family.int4 == bool(family.compressed) == (compressed != "none")
            assert bool(family.why) == (compressed != "all")


def test_a_fault_is_shown_and_ends_with_an_error(monkeypatch, capsys):
    layer = LayerReport(0, "full", False, "a | reason")
    bad = Family("llama", "X", "", (layer,), fault="bad")
    monkeypatch.setattr(found, "apart", lambda measure, names: [bad for _ in names])
    with pytest.raises(MachineError, match="1 of 1 have a fault: llama"):
        table.main(["llama"])
    out = capsys.readouterr().out
    assert (
        "| llama | X | - | 0 (full: a / reason) | **bad** |  |" in out and "1 with a fault" in out
    )


def test_every_model_file_of_mlx_lm_is_tried_or_says_why():
    files = set(mlx_table.families())
    assert {"llama", "gemma2", "lille-130m"} <= files and not {"base", "cache", "mla"} & files
    assert set(mlx_table.NOT_BUILT) | set(mlx_table.OWN) | set(mlx_table.TEXT) <= files


def test_a_family_that_hangs_or_dies_is_a_fault():
    assert [family.fault for family in apart(time.sleep, [60], 0.2)] == ["more than 0.2 s"]
    assert [family.fault for family in apart(os._exit, [3, 3], 60)] == 2 * ["the process died"]


def test_names_are_those_of_transformers():
    assert len(families()) > 150 and "llama" not in NOT_BUILT
    with pytest.raises(UserError, match="no family 'lama'"):
        table.main(["lama"])
