"""Load a model, then answer once or talk in a terminal: input with history, commands, streaming, Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from mlxkv import console
from mlxkv.catalog.aliases import DEFAULT
from mlxkv.chat.options import ChatOptions
from mlxkv.chat.session import Session
from mlxkv.console import human_bytes, note, one_line, plain, print_json, say, working
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.session import path_for
from mlxkv.generate.generation import device_type
from mlxkv.generate.roles import Thinking
from mlxkv.loading import quality_check
from mlxkv.loading.load import load
from mlxkv.loading.warmup import warm_up

HELP = {
    "/help": "this list (also h and /?)",
    "/stats": "tokens, speed and memory of the last reply",
    "/save FILE": "write the session with its cache to a file",
    "/load FILE": "continue a saved session",
    "/reset": "clear the conversation",
    "/exit": "leave (also q, exit, quit, /bye and Ctrl-D)",
    "Tab": "completes commands and the files of /save and /load",
    '\\ or """': 'a line that ends with \\ continues; """ starts and ends a message of several lines, as pasting does',
}
WORDS = {"q": "/exit", "exit": "/exit", "quit": "/exit", "h": "/help"}  # as mlx_lm.chat has them
COMMANDS = tuple(name.split()[0] for name in HELP if name.startswith("/"))
LONG_PROMPT = 1024
SMALL = (
    "SmolLM2 has 135 million weights: quick, and often wrong; a larger one: mlxkv chat -m qwen3-4b"
)


# -- one question, or a conversation


def talk(options: ChatOptions, prompt: str | None) -> None:
    """Load a model and answer `prompt`; without one, talk in the terminal."""
    mx.random.seed(options.seed)
    mx.reset_peak_memory()
    with working(f"reading {options.model.strip()}") as progress:
        loaded = load(
            options.model,
            options.cache,
            strict=options.kv_strict,
            dtype=options.dtype,
            calibration=options.calibration,
            progress=progress,
            weights=options.weights,
            adapter_path=options.adapter_path,
            memory=options.memory,
            context=options.context,
        )
    # What the model's makers recommend, except where an option says otherwise.
    asked = {"temperature": options.temp, "top_p": options.top_p}
    asked = {name: value for name, value in asked.items() if value is not None}
    sampler, processors = replace(loaded.sampling, **asked).drawing()
    session = Session(
        loaded,
        options.system,
        options.raw,
        sampler,
        options.max_tokens,
        options.template,
        processors,
    )
    loaded.print_report(device_type(), options.quiet)
    quality_check.warn(loaded)
    warm_up(loaded)
    if options.saved is not None:
        session.load(options.saved)
        if not options.quiet:
            said = "after" if options.pack else "continues"
            note(f"  {said} {options.saved}: {len(session.tokens)} tokens")
    if prompt is None:
        interactive(session)
        return
    stream_reply(session, prompt, show=not options.json)
    if not options.json:
        say("")
    if (cut := session.cut_off) is not None:
        note(f"[{cut}]")
    loaded.tell_steps()
    if options.json:
        print_json(report(session))
    elif not options.quiet:
        note(f"[{session.stats.prompt_tokens} + {figures(session)}]")
        if (line := outlook(session)) is not None:
            note(f"[{line}]")


def report(session: Session) -> dict:
    """Return the document of `mlxkv chat --json` for the last reply."""
    loaded, stats, usage = session.loaded, session.stats, session.usage()
    return {
        "model": loaded.name,
        "kv": loaded.kv_name,
        "backend": device_type(),
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "finish_reason": stats.finish_reason,
        "prefill_seconds": round(stats.prefill_seconds, 4),
        "decode_seconds": round(stats.decode_seconds, 4),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        **usage.figures,
        "peak_bytes": mx.get_peak_memory(),
        **said(session),
        "steps": loaded.steps,
        "layers": [layer.as_dict() for layer in loaded.layers],
    }


def said(session: Session) -> dict:
    """Return the fields of `--json` about the text of the last reply: `reasoning` only where the model thought."""
    last = session.messages[-1] if session.messages else {"content": ""}
    if "reasoning_content" not in last:
        return {"text": last["content"]}
    return {"reasoning": last["reasoning_content"].strip(), "text": last["content"].lstrip("\n")}


def figures(session: Session) -> str:
    """Return the length, the speed and the memory in use of the last reply, in a short line."""
    stats, memory = session.stats, session.usage().saving(short=True)
    speed = f"{stats.tokens_per_second:.1f} tokens/s"
    count = f"{stats.generated_tokens} token{'s' * (stats.generated_tokens != 1)}"
    return f"{count} · {speed} · cache {memory}"


def outlook(session: Session) -> str | None:
    """Return, once a session, why nothing is compressed yet and what the model's whole context will take."""
    if session.told:
        return None
    session.told, usage = True, session.usage()
    lines = [usage.note] if usage.note else []
    if usage.window and usage.tokens < session.limit:
        ahead = session.projected(session.limit)
        lines.append(f"at {ahead.tokens:,} tokens {ahead.saving()}")
    return "; ".join(lines) or None


@contextlib.contextmanager
def prefill_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr for long prompts; without a terminal, a line a minute. Yields `progress(done, total)`."""
    out = Console(stderr=True)
    if not out.is_terminal:
        yield console.by_minutes("reading")
        return
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TimeRemainingColumn(),
        console=out,
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
    """Yield a function that tells whether Ctrl-C was pressed, to stop between tokens. A second Ctrl-C interrupts."""
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
    """Exit when a signal asks for it or the terminal is closed; the history is kept."""

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
    from mlxkv.chat.typed import Typed

    out = Console(highlight=False)
    out.print("[dim]/help lists the commands, Ctrl-C stops a reply, Ctrl-D leaves[/dim]")
    if session.loaded.name == DEFAULT:
        out.print(f"[dim]{SMALL}[/dim]")
    read = Typed(COMMANDS).read
    with left_by_signals():
        while True:
            line = _read(read, out)
            if line is None:
                return
            try:
                line = WORDS.get(line, line)
                if line.startswith("/"):
                    if not _command(session, out, line):
                        return
                elif line:
                    _reply(session, out, line)
            except (UserError, MachineError) as error:
                out.print(one_line(error), style="red", markup=False)
            except KeyboardInterrupt:
                out.print("\n[dim]interrupted; the conversation is kept[/dim]")


def _read(read: Callable[[], str], out: Console) -> str | None:
    """Return a message; "" after Ctrl-C, None at the end of the input."""
    try:
        return read()
    except EOFError:
        return None
    except KeyboardInterrupt:
        out.print("[dim]press Ctrl-D or type /exit to leave[/dim]")
        return ""


@contextlib.contextmanager
def wrapped(session: Session) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a reply to stdout; in a terminal, lines break between words and thoughts are dim."""
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
    """Ask, and stream the reply to stdout if `show`."""
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
    out.print()
    _dim(out, f"{figures(session)}{ending}")
    if (line := outlook(session)) is not None:
        _dim(out, line)


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
    elif name in ("/reset", "/clear"):
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
            line = one_line(message["content"])
            _dim(out, f"{message['role']}: {line if len(line) <= 100 else f'{line[:100]}...'}")
    else:
        choices = ", ".join(COMMANDS)
        raise UserError(f"[chat] no such command; got {name}; choose from {choices}")
    return True


def _may_write(path: Path, out: Console) -> bool:
    """Return whether the file is new, or the user agrees to replace it."""
    if not path.is_file():
        return True
    try:
        return Confirm.ask(Text(f"{plain(path)} is there; replace it?"), console=out, default=False)
    except (EOFError, KeyboardInterrupt):
        return False


def _dim(out: Console, text: str) -> None:
    """Print a line that may contain names that look like markup."""
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
        "peak memory": human_bytes(mx.get_peak_memory()),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(plain(value)))
    return table


# -- replies in lines of words; what a model thinks in dim letters, without the marks around it

FENCE = "```"


class Wrap:
    """Passes pieces of text to `write`, broken into lines of at most `width` cells. Code (indented or fenced) and
    words longer than a line stay as they are."""

    def __init__(self, write: Callable[[str], None], width: int):
        self._write, self._width = write, width
        self._word, self._space = "", ""  # not written yet
        self._line = ""  # what is written of the line, as the text has it
        self._column, self._fenced = 0, False

    def __call__(self, piece: str) -> None:
        """Write a piece, except its last word, which the next piece may continue."""
        out = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", piece):
            if part == "\n":
                out.append(self._ended())
                if self._line.lstrip().startswith(FENCE):
                    self._fenced = not self._fenced
                out.append("\n")
                self._line, self._column = "", 0
            elif part.isspace():
                out.append(self._ended(spaces=False))
                self._space += part
            else:
                self._word += part
        self._write("".join(out))

    def close(self) -> None:
        """Write the last word."""
        self._write(self._ended())

    def _ended(self, spaces: bool = True) -> str:
        """Return the pending word after its spaces or a line break; without a word, the spaces at a line's end."""
        word, space = self._word, self._space
        if not word:
            self._space = "" if spaces else space
            return space if spaces else ""
        self._word = self._space = ""
        size = cell_len(space) + cell_len(word)
        code = self._fenced or (self._line + space).startswith(("    ", "\t"))
        if self._line.strip() and space and not code and self._column + size > self._width:
            self._line += space + word
            self._column = cell_len(word)
            return "\n" + word
        self._line += space + word
        self._column += size
        return space + word


DIM, PLAIN = "\x1b[2m", "\x1b[22m"


class Thoughts:
    """Passes pieces of a reply to `wrap`; text between thinking marks is dim. opened: whether the prompt ended with the
    opening mark, as some chat templates write it."""

    def __init__(self, wrap: Wrap, thinking: Thinking, opened: bool = False):
        self._wrap, self._held, self._thinking = wrap, "", False
        self._start, self._end = thinking.start, thinking.end
        if opened:
            self._switch()

    def __call__(self, piece: str) -> None:
        """Write a piece, except an ending that may be the start of a mark."""
        self._held += piece
        while (mark := self._end if self._thinking else self._start) and mark in self._held:
            text_before, _, self._held = self._held.partition(mark)
            self._wrap(text_before)
            self._switch()
        waits = next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        ready = len(self._held) - waits
        self._wrap(self._held[:ready])
        self._held = self._held[ready:]

    def _switch(self) -> None:
        self._wrap.close()
        self._thinking = not self._thinking
        sys.stdout.write(DIM if self._thinking else PLAIN)

    def close(self) -> None:
        """Write the rest, and end dim text."""
        self._wrap(self._held)
        self._wrap.close()
        if self._thinking:
            sys.stdout.write(PLAIN)
            sys.stdout.flush()
