"""Read what a user types: messages of several lines, history, completion."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory
from prompt_toolkit.keys import Keys
from prompt_toolkit.shortcuts import CompleteStyle

from mlxkv import files
from mlxkv.console import cache_dir

QUOTE = '"""'
PROMPT, MORE = "> ", ". "
MESSAGES = 1000  # of the history
ANSWER = Keys.CPRResponse  # where the cursor is: a terminal's, not typed


class Kept(FileHistory):
    """A history file that only its user may read. A read-only home or a full disk is no reason to fail."""

    def load_history_strings(self) -> Iterable[str]:
        """Return the last MESSAGES messages, the last one first; the file forgets those before."""
        try:
            found = list(super().load_history_strings())
        except OSError:
            return []
        if len(found) > MESSAGES:
            with contextlib.suppress(OSError), files.written(self._path) as out:
                for message in found[MESSAGES - 1 :: -1]:
                    lines = "".join(f"+{line}\n" for line in message.split("\n"))
                    out.write(f"\n# kept\n{lines}".encode())
        return found[:MESSAGES]

    @property
    def _path(self) -> Path:
        return Path(os.fsdecode(self.filename))

    def store_string(self, string: str) -> None:
        """Append a message."""
        with contextlib.suppress(OSError):
            files.make_folder(self._path.parent)
            self._path.touch(0o600)
            super().store_string(string)


class Commands(Completer):
    """Completes commands, and the files of /save and /load."""

    def __init__(self, commands: tuple[str, ...]):
        self.commands = commands

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Yield the ends of a line that begins as the one in front of the cursor."""
        text = document.text_before_cursor
        found = [command for command in self.commands if text and command.startswith(text)]
        if text.startswith(("/save ", "/load ")):
            text = text[len("/save ") :]
            paths = sorted(glob.glob(glob.escape(os.path.expanduser(text)) + "*"))
            found = [path + "/" * os.path.isdir(path) for path in paths]
        yield from (Completion(end, -len(text)) for end in found)


class Typed:
    """Reads messages: in a terminal with line editing, Tab, and a history file in the user's cache folder."""

    def __init__(self, commands: tuple[str, ...] = ()):
        self.line = input
        if sys.stdin.isatty() and sys.stdout.isatty():
            # A line with more behind it was pasted, in a terminal that does not mark what is pasted.
            pasted = Condition(
                lambda: any(x.key != ANSWER for x in get_app().key_processor.input_queue)
            )
            self.line = PromptSession(
                history=Kept(cache_dir() / "chat_history"),
                completer=Commands(commands),
                complete_while_typing=False,
                complete_style=CompleteStyle.READLINE_LIKE,
                multiline=pasted,
                prompt_continuation=lambda width, line, wrapped: "" if wrapped else MORE,
                enable_suspend=True,
            ).prompt

    def read(self) -> str:
        '''Read a message: a line; lines that end with a backslash and the next one; all lines from a """ to the
        next; or all lines that were pasted together. Raises EOFError at the end of the input.'''
        text = self.line(PROMPT)
        quoted = text.lstrip().startswith(QUOTE) and "\n" not in text
        with contextlib.suppress(EOFError):  # the end of the message, too
            while text.count(QUOTE) < 2 if quoted else text.endswith("\\"):
                text = f"{text if quoted else text[:-1]}\n{self.line(MORE)}"
        text = text.split(QUOTE)[1] if quoted else text
        return text.strip().encode("utf-8", "replace").decode("utf-8")
