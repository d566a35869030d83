"""Packs: texts that are read once, as the start of conversations. `mlxkv read` makes one, `mlxkv info` prints it.

A pack is a saved session (`mlxkv.formats.session`) whose system prompt is the text of files. What is imported here is
light: files and options are refused before a model is read.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlxkv import console
from mlxkv.catalog.aliases import DEFAULT, is_model, resolve
from mlxkv.catalog.hub import cached, require
from mlxkv.catalog.option_checks import check_weights, dtype_name
from mlxkv.chat.run import check_model, text_of
from mlxkv.console import human_bytes, note, say, say_whole, user_path, working
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import session
from mlxkv.formats.names import canonical, requested
from mlxkv.formats.session import PACK, PackedFile, SessionHeader
from mlxkv.options import AdapterPath, Calibration, Dtype, Json, Kv, Model, Weights

WHERE = "read"
PREVIEW = 300  # letters that `info` shows


@dataclass(frozen=True)
class ReadOptions:
    """The command line of `mlxkv read`, in the order of `--help`. Raises UserError for values out of range."""

    files: Annotated[
        list[str], Argument(help="Text, Markdown, source code; PDF with the extra pdf.")
    ]
    model: Model = DEFAULT
    kv: Kv = "int4"
    out: Annotated[
        str | None,
        Option(
            "--out",
            "-o",
            help=f"The pack. Default: the first file's name with {PACK}.",
            rich_help_panel="Output",
        ),
    ] = None
    add: Annotated[
        str | None,
        Option(help="Continue this pack, with its model and preset.", rich_help_panel="Output"),
    ] = None
    raw: Annotated[
        bool,
        Option("--raw", help="No chat template: the text as it is.", rich_help_panel="Model"),
    ] = False
    adapter_path: AdapterPath = None
    dtype: Dtype = None
    weights: Weights = None
    calibration: Calibration = None
    json: Json = False

    def __post_init__(self):
        requested(canonical(self.kv))
        dtype_name(self.dtype)
        check_weights(self.weights)

    @property
    def path(self) -> Path:
        """Return the file of the pack. Raises UserError for another file that is there."""
        name = self.out or self.add or Path(self.files[0]).stem
        path = session.path_for(name, "--out", PACK)
        if path.exists():  # a pack may be made anew
            session.read_header(path)
        if not path.parent.is_dir():
            raise UserError(f"[--out] no such folder; got {str(path.parent)!r}")
        return path


def defaults_of(head: SessionHeader, model: str, kv: str) -> tuple[str, str]:
    """Return model and preset of a pack where the command line has the defaults. Raises UserError for a model that is
    not here: a file of somebody else's downloads nothing."""
    asked = head.entries.get("asked") or head.entries["model"]
    if model == DEFAULT and not _is_here(asked):
        name = session.printable(asked)
        raise head.wrong(f"belongs to a model that is not here; got {name}; write -m {name}")
    return (
        asked if model == DEFAULT else model,
        head.entries["kv_name"] if kv == "int4" else kv,
    )


def _is_here(model: str) -> bool:
    """Return whether a model needs no download."""
    try:
        source = resolve(model)
    except UserError:
        return False
    return bool(cached(source.repo)) if source.folder is None else source.folder.exists()


def header_of(name: str) -> SessionHeader:
    """Return the header of a pack. Raises UserError for other files."""
    head = session.read_header(session.file_named(name))
    if not session.files_of(head):
        raise head.wrong("is a session, not a pack; --load continues it")
    session.check_version(head)
    return head


def contents(names: list[str]) -> list[tuple[PackedFile, str]]:
    """Return the files and their texts. Raises UserError."""
    out = []
    for name in names:
        path = user_path(name, WHERE)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"[{WHERE}] cannot read {name!r}: {error.strerror}") from None
        text = _pdf(path) if data.startswith(b"%PDF-") else text_of(data, name)
        if not text.strip():
            raise UserError(f"[{WHERE}] no text; got {name!r}; a scanned PDF has pictures alone")
        out.append((PackedFile(path.name, hashlib.sha256(data).hexdigest(), len(data)), text))
    return out


def _pdf(path: Path) -> str:
    """Return the text of a PDF by pypdf. Raises UserError."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError:
        raise UserError(
            f"[{WHERE}] PDF needs pypdf; got {path.name!r}; pip install 'mlxkv[pdf]', or pdftotext FILE makes text"
        ) from None
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of what it mends
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
    except (PyPdfError, ValueError, KeyError, TypeError) as error:  # of damaged files
        raise UserError(f"[{WHERE}] a damaged PDF; got {path.name!r}: {error}") from None


def joined(found: list[tuple[PackedFile, str]]) -> str:
    """Return the texts one behind the other, each under the name of its file."""
    return "\n\n".join(f"# {file.name}\n\n{text.strip()}" for file, text in found)


def run_read(options: ReadOptions) -> None:
    """Read files into a pack. Raises UserError, MachineError."""
    head = None if options.add is None else header_of(options.add)
    if head is not None:
        model, kv = defaults_of(head, options.model, options.kv)
        options = replace(options, model=model, kv=kv)
    path, found = options.path, contents(options.files)
    source = resolve(options.model)
    require(source)
    if head is not None:
        check_model(head, options.model, source, options.adapter_path)
    note(f"{options.model.strip()} · --kv {options.kv.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.chat.session import Session
        from mlxkv.chat.terminal import prefill_bar, stop_on_interrupt
        from mlxkv.loading.load import load
        from mlxkv.metal.launch import device_type

    with working(f"reading {options.model.strip()}") as progress:
        loaded = load(
            options.model,
            requested(canonical(options.kv)),
            dtype=options.dtype,
            calibration=options.calibration,
            progress=progress,
            weights=options.weights,
            adapter_path=options.adapter_path,
        )
    loaded.print_report(device_type(), quiet=True)
    text, files, chat = joined(found), [file for file, _ in found], Session(loaded, raw=options.raw)
    if options.add is not None:
        before = chat.load(options.add)
        text, files = f"{before.messages[0]['content']}\n\n{text}", [*before.files, *files]
    chat.messages = [{"role": "system", "content": text}]
    with prefill_bar() as progress, stop_on_interrupt() as stop:
        whole = chat.read(progress, stop)
    if not whole:
        raise MachineError(
            f"[{WHERE}] stopped after {len(chat.tokens):,} tokens; nothing was written"
        )
    asked = (
        options.model.strip() if is_model(options.model) else str(source.folder or options.model)
    )
    chat.pack(path, files, asked)
    usage = chat.usage()
    if options.json:
        return console.print_json(
            {"pack": str(path), "tokens": len(chat.tokens), "bytes": path.stat().st_size}
            | usage.figures
        )
    say(
        f"{path}: {len(chat.tokens):,} tokens of {_files(files)}, {human_bytes(path.stat().st_size)}; "
        f"cache {usage.saving()}"
    )
    say_whole(f"mlxkv chat --with {path}")


def info(
    name: Annotated[str, Argument(metavar="FILE", help="A pack, or a session of /save.")],
    json_: Json = False,
) -> None:
    """Say what a pack or a saved session holds: model, preset, tokens, files, and how its text begins."""
    head = session.read_header(session.file_named(name))
    saved, data = session.saved_of(head, None, None), head.entries
    rows = {
        "model": session.printable(data["model"]),
        "kv": session.printable(data["kv_name"]),
        "tokens": len(saved.tokens),
        "bytes": head.path.stat().st_size,
        "mlxkv": session.printable(data.get("mlxkv_version", "")),
        "files": [{"name": x.name, "bytes": x.size, "sha256": x.sha256} for x in saved.files],
    }
    if json_:
        return console.print_json(rows)
    for key in ("model", "kv", "mlxkv"):
        say(f"{key:8}{rows[key]}")
    say(f"{'tokens':8}{rows['tokens']:,}, {human_bytes(rows['bytes'])}")
    for x in saved.files:
        line = f"{session.printable(x.name)}, {human_bytes(x.size)}, {session.printable(x.sha256)[:12]}"
        say(f"{'file':8}{line}")
    for message in saved.messages[:1]:
        start = message["content"][:PREVIEW]
        say(
            f"{'text':8}{console.one_line(start)}{'...' if len(message['content']) > PREVIEW else ''}"
        )


def _files(files: list[PackedFile]) -> str:
    return files[0].name if len(files) == 1 else f"{len(files)} files"
