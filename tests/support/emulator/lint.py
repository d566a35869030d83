"""What no compiler here sees: rules of the dialect that hold for the text of a body and its header."""

import re
from collections.abc import Sequence

from emulator.wrapper import attributes_in, blank_comments, info_in

_TYPES = r"float|half|bfloat|u?int|u?short|u?char|bool|u?long|u?int\d+_t|\w+_t|(?:u?int|u?short|u?char|half|float)[234]"
_QUALIFIERS = r"(?:\b(?:device|constant|threadgroup|thread|const|volatile|coherent\(\w+\))\s+)*"
_SPACES = {"device", "constant", "threadgroup", "thread"}

# (rule, pattern that breaks it)
_RULES = {
    "no lambdas": r"\[[^\[\]]*\]\s*\([^()]*\)\s*(?:->[^{;]*)?\{|\[[&=]\]",
    "no function pointers": r"\(\s*\*\s*\w*\s*\)\s*\(",
    "no static variables": r"\bstatic\b(?!_)(?!\s*constexpr\s+(?:device|constant)\b)",
    "no double": r"\bdouble\b",
    "no exceptions, no heap, no classes with virtual functions": r"\b(?:throw|try|new|delete|virtual)\b",
    "no goto": r"\bgoto\b",
    "no includes, nothing of std": r"#\s*include\b|\bstd::",
    "f on every float literal": r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])"
    r"|(?<![\w.])\d+[eE][+-]?\d+(?![\w.])",
    "no literals of half: CUDA has none": r"(?<![\w.])\d+\.\d*h\b",
    "no CUDA words": r"\b(?:__\w+|threadIdx|blockIdx|blockDim|gridDim)\b",
}


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _matches(text: str, where: str) -> list[str]:
    code = blank_comments(text)
    code = re.sub(r'"(?:[^"\\\n]|\\.)*"', lambda m: " " * len(m[0]), code)
    found = []
    for rule, pattern in _RULES.items():
        for match in re.finditer(pattern, code):
            what = " ".join(match[0].split())
            found.append(f"{where}:{line_of(code, match.start())}: {rule}: {what}")
    for match in re.finditer(r"[^\x00-\x7f]", text):
        found.append(f"{where}:{line_of(text, match.start())}: ASCII only: {match[0]!r}")
    return found


def _bare_pointers(text: str, where: str) -> list[str]:
    """Pointers and references to numbers without an address space: an error on Metal."""
    code = blank_comments(text)
    types = "|".join([_TYPES, *re.findall(r"\b(?:typename|class|struct)\s+(\w+)", code), "T"])
    pattern = rf"({_QUALIFIERS})\b(?:{types})(?:\s+const)?\s*[*&](?!&)"
    return [
        f"{where}:{line_of(code, match.start())}: a pointer or reference names its address space: "
        + " ".join(match[0].split())
        for match in re.finditer(pattern, code)
        if not _SPACES & set(match[1].split())
    ]


def _wrapper_traps(
    source: str, input_names: Sequence[str], output_names: Sequence[str]
) -> list[str]:
    """Names that MLX finds in comments and in longer words, and signatures that it writes wrong."""
    code, found = blank_comments(source), []
    words = set(re.findall(r"\w+", code))
    for name in input_names:
        for part in info_in(source, name):
            if f"{name}_{part}" not in words:
                found.append(f"body: a comment or a longer word adds the parameter {name}_{part}")
    for name in attributes_in(source):
        if name not in words:
            found.append(f"body: a comment or a longer word adds the attribute {name}")
    has_info = any(info_in(source, name) for name in input_names)
    if has_info and len(output_names) > 1 and not attributes_in(source):
        found.append("body: two outputs with x_shape need an attribute (broken signature on Metal)")
    widths = {"thread_execution_width", "threads_per_simdgroup"} & set(attributes_in(source))
    if len(widths) > 1:
        found.append("body: one name for the simd width: Metal rejects both together")
    return found


def lint(
    source: str, header: str, input_names: Sequence[str], output_names: Sequence[str]
) -> list[str]:
    """Each breach as `body:LINE: rule: text`; empty when there is none."""
    return [
        *_matches(header, "header"),
        *_bare_pointers(header, "header"),
        *_matches(source, "body"),
        *_bare_pointers(source, "body"),
        *_wrapper_traps(source, input_names, output_names),
    ]
