"""Begin `mlxkv chat`: refuse what can be refused, say which model is loaded, and only then import what is heavy."""

from __future__ import annotations

import codecs
import select
import sys

from mlxkv.catalog import folder
from mlxkv.catalog.aliases import Source, resolve
from mlxkv.catalog.folder import fingerprint
from mlxkv.catalog.hub import require
from mlxkv.chat.options import ChatOptions
from mlxkv.console import human_bytes, note, working
from mlxkv.errors import UserError
from mlxkv.formats import session as files

BROKEN = 0.1  # the share of letters that are no UTF-8 from which piped bytes are no text
PATIENCE = 1.0  # seconds without text on stdin before the terminal says what is waited for


def run_chat(options: ChatOptions) -> None:
    """Answer once with a prompt or piped text, else talk in the terminal."""
    source = resolve(options.model)
    require(source)
    if options.load is not None:
        check_session(options.load, options, source)
    prompt = read_prompt(options)
    if prompt is not None and not prompt.strip():
        raise UserError("[chat] empty prompt; pass --prompt TEXT or pipe some text in")
    if prompt is None and options.json:
        raise UserError("[--json] needs a prompt: pass --prompt TEXT or pipe some text in")
    if not options.quiet:
        note(f"{options.model.strip()} · --kv {options.preset.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.chat.answer import talk
    talk(options, prompt)


def read_prompt(options: ChatOptions) -> str | None:
    """Return what is on stdin, where it is no terminal, and then the text of the command line; None to talk."""
    words, piped = options.asked, None
    if not sys.stdin.isatty():
        if words is not None:
            _say_that_it_waits()
        try:
            piped = text_of(sys.stdin.buffer.read()).removesuffix("\n")
        except OSError:  # what a job has in its place may be closed or for writing only
            piped = ""
    if words is None or not piped:
        return piped if words is None else words
    return f"{piped}\n\n{words}"


def text_of(data: bytes) -> str:
    """Decode piped text: UTF-8, or UTF-16 that begins with its mark. Single bytes that are no UTF-8 are replaced.
    Raises UserError for a file that is no text, such as a PDF."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if wide else "utf-8-sig", "replace")
    if "\0" in text or text.count("\ufffd") > BROKEN * len(text):
        raise UserError(
            f"[stdin] not text; got {human_bytes(len(data))} that begin with {data[:8]!r}; pipe plain text in "
            "UTF-8: pdftotext FILE - makes it of a PDF"
        )
    return text.replace("\r\n", "\n")


def _say_that_it_waits() -> None:
    """Tell on stderr if nothing comes on stdin: a job may have left it open."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], PATIENCE)
    except (OSError, ValueError):  # no file, or of a system whose select takes sockets alone
        return
    if not ready:
        note(
            "[chat] waiting for text on stdin; where there is none, end the command with </dev/null"
        )


def check_session(load: str, options: ChatOptions, source: Source) -> None:
    """Raise UserError, before a model is read, for the file `load` of `--load` that its header shows to be of another
    cache or another model; all of it is checked when it is read."""
    head = files.read_header(files.file_named(load))
    if head.path.suffix != files.ENDING:
        raise head.wrong("is not a session saved by mlxkv chat")
    files.check_version(head)
    if source.folder is not None and source.folder.exists():
        model_fingerprint = fingerprint(folder.check_folder(source.folder))
        if head.entries["fingerprint"] != model_fingerprint:
            raise head.wrong(
                f"belongs to another model; got {files.printable(head.entries['model'])}; this is "
                f"{options.model.strip()}"
            )
    files.check_cache(head, options.preset, options.cache)
