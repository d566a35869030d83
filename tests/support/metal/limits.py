"""What a parser does not see: counts of a launch, rules about the text itself, and what MLX makes of words in it."""

import re
from collections.abc import Container, Iterator

from emulator.wrapper import attributes_in, blank_comments, info_in

from metal.parse import Breach
from metal.signature import Kernel

BUFFERS = 31  # of Metal's argument table for buffers
THREADS = 1024  # of a threadgroup
# (rule, pattern that breaks it)
RULES = {
    "no lambdas": r"\[[^\[\]]*\]\s*\([^()]*\)\s*(?:->[^{;]*)?\{|\[[&=]\]",
    "no function pointers": r"\(\s*\*\s*\w*\s*\)\s*\(",
    "no static variables": r"\bstatic\b(?!_)(?!\s*constexpr\s+(?:device|constant)\b)",
    "no exceptions, no heap, no classes with virtual functions": r"\b(?:throw|try|new|delete|virtual)\b",
    "no goto": r"\bgoto\b",
    "no includes, nothing of std": r"#\s*include\b|\bstd::",
    "no literals of half: CUDA has none": r"(?<![\w.])\d+\.\d*h\b",
    "no CUDA words": r"\b(?:__\w+|threadIdx|blockIdx|blockDim|gridDim)\b",
    "ASCII only": r"[^\x00-\x7f]",
}


def counted(kernel: Kernel, threads: int = 0, short: Container[str] = ()) -> Iterator[Breach]:
    """Breaches of the rules "buffers", "threads" and "small input": the dialect reads no input of fewer
    than 8 elements, which MLX would put into `constant`, but for those named in `short`."""
    if len(kernel.buffers) > BUFFERS:
        yield Breach("buffers", "body", 1, f"{len(kernel.buffers)} buffers, of {BUFFERS}")
    if threads > THREADS or threads % 32:
        message = f"{threads} threads: a multiple of 32 up to {THREADS}"
        yield Breach("threads", "body", 1, message)
    for x in kernel.inputs:
        if x.scalar or (x.small and x.name not in short):
            message = f"{x.name} has fewer than 8 elements, so it lies in constant memory"
            yield Breach("small input", "body", 1, message)


def linted(kernel: Kernel) -> Iterator[Breach]:
    """Breaches of the rule "lint": the dialect, and names that MLX finds where they are not meant."""
    for where, text in (("header", kernel.header), ("body", kernel.source)):
        code = re.sub(r'"(?:[^"\\\n]|\\.)*"', lambda m: " " * len(m[0]), blank_comments(text))
        for rule, pattern in RULES.items():
            for match in re.finditer(pattern, text if rule == "ASCII only" else code):
                line, words = text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())
                yield Breach("lint", where, line, f"{rule}: {words}")
    for message in _traps(kernel):
        yield Breach("lint", "body", 0, message)


def _traps(kernel: Kernel) -> Iterator[str]:
    """Names that MLX finds in comments and in longer words, and signatures that it writes wrong."""
    source, added = kernel.source, "a comment or a longer word adds"
    words = set(re.findall(r"\w+", blank_comments(source)))
    parts = [f"{x.name}_{part}" for x in kernel.inputs for part in info_in(source, x.name)]
    yield from (f"{added} the parameter {part}" for part in parts if part not in words)
    attributes = attributes_in(source)
    yield from (f"{added} the attribute {name}" for name in attributes if name not in words)
    if parts and len(kernel.outputs) > 1 and not attributes:
        yield "two outputs with x_shape need an attribute (broken signature on Metal)"
    if {"thread_execution_width", "threads_per_simdgroup"} <= set(attributes):
        yield "one name for the simd width: Metal rejects both together"
