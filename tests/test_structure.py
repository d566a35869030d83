"""The shape of the code: layers are folders, and imports point down (CONTRIBUTING.md)."""

import ast
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from experiments.pages.reference import walk
from mlxkv.cli import app, is_option

ROOT = Path(__file__).parents[1]
# A room may import from the rows below its own. The last row may import from itself.
LAYERS = """__main__ > cli > chat serve eval bench calibrate doctor run > options > models > cache > metal > codec
            > corpora > spec > formats > blas errors console files machine startup torch untrusted"""
FLOOR = {room: -i for i, rooms in enumerate(LAYERS.split(">")) for room in rooms.split()}
LOWEST = FLOOR[""] = min(FLOOR.values())  # "": the package itself
FRAMEWORKS = {"mlx", "mlx_lm", "torch", "triton", "transformers"}
NO_FRAMEWORK = {
    "mlxkv.formats",
    "mlxkv.spec",
    "mlxkv.corpora",
    "mlxkv.models.catalog",
    "mlxkv.models.reports",
}
# Templates are rendered by transformers in a process of its own.
EXCEPTIONS = {"mlxkv.models.catalog.rendering"}
USES_MLX_LM = ("models", "serve", "bench", "chat.session")
SHARED = [
    "formats",
    "spec",
    "corpora",
    "models.catalog",
    "models.reports",
    "metal.sources",
    "errors",
    "console",
    "files",
    "untrusted",
]
PACKAGES = ("mlxkv", "cuda_track", "experiments")
# Pronouns, participles and adverbs say nothing as names: how many a room may still have, in percent of its names.
VAGUE = """one own found told asked held rest more what it there beside left kept given known said made done taken
    wanted whole each other others some both every same here where who whose why how then than this these those seen
    got had been gone came went sent shown written missing needed much many most least less few several again away
    back before after behind below above near far already now together apart instead rather him her them they its
    their ours theirs mine begun broken built called chosen counted drawn ended fallen followed forgotten grown hidden
    led lent lost met meant opened owed passed picked played quoted raised ran refused spent spoken stayed stood stopped
    taught thrown torn tried used waited won"""
VAGUE_SHARE = {
    "cuda_track": 0.8,
    "metal": 1,
    "models": 1,
    "bench": 2.3,
    "calibrate": 0,
    "serve": 5,
    "cache": 1,
    "codec": 1,
    "formats": 1,
    "spec": 1,
    "mlxkv": 8.7,
}


def under(name: str, *tops: str) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def room(name: str) -> str:
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
        if under(name, "mlxkv") and under(other, "mlxkv") and room(name) != room(other):
            down = FLOOR[room(other)] < FLOOR[room(name)]
            assert down or FLOOR[room(name)] == LOWEST == FLOOR[room(other)], (name, other)
        assert under(name, "experiments") or not under(other, "experiments"), (name, other)
        up = under(name, "mlxkv") and under(other, "cuda_track")
        assert not up or name == "mlxkv.torch", (name, other)  # its public name
        if under(name, "cuda_track") and under(other, "mlxkv"):
            assert other == "mlxkv" or under(other, *(f"mlxkv.{part}" for part in SHARED)), (
                name,
                other,
            )


def test_no_circles(edges):
    """Imports inside functions count: a lazy import may keep a framework out, not hide a circle."""
    graph = defaultdict(set)
    for name, other in edges:
        graph[name].add(other)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_frameworks_stay_in_their_rooms(edges):
    for name, framework in sorted(edge for edge in edges if edge[1] in FRAMEWORKS):
        allowed = {"torch", "triton", "transformers"} if under(name, "cuda_track") else {"mlx"}
        if under(name, *(f"mlxkv.{part}" for part in USES_MLX_LM)):
            allowed |= {"mlx_lm"}
        if under(name, *NO_FRAMEWORK) or FLOOR.get(room(name), 0) == LOWEST:
            allowed = set()
        assert framework in allowed or name in EXCEPTIONS or under(name, "experiments"), name


def test_help_loads_no_framework(subtests, with_torch):
    for command in ("", "chat", "serve", "run"):
        with subtests.test(command=command):
            code = f"import sys; from mlxkv.cli import main; main('{command} --help'.split())"
            code += "; print('\\n' + ' '.join(sys.modules))"
            start = seconds_of_children()
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
            loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
            assert not loaded & (FRAMEWORKS | {"numpy", "matplotlib"})
            assert seconds_of_children() - start < 5  # of a processor: 0.3 s on a quiet machine


def seconds_of_children() -> float:
    """Return the processor time of all processes that have ended; the machine may be busy with others."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_folders_and_files_have_one_subject():
    files = [path for top in ("mlxkv", "cuda_track", "tests") for path in (ROOT / top).rglob("*.*")]
    code = [path for path in files if path.suffix in (".py", ".metal", ".h", ".js")]
    for path in code:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 700, path
    for folder in {
        path.parent for path in code if path.suffix == ".py" and "tests" not in path.parts
    }:
        assert len([path for path in folder.glob("*.py") if path.stem != "__init__"]) <= 13, folder
        assert (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""'), folder


def test_no_more_options_than_that():
    """A bound only falls."""
    commands = walk(get_command(app), "mlxkv")
    assert sum(is_option(param) for _, command in commands for param in command.params) <= 100


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


def test_docstrings_of_functions_begin_with_a_verb_or_a_noun(trees):
    odd = re.compile(r"(?:What|Whether|Which|Why|How|Where|Whose|Who|Of|Those)\b")
    found = []
    for module, (_, tree) in trees.items():
        for node in ast.walk(tree) if under(module, "mlxkv", "cuda_track") else ():
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and odd.match((ast.get_docstring(node) or "").strip()):
                found.append(f"{module}.{node.name}")
    assert found == []


def test_names_are_nouns_or_verbs(trees):
    """A bound only falls."""
    words, names, vague = set(VAGUE.split()), {}, {}
    for module, (file, tree) in trees.items():
        top, place, *_ = file.relative_to(ROOT).parts
        place = top if top == "cuda_track" or place.endswith(".py") else place
        for node in ast.walk(tree) if under(module, "mlxkv", "cuda_track") else ():
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    pass
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    pass
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case _:
                    continue
            names[place] = names.get(place, 0) + 1
            vague[place] = vague.get(place, 0) + (name.strip("_") in words)
    shares = {place: 100 * vague[place] / names[place] for place in names}
    assert {p: s for p, s in shares.items() if s > VAGUE_SHARE.get(p, 4.9)} == {}


def test_names_of_our_modules_exist(trees, with_torch):
    """Of every `module.name` in mlxkv and cuda_track whose module is imported at the top of a file."""
    for path, tree in (trees[name] for name in trees if under(name, "mlxkv", "cuda_track")):
        modules = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and under(str(node.module), "mlxkv", "cuda_track"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    if name in trees and trees[name][0].stem != "__init__":
                        modules[alias.asname or alias.name] = import_module(name)
        nodes = list(ast.walk(tree))
        bound = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        bound |= {x.arg for x in nodes if isinstance(x, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = node.value.id
                if module in modules and module not in bound:
                    assert hasattr(modules[module], node.attr), (path, node.lineno, node.attr)
