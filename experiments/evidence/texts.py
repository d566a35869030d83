"""Make the texts that `pretrained` reads: twelve of twelve kinds, and documents for questions.

    prose dialogue code mathematics languages tables    passages of the corpus (its evaluation split), after
                                                        Python's documentation and source code
    manual                                              Python's documentation: help topics and docstrings
    source-1, source-2                                  source code of the standard library
    readme, licence                                     descriptions and licences of installed packages
    records                                             JSON of the standard library's functions, and tables of
                                                        Unicode's characters

A file is read from its end: the last tokens are the ones that are decoded, whatever the context. No topic, module or
paragraph is in two texts, and none in what presets are calibrated on (`mlxkv.corpora.sources`).
"""

from __future__ import annotations

import ast
import json
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from random import Random

from mlxkv.corpora import sources
from mlxkv.corpora.corpus import KINDS, passages
from mlxkv.corpora.sources import python_topics
from mlxkv.errors import UserError

LENGTH = 190_000  # characters of a text: 32K tokens of any model
DOCUMENTS = 8
MANUAL, READ = "manual", ("source-1", "source-2", "readme", "licence", "records")
TEXTS = (*KINDS, MANUAL, *READ)
SKIPPED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
SEED = "pretrained-1"  # count it up when texts change
LICENCES = ("LICEN", "COPYING", "NOTICE")


class Texts:
    """The texts in a folder: NAME.txt and document-N.txt, made where they are missing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._tokens: dict[tuple[str, str], list[int]] = {}

    def make(self) -> None:
        """Write the files. Raises UserError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / f"{TEXTS[-1]}.txt").exists():  # written last
                return
            for name, text in _made():
                scratch = self.folder / f"{name}.tmp"
                scratch.write_text(text, encoding="utf-8")
                scratch.replace(self.folder / f"{name}.txt")
        except OSError as error:
            reason = error.strerror
            raise UserError(f"[--texts] cannot write; got {self.folder}: {reason}") from None

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the texts. Raises UserError if there are none."""
        files = {file.stem for file in self.folder.glob("*.txt")}
        names = [name for name in TEXTS if name in files]
        if not names:
            raise UserError(f"[--texts] no texts; got {self.folder}; leave the option out")
        return names

    def tokens(self, loaded, name: str, count: int) -> list[int] | None:
        """Return the last `count` tokens of a text, the first of them what the tokenizer puts before texts; None if
        it has fewer."""
        encoded = self.encoded(loaded, name)
        start = sources.start_of(loaded)
        budget = count - len(start)
        return [*start, *encoded[-budget:]] if len(encoded) >= budget else None

    def encoded(self, loaded, name: str) -> list[int]:
        """Return all tokens of a text."""
        key = loaded.fingerprint, name
        if key not in self._tokens:
            text = (self.folder / f"{name}.txt").read_text(encoding="utf-8")
            self._tokens[key] = loaded.tokenizer.encode(text, add_special_tokens=False)
        return self._tokens[key]


def _made() -> Iterator[tuple[str, str]]:
    """Yield name and text of each file."""
    topics, modules = iter(_topics()), [_read(file) for file in _library(documented=False)]
    yield MANUAL, _cut(_until(topics, LENGTH))
    topics = list(topics)
    filled = [*KINDS, *(f"document-{i + 1}" for i in range(DOCUMENTS))]
    for place, name in enumerate(filled):
        passage = passages("evaluation")[name] if name in KINDS else ""
        docs = islice(topics, place, None, len(filled))
        code = islice(modules, place, None, len(filled) + 2)
        yield name, _cut([*code, *docs], passage)
    for extra in range(2):
        code = islice(modules, len(filled) + extra, None, len(filled) + 2)
        yield f"source-{extra + 1}", _cut(code)
    yield "readme", _cut(_unlike(x.metadata.get_payload() or "" for x in _packages()))
    yield "licence", _cut(_unlike(_licences()))
    yield "records", _cut(_records())


def _until(parts: Iterator[str], length: int) -> Iterator[str]:
    """Yield parts until they have `length` characters; the iterator has the others."""
    while length > 0 and (part := next(parts, None)) is not None:
        yield part
        length -= len(part)


def _cut(parts: Iterable[str], end: str = "") -> str:
    """Join parts with `end` behind them, LENGTH characters from the end."""
    text = sources.BETWEEN.join(part for part in [*parts, end] if part)
    return text[-LENGTH:]


def _place(name: str) -> int:
    return int.from_bytes(sha256(f"{SEED} {name}".encode()).digest()[:8], "big")


def _library(documented: bool) -> list[Path]:
    """Return the files of the standard library's modules that calibration never reads of, in a fixed order that mixes
    subjects: of those whose docstrings are read as documentation, or of the others."""
    home = Path(sysconfig.get_paths()["stdlib"])
    out = []
    for file in sorted([*home.glob("*.py"), *home.glob("*/*.py"), *home.glob("*/*/*.py")]):
        parts = file.relative_to(home).with_suffix("").parts
        used = not SKIPPED & set(parts) and not parts[0].startswith("_sysconfig")
        used = used and sources.in_evaluation(f"module {parts[0]}")
        if used and _documented(parts[0]) == documented:
            out.append(file)
    return sorted(out, key=lambda file: _place(file.name))


def _documented(module: str) -> bool:
    """Return whether a module's docstrings are read as documentation, and the module not as source code."""
    return _place(module) % 2 == 0


def _topics() -> list[str]:
    """Return topics of Python's documentation, in a fixed order that mixes subjects."""
    topics = python_topics()
    names = [name for name in sorted(topics, key=_place) if sources.in_evaluation(name)]
    chosen_names = [n for n in names if not n.startswith("module ") or _documented(n.split()[1])]
    return ["\n\n".join(topics[name]) for name in chosen_names]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _packages() -> list:
    """Return the installed packages, an arbitrary but fixed order, without this one."""
    packages = {package.metadata["Name"] or "": package for package in distributions()}
    return [packages[name] for name in sorted(packages, key=_place) if name not in ("", "mlxkv")]


def _licences() -> Iterator[str]:
    for package in _packages():
        for file in package.files or ():
            if file.name.upper().startswith(LICENCES) and file.suffix not in (".py", ".pyc"):
                yield _read(Path(package.locate_file(file)))


def _unlike(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts without paragraphs that an earlier one has: licences quote each other."""
    paragraphs: set[str] = set()
    for text in texts:
        parts = []
        for part in text.replace("\r\n", "\n").split("\n\n"):
            plain = " ".join(part.split()).lower()
            if plain and plain not in paragraphs:
                paragraphs.add(plain)
                parts.append(part)
        if parts:
            yield "\n\n".join(parts)


def _records() -> Iterator[str]:
    """Yield JSON of functions, and tables of characters between."""
    letters = [chr(i) for i in range(0x21, 0x3000) if unicodedata.name(chr(i), "")]
    Random(SEED).shuffle(letters)
    for at, file in enumerate(_library(documented=True)):
        yield from _functions(file)
        rows = letters[20 * at : 20 * at + 20]
        head = ["| code | name | category | direction |", "| --- | --- | --- | --- |"]
        yield "\n".join(head + [_row(letter) for letter in rows]) if rows else ""


def _functions(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(_read(file))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args]
            record = {"file": file.name, "line": node.lineno, "function": node.name}
            record |= {"arguments": names, "statements": len(node.body)}
            yield json.dumps(record)


def _row(letter: str) -> str:
    kinds = unicodedata.category(letter), unicodedata.bidirectional(letter)
    return f"| U+{ord(letter):04X} | {unicodedata.name(letter)} | {kinds[0]} | {kinds[1]} |"
