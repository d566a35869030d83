"""Read which module imports which, and find circles."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

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
