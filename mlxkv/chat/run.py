"""Start `mlxkv chat`: refuse bad options and name the model before anything heavy is imported."""

from __future__ import annotations

import codecs
import select
import sys

from mlxkv.catalog import folder
from mlxkv.catalog.aliases import DEFAULT, Source, is_model, resolve
from mlxkv.catalog.folder import fingerprint
from mlxkv.catalog.hub import require
from mlxkv.chat.options import ChatOptions
from mlxkv.console import human_bytes, note, user_path, working
from mlxkv.errors import UserError
from mlxkv.formats import session as files

BROKEN = 0.1  # piped bytes are not text if a larger share of their characters is invalid UTF-8
PATIENCE = 1.0  # seconds without text on stdin before a note says that it is awaited


def run_chat(options: ChatOptions) -> None:
    """Answer a prompt or piped text once; without either, talk in the terminal."""
    if options.asked and options.model == DEFAULT and is_model(options.asked):
        raise UserError(
            f"[chat] the name of a model, and no question; got {options.asked.strip()!r}; write mlxkv chat -m "
            f"{options.asked.strip()}"
        )
    first, _, more = (options.asked or "").strip().partition(" ")
    if more and options.model == DEFAULT and is_model(first):
        note(f"{first} is read as a word of the question; mlxkv chat -m {first} asks that model")
    source = resolve(options.model)
    require(source)
    if options.saved is not None:
        check_session(options.saved, options, source)
    prompt = read_prompt(options)
    if prompt is not None and not prompt.strip():
        raise UserError("[chat] empty prompt; pass --prompt TEXT or pipe some text in")
    if prompt is None and options.json:
        raise UserError("[--json] needs a prompt: pass --prompt TEXT or pipe some text in")
    if not options.quiet:
        note(f"{options.model.strip()} · --kv {options.preset.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.chat.terminal import talk
    talk(options, prompt)


def read_prompt(options: ChatOptions) -> str | None:
    """Return the text on stdin, unless it is a terminal, followed by that of the command line; None without either."""
    words, piped = options.asked, None
    if not sys.stdin.isatty():
        if words is not None:
            _say_that_it_waits()
        try:
            piped = text_of(sys.stdin.buffer.read()).removesuffix("\n")
        except OSError:  # a job's stdin may be closed or write-only
            piped = ""
    if words is None or not piped:
        return piped if words is None else words
    return f"{piped}\n\n{words}"


def text_of(data: bytes, where: str = "stdin") -> str:
    """Decode text: UTF-8, or UTF-16 with its byte order mark. Invalid bytes are replaced. Raises UserError, `where` in
    brackets, for bytes that are not text, such as a PDF."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if wide else "utf-8-sig", "replace")
    if "\0" in text or text.count("\ufffd") > BROKEN * len(text):
        raise UserError(
            f"[{where}] not text; got {human_bytes(len(data))} that begin with {data[:8]!r}; pipe plain text in "
            "UTF-8: pdftotext FILE - makes it of a PDF"
        )
    return text.replace("\r\n", "\n")


def _say_that_it_waits() -> None:
    """Print a note if nothing arrives on stdin: a job may have left it open."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], PATIENCE)
    except (OSError, ValueError):  # not a file, or a system whose select takes only sockets
        return
    if not ready:
        note(
            "[chat] waiting for text on stdin; where there is none, end the command with </dev/null"
        )


def check_session(load: str, options: ChatOptions, source: Source) -> None:
    """Raise UserError, before the model is read, if the header of the saved session `load` names another cache or
    another model. The rest of the file is checked when it is read."""
    head = files.read_header(files.file_named(load))
    if head.path.suffix not in files.ENDINGS:
        raise head.wrong("is not a session saved by mlxkv chat")
    check_model(head, options.model, source, options.adapter_path)
    if not isinstance(cache := options.cache, str):  # else once it is chosen
        files.check_cache(head, options.preset, cache)


def check_model(
    head: files.SessionHeader, model: str, source: Source, adapter_path: str | None
) -> None:
    """Raise UserError unless this version reads the file, and it is of this model, as far as a header tells."""
    files.check_version(head)
    if source.folder is not None and source.folder.exists():
        adapter = None if adapter_path is None else user_path(adapter_path, "--adapter-path")
        model_fingerprint = fingerprint(folder.check_folder(source.folder, adapter))
        if head.entries["fingerprint"] != model_fingerprint:
            raise head.wrong(
                f"belongs to another model; got {files.printable(head.entries['model'])}; this is "
                f"{model.strip()}"
            )
