"""Measure the shape of the code: `python -m experiments.structure [ROOT]`.

Prints counts of imports, circles and lines in ROOT, a checkout of this repository, by default this one; and
the calls of a decode step of the version that runs.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from experiments.fixtures import TINY
from experiments.options import Parser
from mlxkv import console
from mlxkv.errors import UserError

PACKAGES = ("mlxkv", "cuda_track", "experiments")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_edges(root: Path, others: frozenset | set = frozenset()) -> tuple[set, set]:
    """Edges (importer, imported) of modules: all, and those made inside a function.

    others: top-level packages of other projects whose imports count, too.
    """
    files = {
        module_name(path, root): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    edges, lazy = set(), set()

    def visit(node, name, inside):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                targets.append(dotted if dotted in files else node.module)
        for target in targets:
            if target.split(".")[0] in others:
                edges.add((name, target.split(".")[0]))
            if target in files and target != name:
                edges.add((name, target))
                if inside:
                    lazy.add((name, target))
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, name, deeper)

    for name, path in files.items():
        visit(ast.parse(path.read_text(encoding="utf-8")), name, False)
    return edges, lazy


def circles(edges: set) -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan, 1972)."""
    followers = defaultdict(list)
    for start, end in sorted(edges):
        followers[start].append(end)
    index, low, stack, groups = {}, {}, [], []
    sys.setrecursionlimit(10000)

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for follower in followers[node]:
            if follower not in index:
                visit(follower)
                low[node] = min(low[node], low[follower])
            elif follower in stack:
                low[node] = min(low[node], index[follower])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(set(followers) | {end for _, end in edges}):
        if node not in index:
            visit(node)
    return groups


def step_calls(layout: str = "int4") -> dict[str, tuple[float, float]]:
    """Count Python calls and changes of module of a decode step and of one that seals.

    Counts calls of functions of this repository by plain ops in the embedded model, per layer that
    is compressed. A change of module is a call into another file than the call before it.
    """
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    import mlxkv.models
    from mlxkv.models import load

    home = str(Path(mlxkv.models.__file__).parents[1])
    model = load(TINY, "fp16").model
    reports = mlxkv.models.attach(model, layout)
    layers = sum(report.compressed for report in reports)
    cache = model.make_cache()
    model(mx.arange(1, 200)[None], cache=cache)
    files, steps = [], []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            files.append(frame.f_code.co_filename)

    for _ in range(140):
        files.clear()
        sys.setprofile(profile)
        out = model(mx.array([[5]]), cache=cache)
        sys.setprofile(None)
        mx.eval(out)
        steps.append((len(files), sum(a != b for a, b in zip(files, files[1:], strict=False))))
    steps.sort()
    chosen_steps = {"plain step": steps[len(steps) // 2], "sealing step": steps[-1]}
    return {
        name: (calls / layers, changes / layers) for name, (calls, changes) in chosen_steps.items()
    }


def lines(root: Path) -> dict[str, int]:
    return {
        package: sum(
            len(path.read_text(encoding="utf-8").splitlines())
            for path in (root / package).rglob("*.py")
        )
        for package in PACKAGES
    }


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("structure", __doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    root = parser.parse_args(arguments).root.resolve()
    if not (root / "mlxkv" / "__init__.py").is_file():
        raise UserError(f"[structure] no checkout of mlxkv; got {root}")
    edges, lazy = import_edges(root)
    groups = circles(edges)
    inside = {edge for edge in edges for group in groups if set(edge) <= set(group)}
    print(f"modules {len({m for e in edges for m in e})}, imports {len(edges)}")
    print(f"circles {len(groups)}: {groups}")
    print(f"lazy imports {len(lazy)}, that hide a circle {len(lazy & inside)}")
    count = lines(root)
    print(f"lines {sum(count.values())}: {count}")
    for kind, (calls, changes) in step_calls().items():
        print(f"{kind}: {calls:.1f} calls, {changes:.1f} changes of module, per layer")


if __name__ == "__main__":
    console.run_tool(main)
