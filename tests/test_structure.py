"""The shape of the code: layers are folders, and imports point down (CONTRIBUTING.md)."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A folder may import from the rows below its own. The last row may import from itself.
LAYERS = """__main__ > cli > chat serve eval bench calibrate doctor run launch > options > loading > calibration
            > generate > patching > catalog > cache > metal > codec > corpora > spec > formats
            > errors console files machine startup torch untrusted"""
# Of the modules of mlxkv/serve, in the same way.
SERVE = """run > http > models > reading > prompts > apis > engine > sampling sessions > request
           > grammar ranks options > refusals"""
FLOOR = {name: -i for i, row in enumerate(LAYERS.split(">")) for name in row.split()}
LOWEST = FLOOR[""] = min(FLOOR.values())  # "": the package itself
FRAMEWORKS = {"mlx", "mlx_lm", "torch", "triton", "transformers"}
NO_FRAMEWORK = {
    "mlxkv.formats",
    "mlxkv.spec",
    "mlxkv.corpora",
    "mlxkv.catalog",
}
# Templates are rendered by transformers in a process of its own.
EXCEPTIONS = {"mlxkv.catalog.rendering"}
USES_MLX_LM = ("loading", "generate", "patching", "serve", "bench", "run", "chat.session")
SHARED = [
    "formats",
    "spec",
    "corpora",
    "catalog",
    "errors",
    "console",
    "files",
    "untrusted",
]
PACKAGES = ("mlxkv", "cuda_track", "experiments")


def under(name: str, *tops: str) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def folder_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.fixture(scope="module")
def trees() -> dict[str, tuple[Path, ast.Module]]:
    """Path and syntax of each module of ours."""
    trees = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return trees


@pytest.fixture(scope="module")
def edges(trees) -> set[tuple[str, str]]:
    """(importer, imported) of modules and frameworks; imports inside functions count, those of types do not."""
    edges = set()
    for name, (_, tree) in trees.items():
        for node in imports(tree):
            targets = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                dotted = [f"{node.module}.{target}" for target in targets]
                targets = [target if target in trees else str(node.module) for target in dotted]
            tops = {target.split(".")[0] for target in targets}
            edges |= {(name, target) for target in {*targets} & trees.keys() | tops & FRAMEWORKS}
    return {(name, other) for name, other in edges if name != other}


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.expr) or is_of_types(child)):
            yield from imports(child)


def is_of_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def test_imports_point_down(edges):
    for name, other in sorted(edges):
        if under(name, "mlxkv") and under(other, "mlxkv") and folder_of(name) != folder_of(other):
            down = FLOOR[folder_of(other)] < FLOOR[folder_of(name)]
            assert down or FLOOR[folder_of(name)] == LOWEST == FLOOR[folder_of(other)], (
                name,
                other,
            )
        assert under(name, "experiments") or not under(other, "experiments"), (name, other)
        up = under(name, "mlxkv") and under(other, "cuda_track")
        assert not up or name == "mlxkv.torch", (name, other)  # its public name
        if under(name, "cuda_track") and under(other, "mlxkv"):
            assert other == "mlxkv" or under(other, *(f"mlxkv.{part}" for part in SHARED)), (
                name,
                other,
            )


def test_imports_point_down_in_the_server(edges):
    floor = {name: -i for i, row in enumerate(SERVE.split(">")) for name in row.split()}
    for name, other in sorted(edges):
        if under(name, "mlxkv.serve") and under(other, "mlxkv.serve") and name.count(".") > 1:
            part, below = name.split(".")[2], other.split(".")[2]
            assert part == below or floor[below] < floor[part], (name, other)


def test_no_circles(edges):
    """Imports inside functions count: a lazy import may keep a framework out, not hide a circle."""
    graph = defaultdict(set)
    for name, other in edges:
        graph[name].add(other)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_frameworks_stay_in_their_folders(edges):
    for name, framework in sorted(edge for edge in edges if edge[1] in FRAMEWORKS):
        allowed = {"torch", "triton", "transformers"} if under(name, "cuda_track") else {"mlx"}
        if under(name, *(f"mlxkv.{part}" for part in USES_MLX_LM)):
            allowed |= {"mlx_lm"}
        if under(name, *NO_FRAMEWORK) or FLOOR.get(folder_of(name), 0) == LOWEST:
            allowed = set()
        assert framework in allowed or name in EXCEPTIONS or under(name, "experiments"), name


def test_help_loads_no_framework(with_torch):
    code = "import sys, time; from mlxkv.cli import main\n"
    code += "for command in ('', 'chat', 'serve', 'run'): main(f'{command} --help'.split())\n"
    code += "print('\\n' + ' '.join([str(time.process_time()), *sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *names = done.stdout.splitlines()[-1].split()
    assert not {name.split(".")[0] for name in names} & (FRAMEWORKS | {"numpy", "matplotlib"})
    assert float(seconds) < 5  # of a processor: 0.5 s on a quiet machine


def test_the_tree_is_true():
    """Links are read by tests/pages."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for line in filter(None, text.split("## Tree", 1)[1].split("```")[1].splitlines()):
        assert (ROOT / line.split()[0]).exists(), line


def test_public_reports_name_tests_that_exist():
    text = (ROOT / "docs/results/reports.md").read_text(encoding="utf-8")
    names = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    assert len(names) > 25 and text.count("tests/") == len(names) + 1
    for file, name in names:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", code, re.MULTILINE), (file, name)
