"""Documentation text of the running Python: help topics and docstrings (PSF licence)."""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_TOO_ODD = re.compile(r"[^\x00-\x7f]")


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return []
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    docs = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [doc for doc in docs if doc and len(doc) > 160]


def _texts() -> Iterator[tuple[str, str]]:
    """Yield (topic, text): help topics, then docstrings under the top module of their file."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(topics):
        yield f"help {name}", topics[name]
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if not {"test", "tests", "site-packages", "idlelib"} & set(path.parts):
            module = path.relative_to(library).with_suffix("").parts[0]
            for text in _docstrings(path):
                yield f"module {module}", text


def python_topics() -> dict[str, list[str]]:
    """Return help topics and longer docstrings of the standard library, ASCII, in a fixed order, by topic: a help
    topic, or a module or package with all its docstrings."""
    topics: dict[str, list[str]] = {}
    for topic, text in _texts():
        if not _TOO_ODD.search(text):
            topics.setdefault(topic, []).append(text.strip())
    return topics
