"""Reads mlx-lm's model files and tells what each does with the keys and values that a cache
returns."""

import ast
from pathlib import Path

ATTENTION = "scaled_dot_product_attention"
READABLE = {"shape", "dtype"}  # what our view has in common with an array


def misuses(source: str) -> list[str]:
    """What the code in `source` does with fetched keys and values other than to pass them on, or to
    return them.

    A file that calls mx.fast attention and never the function that we rebind counts too.
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


def families(folder: Path) -> dict[str, list[str]]:
    """Family (file name) -> misuses, for the families of mlx-lm that have any."""
    skip = {"base", "cache"}
    found = {
        file.stem: misuses(file.read_text())
        for file in folder.glob("*.py")
        if file.stem not in skip
    }
    return {family: list_ for family, list_ in found.items() if list_}


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
