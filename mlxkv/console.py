"""Print for commands: results on stdout, notes on stderr, JSON as the last line of stdout. Parse sizes."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from mlxkv.errors import MachineError, UserError

# Characters that a terminal may act on, or a log may show misleadingly: control characters, writing directions, lone
# surrogates. Text of several lines keeps those that only move within a line.
_RAW = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_RAW_LINES = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# Signals that ask a process to end: Ctrl-C, `kill`, a closed terminal.
ENDING = {
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
}
_GAP = 3  # columns of a terminal between two columns of a table
_FOLDED = 16  # minimum width of a folded column of texts
_BARE = 1 << 16  # a larger number without a unit was meant in bytes, or is a mistake
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def plain(text: object, lines: bool = False) -> str:
    """Return text that is safe for terminals and logs: control characters become escapes, `\\x1b`.

    lines: whether to keep tabs, line breaks and marks of right-to-left text, which replies need.
    """
    raw, text = (_RAW_LINES, str(text).replace("\r", "")) if lines else (_RAW, str(text))
    return raw.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: object) -> str:
    """Return `plain` text in one line, with single spaces."""
    return plain(" ".join(str(text).split()))


class PlainLog(logging.Formatter):
    """Formats log records as `plain` text: one line each, and tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record), lines=True)


class StandardStreams:
    """Makes stdin, stdout and stderr safe for a command: no encoding ends a chat, and no closed stream changes an exit
    code."""

    def __init__(self):
        self._errors: dict[str, str] = {}  # the error handler of each stream before `repair`

    def repair(self) -> None:
        """Replace invalid characters instead of raising. A closed stream becomes the null device: otherwise a file
        opened later would get its descriptor."""
        for name in ("stdin", "stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - for good
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):
                self._errors.setdefault(name, stream.errors)
                stream.reconfigure(errors="replace")

    def restore(self) -> None:
        """Undo `repair`, before another program runs."""
        for name, errors in self._errors.items():
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors=errors)
        self._errors.clear()

    def flush(self, tried: str = "") -> OSError | None:
        """Flush both streams, and drop what cannot be written. Returns the error of stdout, such as a full disk,
        unless its terminal was closed. tried: written to stdout first, to see an error that no buffer has kept."""
        lost = None
        for stream in (sys.stdout, sys.stderr):
            try:
                if tried and stream is sys.stdout:
                    stream.write(tried)
                stream.flush()
            except OSError as error:
                if stream is sys.stdout and error.errno != errno.EIO:
                    lost = error
                _drop(stream)
        return lost


STREAMS = StandardStreams()


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal: COLUMNS, or its own, which need not be stdout's."""
    said = os.environ.get("COLUMNS", "")
    try:
        width = int(said) if said.isdigit() else os.get_terminal_size(stream.fileno()).columns
        return width or 80
    except (OSError, ValueError):
        return 80


def folded(text: str, stream: TextIO) -> str:
    """Return text with its lines broken between words and indented as they begin, where `stream` is a terminal."""
    if not stream.isatty():
        return text
    width = _columns(stream)
    lines = (
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip())),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(line) > width
        else line
        for line in text.split("\n")
    )
    return "\n".join(lines)


def say(text: str, end: str = "\n") -> None:
    """Print `plain` text on stdout, unbuffered. Without an `end` it is a piece of a line, and is not folded."""
    text = plain(text, lines=True)
    print(folded(text, sys.stdout) if end else text, end=end, flush=True)


def say_whole(text: str) -> None:
    """Print a line on stdout that is copied, such as a command: no terminal's width breaks it."""
    say(text + "\n", end="")


def note(text: str) -> None:
    """Print a line on stderr; stdout is for results. A stderr that cannot be written to is ignored."""
    _tell(folded(plain(text, lines=True), sys.stderr) + "\n")


def _tell(text: str) -> None:
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno == errno.EIO:  # the terminal was closed
            raise
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Redirect a stream to the null device: otherwise Python would try again at exit, and return 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def warn(text: str) -> None:
    """Print a line on stderr, bold and red in a terminal."""
    from rich.console import Console

    out = Console(stderr=True, highlight=False, soft_wrap=True)
    with out.capture() as captured:
        out.print(folded(plain(text, lines=True), sys.stderr), style="bold red", markup=False)
    _tell(captured.get())


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Print a warning, unless this process has printed it before."""
    if text not in _warned:
        _warned.add(text)
        warn(text)


@contextmanager
def progress(
    what: str, total: float, begun: str = "this takes a while", done: float = 0
) -> Iterator[Callable[..., None]]:
    """Show on stderr how far long work is: in a terminal a bar with the time left, else a line now and at most one a
    minute; nothing if `total` is 0. Yields a function that counts 1 or n more steps of `total`. begun: ends the first
    line. done: steps that were done before."""
    if not total:
        yield lambda n=1: None
        return
    from rich.console import Console

    out = Console(stderr=True)
    if not out.is_terminal:
        note(f"{what}: {begun}")
        told = by_minutes(what, done)

        def count(n: float = 1) -> None:
            nonlocal done
            done += n
            told(done, total)

        yield count
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=out, transient=True) as bars:
        bar = bars.add_task(plain(what), total=total, completed=int(done))
        yield lambda n=1: bars.advance(bar, n)


def by_minutes(what: str, before: float = 0) -> Callable[[float, float], None]:
    """Return a function of (done, all) that prints how far work is, at most once a minute. before: what was done when
    it began."""
    begun = said = time.monotonic()

    def told(done: float, total: float) -> None:
        nonlocal said
        now = time.monotonic()
        if done > before and now - said >= 60:
            said = now
            left = human_time((now - begun) * (total - done) / (done - before))
            note(f"{what}: {done / total:.0%}, about {left} left")

    return told


@contextmanager
def working(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a spinner on stderr, in a terminal only. Yields a function of (bytes done, all bytes) that shows a bar
    instead; without a terminal it prints a line, at most once a minute."""
    if not sys.stderr.isatty():
        yield by_minutes(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn
    from rich.text import Text

    out, bar, what = Console(stderr=True), None, plain(what)
    spinner = out.status(Text(f"{what} ...", "dim"))
    spinner.start()

    def told(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            spinner.stop()
            name = TextColumn("{task.description}", markup=False)
            columns = SpinnerColumn(), name, BarColumn(), DownloadColumn()
            bar = Progress(*columns, console=out, transient=True)
            bar.start()
            bar.add_task(what, total=total)
        bar.update(bar.task_ids[0], completed=int(done))

    try:
        yield told
    finally:
        spinner.stop()
        if bar is not None:
            bar.stop()


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` of a module started by `python -m`, and exit. Failures are one line, as in `mlxkv`."""
    try:
        code = main() or 0
    except UserError as error:
        note(one_line(error))
        code = 2
    except MachineError as error:
        note(one_line(error))
        code = 1
    sys.exit(code)


def on(number: int, handler: Callable | signal.Handlers) -> Any:
    """Set the handler of a signal, unless the signal is ignored, as under nohup. Returns the previous one."""
    before = signal.getsignal(number)
    return before if before is signal.SIG_IGN else signal.signal(number, handler)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay signals that ask to end until the block is done. Does nothing outside the main thread, where they
    arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: on(number, lambda number, _: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            on(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def print_json(data: dict) -> None:
    """Print one JSON document on one line, with control characters escaped."""
    text = json.dumps(data, ensure_ascii=False)
    print(_RAW.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str = "",
    widest: Sequence[object] = (),
) -> None:
    """Print a table on stdout. Columns of numbers, except the first, are right-aligned. A table wider than the terminal
    is printed in parts that each begin with the first column. widest: the widest cell of each column; with them, rows
    are printed as they come, instead of at the end."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width, and another program may read its lines: do not break them.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    cells = [[plain(cell) for cell in row] for row in ([widest] if widest else rows)]
    numeric, longest, widths = [], [], []
    for index, column in enumerate(columns):
        texts = [row[index] for row in cells]
        numeric.append(index > 0 and all(re.match(r"^[\d.,\-]", text) for text in texts))
        longest.append(max(map(len, [column, *texts])))
        widths.append(_GAP + (longest[-1] if numeric[index] else min(longest[-1], _FOLDED)))
    parts = [[0]]
    for index in range(1, len(columns)):
        if len(parts[-1]) > 1 and sum(widths[i] for i in [*parts[-1], index]) > out.width + 1:
            parts.append([0])
        parts[-1].append(index)

    head = Text(plain(title)) if title else None

    def drawn(part: list[int], rows: Sequence[Sequence[str]]) -> Table:
        table = Table(
            title=head if part is parts[0] else None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for index in part:
            # A number is not broken, nor separated from its unit.
            table.add_column(
                columns[index],
                justify="right" if numeric[index] else "left",
                overflow="fold",
                no_wrap=numeric[index],
                min_width=longest[index] if widest else None,
            )
        for row in rows:
            table.add_row(*(Text(row[index]) for index in part))
        return table

    if widest:
        with out.capture() as text:
            out.print(drawn(parts[0], cells))
        *above, _, below = text.get().splitlines()
        print(*above, sep="\n", flush=True)
        cells = []
        for row in rows:
            cells.append([plain(cell) for cell in row])
            with out.capture() as text:
                out.print(drawn(parts[0], cells[-1:]))
            print(text.get().splitlines()[-2], flush=True)
        print(below, flush=True)
    for part in parts[1:] if widest else parts:
        out.print(drawn(part, cells))


def human_bytes(count: float) -> str:
    """Return a number of bytes as text: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def human_time(seconds: float) -> str:
    """Return a time as text: 40 s, 3 min."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def parse_size(text: str, where: str, bare: str = "") -> int:
    """Parse '16GB', '8GiB', '512M' as bytes. GB and GiB are the same: powers of two. bare: the unit of a small number
    without one, such as "g" where nobody means bytes; "": a unit is required. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not match or not 0 < float(match[1]) < 1e15:
        raise UserError(f"[{where}] not a size; got {text[:60]!r}; write it like 16GB or 512MiB")
    unit = match[2]
    if not unit and not re.search("[ib]", text.lower()):  # 512B has one
        if not bare or float(match[1]) >= _BARE:
            raise UserError(
                f"[{where}] a size needs a unit; got {text.strip()[:60]!r}; write it like 16GB or 512MiB"
            )
        unit = bare
    return int(float(match[1]) * _UNITS[unit])


def parse_tokens(text: str, where: str) -> int:
    """Parse '32k', '128K', '8192' as a number of tokens; k is 1024. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([km]?)\s*", text.lower())
    count = int(float(match[1]) * _UNITS[match[2]]) if match and float(match[1]) < 1e15 else 0
    if count < 1:
        raise UserError(
            f"[{where}] not a number of tokens; got {text[:60]!r}; write it like 8192 or 32k"
        )
    return count


def user_path(name: Path | str, where: str) -> Path:
    """Return the path that a user named, `~` expanded. where: the option, for errors. Raises UserError for a name that
    no file can have: too long, of an unknown user, with a zero byte."""
    try:
        path = Path(name).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".") or "no such name"
        raise UserError(
            f"[{where}] no file can have this name ({reason}); got {str(name)[:60]!r}; choose another"
        ) from None
    return path


def cache_dir() -> Path:
    """Return the user's cache folder of mlxkv, which may not exist yet."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxkv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxkv"
