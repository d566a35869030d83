"""Chat in a terminal: input with history, commands, streaming, Ctrl-C."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from mlxkv import console
from mlxkv.catalog.aliases import DEFAULT
from mlxkv.chat.session import Session
from mlxkv.chat.typed import History, read_message
from mlxkv.chat.wrap import Thoughts, Wrap
from mlxkv.console import human_bytes, one_line, plain, say
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.session import path_for

HELP = {
    "/help": "this list",
    "/stats": "tokens, speed and memory of the last reply",
    "/save FILE": "write the session with its cache to a file",
    "/load FILE": "continue a saved session",
    "/reset": "clear the conversation",
    "/exit": "leave (so do exit, /bye and Ctrl-D)",
    "Tab": "completes commands and the files of /save and /load",
    '\\ or """': 'a line that ends with \\ continues; """ starts and ends a message of several lines, as pasting does',
}
COMMANDS = tuple(name.split()[0] for name in HELP if name.startswith("/"))
LONG_PROMPT = 1024
SMALL = (
    "SmolLM2 has 135 million weights: quick, and often wrong; a larger one: mlxkv chat -m qwen3-4b"
)


@contextlib.contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a `progress(done, total)` that shows a bar on stderr for long prompts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = None

    def progress(done: int, total: int) -> None:
        nonlocal task
        if task is None and total >= LONG_PROMPT and done < total:
            bar.start()
            task = bar.add_task("", total=total)
        if task is not None:
            bar.update(task, completed=done)

    try:
        yield progress
    finally:
        if task is not None:
            bar.stop()


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that is true after Ctrl-C, to stop between two tokens; a second one interrupts."""
    stopping = False

    def handle(signum, frame):
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True

    handler_before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: stopping
    finally:
        signal.signal(signal.SIGINT, handler_before)


@contextlib.contextmanager
def left_by_signals() -> Iterator[None]:
    """Leave as by /exit when asked to end or when the terminal is closed: the history is kept."""

    def leave(number, frame):
        raise SystemExit(128 + number)

    numbers = console.ENDING - {signal.SIGINT}
    handlers = {number: console.on(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            console.on(number, handler)


def interactive(session: Session) -> None:
    """Read prompts and commands until /exit or Ctrl-D."""
    out = Console(highlight=False)
    out.print("[dim]/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves[/dim]")
    if session.loaded.name == DEFAULT:
        out.print(f"[dim]{SMALL}[/dim]")
    with History(COMMANDS), left_by_signals():
        while True:
            line = _read(out)
            if line is None:
                return
            try:
                if line in ("exit", "quit"):
                    return
                if line.startswith("/"):
                    if not _command(session, out, line):
                        return
                elif line:
                    _reply(session, out, line)
            except (UserError, MachineError) as error:
                out.print(one_line(error), style="red", markup=False)
            except KeyboardInterrupt:
                out.print("\n[dim]interrupted; the conversation is kept[/dim]")


def _read(out: Console) -> str | None:
    """Read a message: "" after Ctrl-C, None at the end of the input."""
    try:
        return read_message()
    except EOFError:
        with contextlib.suppress(OSError):  # the terminal is gone
            out.print()
        return None
    except KeyboardInterrupt:
        out.print("\n[dim]press Ctrl-D or type /exit to leave[/dim]")
        return ""


@contextlib.contextmanager
def wrapped(session: Session) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes the reply of a session to stdout at once; in a terminal lines break between words,
    and thoughts are dim."""
    if not sys.stdout.isatty():
        yield lambda piece: say(piece, end="")
        return
    wrap = Wrap(lambda text: say(text, end=""), shutil.get_terminal_size().columns)
    write = Thoughts(wrap, session.thinking, session.opened)
    try:
        yield write
    finally:
        write.close()


def stream_reply(
    session: Session, prompt: str, stop: Callable[[], bool] | None = None, show: bool = True
) -> None:
    """Ask, with a bar while the prompt is read, and stream the reply to stdout if `show`."""
    with prefill_bar() as progress:
        pieces = session.ask(prompt, progress, stop)
        first = next(pieces, "")
    with wrapped(session) if show else contextlib.nullcontext(lambda piece: None) as write:
        write(first)
        for piece in pieces:
            write(piece)


def _reply(session: Session, out: Console, prompt: str) -> None:
    with stop_on_interrupt() as stop:
        stream_reply(session, prompt, stop)
    session.loaded.tell_steps()
    stats = session.stats
    if not stats.generated_tokens:
        out.print(
            "\n[dim]stopped while reading: the question is dropped, the part that was read stays cached[/dim]"
        )
        return
    ending = " · stopped" if stats.finish_reason == "stopped" else ""
    if (cut := session.cut_off) is not None:
        ending += f" · {cut}"
    memory = session.usage().saving()
    out.print()
    _dim(
        out,
        f"{stats.generated_tokens} tokens · {stats.tokens_per_second:.1f} tokens/s · "
        f"cache {memory}{ending}",
    )


def _command(session: Session, out: Console, line: str) -> bool:
    """Run a /command. Returns False to leave."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/exit", "/quit", "/bye"):
        return False
    if name in ("/help", "/?"):
        listed = Table.grid(padding=(0, 0, 0, 2))
        for command, text in HELP.items():
            listed.add_row(f"[bold]{escape(command)}[/bold]", escape(text))
        out.print(listed)
    elif name == "/stats":
        out.print(_stats(session))
    elif name == "/reset":
        session.reset()
        out.print("[dim]the conversation is cleared[/dim]")
    elif name == "/save":
        if argument and not _may_write(path_for(argument, "/save"), out):
            out.print("[dim]nothing was saved[/dim]")
            return True
        path = session.save(argument)
        _dim(out, f"saved {len(session.tokens)} tokens to {path}")
    elif name == "/load":
        if not argument:
            raise UserError("[/load] no file name; write /load FILE")
        session.load(argument)
        _dim(out, f"continues {argument}: {len(session.tokens)} tokens")
        for message in session.messages[-2:]:
            _dim(out, f"{message['role']}: {shortened(message['content'])}")
    else:
        choices = ", ".join(COMMANDS)
        raise UserError(f"[chat] no such command; got {name}; choose from {choices}")
    return True


def _may_write(path: Path, out: Console) -> bool:
    """Return whether a file may be written: it is not there, or the user says so."""
    if not path.is_file():
        return True
    try:
        return Confirm.ask(Text(f"{plain(path)} is there; replace it?"), console=out, default=False)
    except (EOFError, KeyboardInterrupt):
        return False


def shortened(text: str, most: int = 100) -> str:
    """Return the beginning of a text in one line."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[:most]}..."


def _dim(out: Console, text: str) -> None:
    """Print a line with names in it, which may look like markup."""
    out.print(plain(text), style="dim", markup=False)


def _stats(session: Session) -> Table:
    stats, usage, loaded = session.stats, session.usage(), session.loaded
    limit = f"{session.limit:,}" if session.limit else "unknown"
    rows = {
        "model": f"{loaded.name} · --kv {loaded.kv_name}",
        "context": f"{len(session.tokens):,} of {limit} tokens, {usage.compressed:,} of them compressed",
        "last prompt": f"{stats.prompt_tokens} tokens, {stats.read_tokens} read anew "
        f"in {stats.prefill_seconds:.2f} s",
        "last reply": f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s",
        "cache": usage.saving(),
        "bits per value": usage.note or f"{usage.bits_per_value:.2f} measured, windows included",
    }
    if usage.window and 0 < usage.tokens < session.limit:
        rows[f"at {limit} tokens"] = session.projected(session.limit).saving()
    rows |= {
        "cache allocated": f"{human_bytes(usage.allocated)}, with room to grow",
        "decode steps": loaded.steps,
        "peak memory": human_bytes(mx.get_peak_memory()),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(plain(value)))
    return table
