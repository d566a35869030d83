"""Choose the texts of evaluation and of calibration, which never overlap: passages of the corpus, and the
documentation of the running Python. Neither reads `docstrings`, `code` and `records`, which a choice of bits is made
on (`mlxkv.loading.agreement`)."""

from __future__ import annotations

import ast
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html.entities import html5
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from mlxkv.corpora import corpus
from mlxkv.errors import UserError

CALIBRATES = 4  # one in this many topics of Python's documentation is for calibration
PARAGRAPH = 80  # characters; a paragraph at least this long in two topics counts as shared text
PART = 1 << 16  # characters to encode at once, so that long files are read only as far as needed
BETWEEN = "\n\n"
LETTERS = ("a", "A", "0")  # texts, to see what a tokenizer puts before one
TEXTS = (".txt", ".md")  # files of a folder of texts
_EMPTY_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Text:
    """A text in tokens. name: of the source, printed with results. tokens: ids, [T]."""

    name: str
    tokens: list[int]


def start_of(loaded) -> list[int]:
    """Return the tokens that the model's tokenizer puts before every text: a BOS token, others, or none. loaded: a
    `mlxkv.Loaded`, or what else has a tokenizer."""
    for letter in LETTERS:
        whole = list(loaded.tokenizer.encode(letter))
        if plain := list(loaded.tokenizer.encode(letter, add_special_tokens=False)):
            ends = range(len(whole) - len(plain) + 1)
            return next((whole[:i] for i in ends if whole[i : i + len(plain)] == plain), [])
    return []


def evaluation_tokens(loaded, count: int, files: Sequence[Path] = ()) -> Text:
    """Return `count` tokens of the user's `files` (UTF-8, joined in order), or of built-in text.

    loaded: a `mlxkv.Loaded`, for its tokenizer. Built-in text is the corpus, then the documentation of the
    running Python. What the tokenizer puts before every text comes first (`start_of`).

    Raises UserError if a file cannot be read or if there are fewer than `count` tokens.
    """
    if count < 1:
        raise UserError(f"[text] at least 1 token is needed; got {count}")
    if files:
        files = expanded(files)
        name = ", ".join(Path(file).name for file in files)
        text = BETWEEN.join(_read(Path(file)) for file in files)
        return Text(name, _take(loaded, _parts(text), count, name))
    used = ["corpus evaluation"]

    def built_in() -> Iterator[str]:
        for piece in corpus.interleaved("evaluation"):
            yield piece + BETWEEN
        # Reading the documentation takes seconds, so only read it if the corpus is too short.
        used.append(f"pydoc {platform.python_version()}")
        yield from _documentation()

    tokens = _take(loaded, built_in(), count, "the built-in text")
    return Text(" + ".join(used), tokens)


def evaluation_texts(loaded, count: int, limit: int, files: Sequence[Path] = ()) -> list[Text]:
    """Return up to `limit` disjoint texts of `count` tokens each; fewer if the source is too short, but at
    least one.

    files: the user's files, and folders of .txt and .md files: texts are stretches of each in turn. Files that are too
    short are skipped, or joined if all are. Without files, each text is one kind of the corpus, continued with Python's
    documentation.

    Raises UserError as `evaluation_tokens` does.
    """
    if limit < 1:
        raise UserError(f"[--samples] at least 1 text is needed; got {limit}")
    if files:
        return _stretches(loaded, count, limit, expanded(files))
    kinds = list(corpus.passages("evaluation").items())
    further = _documentation()
    out: list[Text] = []
    for at in range(limit):
        kind, text = kinds[at] if at < len(kinds) else ("pydoc", "")
        try:
            out.append(Text(kind, _take(loaded, chain([text + BETWEEN], further), count, kind)))
        except UserError:  # the documentation is read to its end
            break
    return out or [evaluation_tokens(loaded, count)]


def _documentation() -> Iterator[str]:
    """Yield evaluation's topics. Lazy, because reading them takes seconds."""
    for text in documentation("evaluation"):
        yield text + BETWEEN


def expanded(files: Sequence[Path]) -> list[Path]:
    """Replace folders by their .txt and .md files, sorted by name. Raises UserError."""
    out: list[Path] = []
    for path in map(Path, files):
        found = sorted(f for f in path.iterdir() if f.suffix in TEXTS) if path.is_dir() else [path]
        if not found:
            raise UserError(f"[text] no {' or '.join(TEXTS)} file in this folder; got {path}")
        out += found
    return out


def _stretches(loaded, count: int, limit: int, files: list[Path]) -> list[Text]:
    """Return the first stretch of each file, then the second of each, and so on."""
    start = start_of(loaded)
    size, rounds = count - len(start), -(-limit // len(files))
    by_file = []
    for file in files:
        tokens = _encode(loaded, _read(file), size * rounds) if size else []
        by_file.append(
            [tokens[i : i + size] for i in range(0, len(tokens), size)] if size else [[]]
        )
    out = [
        Text(file.name if not turn else f"{file.name}, part {turn + 1}", [*start, *stretches[turn]])
        for turn in range(rounds)
        for file, stretches in zip(files, by_file, strict=True)
        if turn < len(stretches) and len(stretches[turn]) == size
    ]
    return out[:limit] or [evaluation_tokens(loaded, count, files)]


def check_sources(files: Sequence[Path]) -> None:
    """Raise UserError for the first of the user's files that cannot be read."""
    for file in expanded(files):
        _read(Path(file))


def calibration_text() -> str:
    """Return the corpus's calibration split, then the topics of Python's documentation that
    evaluation never reads. The most varied text is first, so that any prefix is a mix."""
    return BETWEEN.join([*corpus.interleaved("calibration"), *documentation("calibration")])


def calibration_tokens(loaded, count: int, files: Sequence[Path] = ()) -> Text:
    """Return at most `count` tokens of the user's `files`, or without files of `calibration_text`, which no
    evaluation reads.

    No BOS is added. Raises UserError if a file cannot be read.
    """
    if count < 1:
        raise UserError(f"[--tokens] at least 1 token is needed; got {count}")
    if files:
        name, text = ", ".join(f.name for f in files), BETWEEN.join(_read(f) for f in files)
    else:
        name, text = "corpus calibration", BETWEEN.join(corpus.interleaved("calibration"))
    tokens = _encode(loaded, text, count)
    if not files and len(tokens) < count:
        text = calibration_text()
        name, tokens = f"{name} + pydoc {platform.python_version()}", _encode(loaded, text, count)
    return Text(name, tokens)


def _encode(loaded, text: str, count: int) -> list[int]:
    """Return the first `count` tokens of a text, or all of them."""
    tokens: list[int] = []
    for part in _parts(text):
        tokens += loaded.tokenizer.encode(part, add_special_tokens=False)
        if len(tokens) >= count:
            break
    return tokens[:count]


def documentation(split: str) -> list[str]:
    """Return the texts of the running Python that belong to a split, topic after topic.

    A topic's hash determines its split and position, so the order mixes subjects. Some topics quote others: topics that
    share a paragraph with evaluation are excluded from calibration.
    """
    topics = python_topics()
    order = sorted(topics, key=_hash)
    evaluation = [name for name in order if in_evaluation(name)]
    if split == "evaluation":
        return [text for name in evaluation for text in topics[name]]
    paragraphs = set().union(*(_paragraphs(topics[name]) for name in evaluation))
    return [
        text
        for name in order
        if not in_evaluation(name) and not _paragraphs(topics[name]) & paragraphs
        for text in topics[name]
    ]


def in_evaluation(topic: str) -> bool:
    """Return whether a topic of Python's documentation belongs to evaluation, not calibration."""
    return _hash(topic) % CALIBRATES != 0


def _hash(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest(), "big")


def docstrings(package: str) -> list[str]:
    """Return the longer docstrings of an installed package, in a fixed order that mixes subjects."""
    return [text for file in _modules(package) for text in _docstrings(file)]


def code(package: str) -> str:
    """Return the source code of an installed package, in a fixed order that mixes subjects."""
    return BETWEEN.join(file.read_text(encoding="utf-8") for file in _modules(package))


def records() -> str:
    """Return the named characters of HTML as records in JSON, one a line."""
    rows = [{"entity": name, "points": [*map(ord, text)]} for name, text in html5.items()]
    return "\n".join(sorted(map(json.dumps, rows), key=_hash))


def _modules(package: str) -> list[Path]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
    used = [name for name in files if not {"test", "tests"} & set(name.split("/"))]
    return [files[name] for name in sorted(used, key=_hash)]


def _paragraphs(texts: Iterable[str]) -> set[str]:
    """Return each text and its longer paragraphs, with indents and line breaks normalised."""
    parts = (" ".join(part.split()) for text in texts for part in [text, *_EMPTY_LINE.split(text)])
    return {part for part in parts if len(part) >= PARAGRAPH}


def _read(path: Path) -> str:
    hint = "name text files in UTF-8"
    if path.is_dir():
        raise UserError(f"[text] a folder is not a text; got {path}; name the files in it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"[text] no such file; got {path}; {hint}") from None
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
        raise UserError(f"[text] {reason}; got {path}; {hint}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"[text] cannot be read ({reason}); got {path}; {hint}") from None
    if "\0" in text:
        raise UserError(f"[text] zero bytes are not text; got {path}; {hint}")
    if not text.strip():
        raise UserError(f"[text] the file is empty; got {path}; {hint}")
    return text


def _parts(text: str) -> Iterator[str]:
    """Yield the text in parts of about PART characters, cut after a line break if there is one."""
    start = 0
    while start < len(text):
        end = start + PART
        end = text.rfind("\n", start, end) + 1 or end if end < len(text) else len(text)
        yield text[start:end]
        start = end


def _take(loaded, parts: Iterable[str], count: int, source: str) -> list[int]:
    tokens = start_of(loaded)
    for part in parts:
        tokens += loaded.tokenizer.encode(part, add_special_tokens=False)
        if len(tokens) >= count:
            return tokens[:count]
    raise UserError(
        f"[text] too few tokens in {source} for this model; got {len(tokens)} of {count}; choose a "
        "shorter context or name more text"
    )


_TOO_ODD = re.compile(r"[^\x00-\x7f]")
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields of statements, in order


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return []
    nodes: list[ast.AST] = [tree]
    for (
        node
    ) in nodes:  # in the order of `ast.walk`, which takes five times as long with expressions
        nodes += (child for name in _BLOCKS for child in getattr(node, name, ()))
    docs = (
        ast.get_docstring(node)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    return [doc for doc in docs if doc and len(doc) > 160]


def _texts() -> Iterator[tuple[str, str]]:
    """Yield (topic, text): help topics, then docstrings under the top module of their file."""
    try:
        from pydoc_data import topics as help_pages
    except ImportError:  # missing in some distributions
        topics = {}
    else:
        topics = help_pages.topics
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
