"""What a parser does not see: counts of a launch, and what MLX makes of words in a text."""

from collections.abc import Container, Iterator

from emulator.lint import lint

from metal.parse import Breach
from metal.signature import Kernel

BUFFERS = 31  # of Metal's argument table for buffers
THREADS = 1024  # of a threadgroup


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
    inputs, outputs = [x.name for x in kernel.inputs], [name for name, _ in kernel.outputs]
    for line in lint(kernel.source, kernel.header, inputs, outputs):
        where, rest = line.split(":", 1)
        number, _, message = rest.partition(":")
        at = int(number) if number.isdigit() else 0
        yield Breach("lint", where, at, (message if at else rest).strip())
