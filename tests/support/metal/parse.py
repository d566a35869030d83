"""Parse texts as C++ for OpenCL behind Metal's words and MLX's own preamble, and name what breaks a rule.

C++ for OpenCL has real address spaces, like Metal: pointers and references into different ones do not
mix, and a variable at program scope outside `constant` is refused in the words of Apple's compiler. The
parser is libclang, a wheel.
Many texts share one translation unit: those with the same header, each behind the one before.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from metal import mlx_preamble
from metal.signature import VERSIONS, Kernel

HERE = Path(__file__).parent
LEVELS = (310, 320, 400)  # macOS 14, 15 and 26
LINES = 30000  # of a translation unit
SHARED_BYTES = 32 << 10
EXTENSIONS = "-all,+cl_khr_fp16,+__opencl_c_generic_address_space"
FLAGS = [
    *("-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc", "-ferror-limit=0"),
    *("-Xclang", f"-cl-ext={EXTENSIONS}"),
]
FEW = [  # what is a breach besides errors, in every text
    *("-Wvla", "-Wdeprecated-declarations", "-Wc++17-extensions", "-Wimplicit-float-conversion"),
    *("-Wno-unknown-attributes", "-Wno-unused", "-Wno-ignored-attributes"),
    *("-Wno-unknown-pragmas", "-Wno-pass-failed", "-Wno-division-by-zero", "-Wno-array-bounds"),
    "-Wno-constant-logical-operand",
]
WARNINGS = [  # and in the first text of each shape: these take as long as all the rest
    *("-Wall", *FEW, "-Wpre-c++17-compat", "-Wuninitialized", "-Wsometimes-uninitialized"),
    *("-Wreturn-type", "-Winfinite-recursion"),
]
OF_RULE = {"-Wpre-c++17-compat": "wording", "-Wc++17-extensions": "wording"}
SCOPE = re.compile("(program scope|static local) variable must reside in constant address space")


@dataclass(frozen=True)
class Unit:
    """A text to parse. mlx: behind MLX's preamble. header, tail: the text in two parts."""

    name: str
    header: str
    tail: str
    mlx: bool = True

    @staticmethod
    def of(kernel: Kernel, version: str = VERSIONS[-1]) -> Unit:
        return Unit(kernel.function(version), kernel.header, kernel.tail(version))


@dataclass(frozen=True)
class Breach:
    """rule: "type", "program scope", "wording", "address space" or "threadgroup memory". where: "header" or
    "body", the line in it."""

    rule: str
    where: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.rule}: {self.message}"


def why_not() -> str | None:
    """Why nothing is parsed here, or None."""
    try:
        index()
    except Exception as error:  # the wheel is there without its library, or for another machine
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


@cache
def index():
    from clang.cindex import Index

    # Closed before the modules that close it are gone.
    atexit.register(index.cache_clear)
    return Index.create(excludeDecls=True)


@cache
def folder() -> Path:
    """Where the preambles lie that were parsed once, for the time of this process."""
    out = Path(tempfile.mkdtemp(prefix="mlxkv-metal-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    return out


def words(level: int, mlx: bool) -> str:
    """What stands before every text."""
    before = (HERE / "words.h").read_text()
    after = (HERE / "vectors.h").read_text()
    return f"#define METAL_LEVEL {level}\n{before}\n{mlx_preamble.digestible() if mlx else ''}\n{after}"


class PreambleError(Exception):
    """MLX's preamble is not read without errors."""


@cache
def _preamble(level: int, mlx: bool) -> Path:
    """The words, parsed once."""
    out = folder() / f"words-{level}-{int(mlx)}.pch"
    name = str(out.with_suffix(".clcpp"))
    Path(name).write_text(words(level, mlx), encoding="utf-8")
    args = ["-x", "clcpp", *FLAGS, *WARNINGS]
    # Incomplete: more follows. 0x10: to be written.
    unit = index().parse(name, args=args, options=0x2 | 0x10)
    errors = [x for x in unit.diagnostics if x.severity >= 3]
    if errors:
        raise PreambleError("; ".join(f"{x.location.line}: {x.spelling}" for x in errors))
    unit.save(str(out))
    return out


def translate(text: str) -> str:
    """What is spelled otherwise in C++ for OpenCL, line by line."""
    text = re.sub(r"^#include <metal_stdlib>$", "", text, flags=re.M)
    return text.replace("[[kernel]] void ", "__kernel void ")


def alone(tail: str) -> str:
    """A text that leaves no macro to the next."""
    return tail + "".join(
        f"#undef {x}\n" for x in re.findall(r"^\s*#\s*define\s+(\w+)", tail, re.M)
    )


def batches(units: Iterable[Unit], most: int = LINES) -> Iterator[list[Unit]]:
    """Those with the same header together, so many as make `most` lines."""
    same: dict[tuple[str, bool], list[Unit]] = {}
    for unit in units:
        same.setdefault((unit.header, unit.mlx), []).append(unit)
    for group in same.values():
        out, lines = [], 0
        for unit in group:
            out.append(unit)
            lines += unit.tail.count("\n")
            if lines > most:
                yield out
                out, lines = [], 0
        if out:
            yield out


def parse(units: Sequence[Unit], level: int) -> dict[str, list[Breach]]:
    """The breaches of each by its name, of those that have any."""
    found: dict[str, list[Breach]] = {}
    new, others = [], []
    for unit in units:
        kind = shape(unit.header), shape(unit.tail)
        (others if kind in _told else new).append(unit)
        _told.add(kind)
    for group, whole in ((new, True), (others, False)):
        for batch in batches(group):
            for name, breach in _parse(batch, level, whole):
                kept = found.setdefault(name, [])
                if breach not in kept:
                    kept.append(breach)
    return found


def _parse(batch: list[Unit], level: int, whole: bool) -> Iterator[tuple[str, Breach]]:
    """whole: with all warnings, and the trees walked."""
    header = translate(batch[0].header)
    lines = header.count("\n")
    parts, starts = [header], []
    for unit in batch:
        parts.append(alone(translate(unit.tail)))
        starts.append(lines)
        lines += parts[-1].count("\n")
    name, texts = str(folder() / "text.clcpp"), "".join(parts).split("\n")
    args = ["-x", "clcpp", *FLAGS, *(WARNINGS if whole else FEW)]
    args += ["-include-pch", str(_preamble(level, batch[0].mlx))]
    tree = index().parse(name, args=args, unsaved_files=[(name, "".join(parts))])

    def place(line: int) -> tuple[int | None, int]:
        """(which of the batch, or None for the header; the line there), from 1 on."""
        at = sum(start < line for start in starts) - 1
        return (None, line) if at < 0 else (at, line - starts[at])

    for one in tree.diagnostics:
        if one.severity < 2:
            continue
        at, line = place(one.location.line)
        where = "header" if at is None else "body"
        users = range(len(batch)) if at is None else [at]
        if at is None:  # a template of the header: blame who asked for it
            asked = {place(note.location.line)[0] for note in one.children} - {None}
            users = sorted(asked) or users
        rule = "program scope" if SCOPE.match(one.spelling) else OF_RULE.get(one.option, "type")
        message = one.spelling
        if rule == "program scope":  # which does not name the variable
            message += f": {texts[one.location.line - 1].strip()}"
        for user in users:
            yield batch[user].name, Breach(rule, where, line, message)
    by_name = {unit.name: i for i, unit in enumerate(batch)}
    for cursor in tree.cursor.get_children():
        at = by_name.get(cursor.spelling)
        if at is not None:
            size = sum(_shared(cursor))
            if size > SHARED_BYTES:
                message = f"{size} bytes of threadgroup memory, of {SHARED_BYTES}"
                yield batch[at].name, Breach("threadgroup memory", "body", 1, message)
        if not whole:
            continue
        users = batch if at is None else [batch[at]]
        where, start = ("header", 0) if at is None else ("body", starts[at])
        found = [("address space", *x) for x in _bare(cursor)]
        if at is None:
            found += [("program scope", *x) for x in _scope(cursor)]
        for rule, line, message in found:
            for unit in users:
                yield unit.name, Breach(rule, where, line - start, message)


# Kinds of nodes below which nothing is declared or cast: half of a tree.
LEAVES = {"DECL_REF_EXPR", "INTEGER_LITERAL", "FLOATING_LITERAL", "TYPE_REF", "TEMPLATE_REF"}
_told: set[tuple[str, str]] = set()  # shapes of (header, tail) that were parsed with all warnings
_CONSTANT = re.compile(
    r"^(?:#define (\w+) [-\w]+|(?:constant )?constexpr \w+ (\w+)(?:\[\d+\])? = [^\n]*;|typedef \w+ (\w+);)\n",
    re.M,
)


@lru_cache(maxsize=64)
def shape(text: str) -> str:
    """A text without the values of its constants, but for those that `#if` asks about, and without types of buffers:
    trees of equal shape have the same pointers."""
    asked = set(re.findall(r"\w+", " ".join(re.findall(r"^#\s*(?:if|elif).*", text, re.M))))
    text = _CONSTANT.sub(lambda m: m[0] if asked & set(m.groups()) else "", text)
    return re.sub(
        r"^(?:__kernel|kernel|\[\[kernel\]\]) void \w+|\b(?:float|half|bfloat|bfloat16_t|float16_t)\* ",
        "",
        text,
        flags=re.M,
    )


def forget() -> None:
    """Look at every shape anew: texts that differ in constants alone are looked at once in a process."""
    _told.clear()


def _shared(kernel) -> Iterator[int]:
    """Bytes of each variable in threadgroup memory, which stand in the outermost scope alone."""
    from clang.cindex import CursorKind

    for body in kernel.get_children():
        if body.kind == CursorKind.COMPOUND_STMT:
            for statement in body.get_children():
                if statement.kind == CursorKind.DECL_STMT:
                    for one in statement.get_children():
                        if one.kind == CursorKind.VAR_DECL and "__local" in one.type.spelling:
                            yield one.type.get_size()


def _scope(cursor) -> Iterator[tuple[int, str]]:
    """A variable at program scope that is not `constant`, as the tree has it."""
    from clang.cindex import CursorKind

    if cursor.kind == CursorKind.VAR_DECL and "__constant" not in cursor.type.spelling:
        yield cursor.location.line, f"{cursor.spelling} is {cursor.type.spelling}"


def _bare(cursor) -> Iterator[tuple[int, str]]:
    """Pointers and references without an address space: Metal refuses them, C++ for OpenCL calls them generic."""
    nodes = [cursor]
    for node in nodes:
        kind = node.kind
        if kind.name not in LEAVES:
            nodes.extend(node.get_children())
        if _is_typed(kind):
            called = re.search("CONSTRUCTOR|FUNCTION|METHOD", kind.name)
            spelling = (node.result_type if called else node.type).spelling
            if "__generic" in spelling:
                yield node.location.line, f"{node.spelling or 'a cast'} has the type {spelling}"


@cache
def _is_typed(kind) -> bool:
    """Whether nodes of a kind are declarations or casts."""
    return kind.is_declaration() or (kind.is_expression() and "CAST" in kind.name)
