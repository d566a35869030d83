"""Rules per layer: who is compressed, who is not, and that the reason is said."""

import ast
import json
import pickle
from dataclasses import replace
from pathlib import Path

import mlx_lm.models
import pytest
from on_emulator import make_tiles
from random_models import random_model

from mlxkv.cache.backends import OpsBackend
from mlxkv.cache.choose import FAILED, KernelPlan
from mlxkv.catalog.reports import LayerReport, ranges, summarise
from mlxkv.formats.config import CacheConfig
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.warmup import not_used
from mlxkv.metal import launch
from mlxkv.metal.launch import OFF
from mlxkv.patching.patch import OWN_CODE
from mlxkv.patching.probe import LATENTS, REFUSED, REFUSED_BEFORE_0_32, refusal

OLD = mlx_lm.__version__ < "0.32"
# Families that compute on keys in some configurations only (soft-capping), or pass them on by a helper: the dry
# run decides.
DEPENDS = {"gear", "iquestloopcoder"}
REACHED = {family for family, _ in OWN_CODE}  # whose own code is rebound


def test_the_table_of_refused_families_is_what_the_source_of_mlx_lm_says():
    folder = Path(mlx_lm.models.__path__[0])
    table = {*REFUSED, *LATENTS, *DEPENDS, *REACHED, *(REFUSED_BEFORE_0_32 if OLD else ())}
    present = {family for family in table if (folder / f"{family}.py").exists()}
    files = [file for file in folder.glob("*.py") if file.stem not in ("base", "cache")]
    assert {file.stem for file in files if misuses(file.read_text())} == present


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


def test_a_report_carries_the_plan_that_its_text_is_made_of(reports):
    """What is done about a plan follows from its fields, whatever its reason says."""
    with launch.using(None):
        plain, compressed = reports("gemma3_text")[:2]
    assert plain.plan is None and plain.kernel == "mx.fast"
    assert (compressed.plan.by_kernels, compressed.plan.reason) == (False, "no GPU here")
    data = compressed.as_dict()
    assert pickle.loads(pickle.dumps(compressed)) == compressed
    assert "plan" not in data and json.loads(json.dumps(data))["kernel"] == compressed.kernel
    names_all = KernelPlan(OpsBackend(make_tiles), f"{OFF}, tile kernels, {FAILED}")
    with launch.using(make_tiles):
        line, loud = not_used([replace(compressed, plan=names_all)])
        assert not loud and "no kernel reads this format" in line
        assert not_used([replace(compressed, plan=replace(names_all, failed=True))])[1]


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


# -- mlx-lm's model files: what each does with the keys and values that a cache returns

ATTENTION = "scaled_dot_product_attention"
READABLE = {"shape", "dtype"}  # what our view has in common with an array


def misuses(source: str) -> list[str]:
    """What the code in `source` does with fetched keys and values other than to pass them on, or to
    return them.

    A file that calls mx.fast attention and never the function that we patch counts too.
    """
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(map(_is_fetch, ast.walk(node))):
            flow = _Flow()
            flow.block(node.body, frozenset())
            found += flow.found
        if _takes_from_other_cache(node):
            found.append(f"line {node.lineno}: keys and values out of a cache's .state")
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    fast = any(isinstance(f, ast.Attribute) and f.attr == ATTENTION for f in calls)
    ours = any(isinstance(f, ast.Name) and f.id == ATTENTION for f in calls)
    if fast and not ours:
        found.append("calls mx.fast attention")
    return found


def _is_fetch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update_and_fetch"


def _takes_from_other_cache(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "state"
    )


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _only_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Tuple) and all(isinstance(x, ast.Name) for x in node.elts)
    )


def _cast(node: ast.AST) -> ast.AST:
    """`x` of `x.astype(...)`, which our view answers with itself."""
    is_cast = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "astype"
    return node.func.value if is_cast else node


class _Flow:
    """Follows the names that hold fetched keys and values through one function, statement by
    statement."""

    def __init__(self):
        self.found: list[str] = []

    def block(self, statements: list[ast.stmt], held: frozenset[str]) -> frozenset[str]:
        for statement in statements:
            held = self.statement(statement, held)
        return held

    def statement(self, node: ast.stmt, held: frozenset[str]) -> frozenset[str]:
        if isinstance(node, ast.Assign):
            targets = frozenset().union(*map(_names, node.targets))
            if _is_fetch(node.value):
                return held | targets
            value = _cast(node.value)
            if _only_names(value) and _names(value) & held:
                return held | targets
            self.use(node.value, held)
            return held - targets if all(map(_only_names, node.targets)) else held
        if isinstance(node, ast.If):
            self.use(node.test, held)
            return self.block(node.body, held) | self.block(node.orelse, held)
        if isinstance(node, (ast.For, ast.While, ast.With)):
            return held | self.block(node.body, held)
        if isinstance(node, ast.Return) and node.value is not None:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for part in parts:
                if not _only_names(part):
                    self.use(part, held)
            return held
        for child in ast.iter_child_nodes(node):
            self.use(child, held)
        return held

    def use(self, node: ast.AST, held: frozenset[str]) -> None:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == ATTENTION:
            arguments = [*node.args, *(k.value for k in node.keywords)]
            for argument in arguments:
                if not isinstance(argument, ast.Name):
                    self.use(argument, held)
        elif isinstance(node, ast.Attribute) and _only_names(node.value) and node.attr in READABLE:
            pass
        elif isinstance(node, ast.Name):
            if node.id in held:
                self.found.append(f"line {node.lineno}: {node.id}")
        else:
            for child in ast.iter_child_nodes(node):
                self.use(child, held)
