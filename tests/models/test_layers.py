"""Rules per layer: who is compressed, who is not, and that the reason is said."""

from pathlib import Path

import mlx_lm.models
import pytest
from attention_source import families
from random_models import random_model

from mlxkv.formats.config import CacheConfig
from mlxkv.metal import launch
from mlxkv.models import LayerReport, attach, detach, summarise
from mlxkv.models.catalog.reports import ranges
from mlxkv.models.hooks.probe import LATENTS, REFUSED, REFUSED_BEFORE_0_32, refusal
from mlxkv.models.hooks.rebind import OWN_CODE

OLD = mlx_lm.__version__ < "0.32"
# Families that compute on keys in some configurations only (soft-capping), or pass them on by a helper: the dry
# run decides.
DEPENDS = {"gear", "iquestloopcoder"}
REACHED = {family for family, _ in OWN_CODE}  # whose own code is rebound


def test_the_table_of_refused_families_is_what_the_source_of_mlx_lm_says():
    folder = Path(mlx_lm.models.__path__[0])
    table = {*REFUSED, *LATENTS, *DEPENDS, *REACHED, *(REFUSED_BEFORE_0_32 if OLD else ())}
    present = {family for family in table if (folder / f"{family}.py").exists()}
    assert set(families(folder)) == present


def test_versions_of_mlx_lm_differ_in_what_is_refused():
    assert "gemma3n" in refusal(["mlx_lm.models.gemma3n"], "0.31.3")
    assert refusal(["mlx_lm.models.gemma3n"], "0.32.2") is None
    assert refusal(["elsewhere.gemma2"], "0.32.2") is None


@pytest.fixture
def reports():
    attached = []

    def run(family: str, kv: str | CacheConfig = "naive-int4", **options):
        attached.append(random_model(family))
        return attach(attached[-1], kv, **options)

    yield run
    for model in attached:
        detach(model)


def test_a_line_per_kind_of_layer(reports):
    with launch.using(None):
        found = reports("gemma3_text")
    assert summarise(found) == [
        "layers 0, 2 (sliding window 16): full precision, small by nature",
        "layers 1, 3 (full attention): naive-int4, 4.5 bits per value, plain ops (no GPU here)",
    ]


def test_layers_with_other_bits_share_a_line():
    """`fill-4` gives each layer as many bits as its errors cost; a wider layer has more values."""
    layers = [
        LayerReport(i, "full attention", True, "fill-4", bits, "kernels", True, heads, 64, 64)
        for i, (bits, heads) in enumerate([(2.5, 1), (6.5, 1), (4.0, 4)])
    ]
    assert summarise(layers) == [
        "layers 0-2 (full attention): fill-4, 2.5 to 6.5 bits per value, 4.17 on average, kernels"
    ]


def test_sizes_come_from_a_dry_run(reports):
    wide = reports("deepseek_v2")[0]
    assert (wide.kv_heads, wide.key_dim, wide.value_dim) == (4, 64, 32)
    assert [(r.key_dim, r.compressed) for r in reports("gemma4_text")] == [(0, False), (128, True)]


def test_a_layer_with_two_caches_is_one_report(reports):
    (report, _) = reports("falcon_h1")
    assert report.compressed and report.kind == "state space or linear attention + full attention"


@pytest.mark.parametrize("family", ["llama"])
def test_refused_families_are_named_loudly(reports, family, monkeypatch):
    monkeypatch.setitem(REFUSED, family, "its code is not ours")
    with pytest.warns(UserWarning, match="NOTHING IS COMPRESSED"):
        found = reports(family)
    assert not any(report.compressed for report in found)
    assert summarise(found)[0].startswith(f"NOTHING IS COMPRESSED: {family}: ")
    assert all(report.reason.startswith(f"{family}: ") for report in found)


def test_nothing_to_compress_is_said_loudly_too(reports):
    with pytest.warns(UserWarning, match="no layer of this model"):
        assert summarise(reports("mamba2"))[0].startswith("NOTHING IS COMPRESSED: no layer")


def test_a_head_dim_that_a_preset_cannot_store_is_said(reports):
    with pytest.warns(UserWarning, match="power-of-two"):
        found = attach(random_model("llama", head_dim=80), "hadamard-int4")
    assert "hadamard needs a power-of-two head dim; got 80" in found[0].reason


def test_full_precision_is_quiet(reports):
    assert summarise(reports("llama", "fp16")) == [
        "layers 0-1 (full attention): full precision, as asked for"
    ]
    for family in ("gemma2", "mamba2", "gemma3_text"):
        assert all(line.endswith("as asked for") for line in summarise(reports(family, "fp16")))


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert summarise([LayerReport(3, "full attention", False, "why")])[1].startswith("layer 3 ")
