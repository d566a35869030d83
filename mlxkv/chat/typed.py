"""Read what a user types in the terminal: messages of several lines, history, completion. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import glob
import os
import select
import sys

from mlxkv import files
from mlxkv.console import cache_dir

QUOTE = '"""'
PROMPT, MORE = "> ", ". "
PASTED = 0.03  # seconds: lines that follow sooner were pasted
FILES = ("/save ", "/load ")


class History:
    """Line editing with a history file in the user's cache folder, if readline exists. Tab completes commands and the
    files of /save and /load."""

    def __init__(self, commands: tuple[str, ...] = ()):
        self.commands = commands

    def __enter__(self) -> History:
        try:
            import readline
        except ImportError:
            self.readline = None
            return self
        self.readline, self.path = readline, cache_dir() / "chat_history"
        with contextlib.suppress(OSError):  # no history yet, or not readable
            readline.read_history_file(self.path)
        readline.set_history_length(1000)
        readline.set_completer_delims("")
        readline.set_completer(lambda text, state: (*self.choices(text), None)[state])
        libedit = "libedit" in (readline.__doc__ or "")  # as in Python on a Mac
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        if not libedit:  # Python switches it off; libedit has none
            readline.parse_and_bind("set enable-bracketed-paste on")
        return self

    def choices(self, text: str) -> list[str]:
        """Return the completions of a line that begins with `text`."""
        if text.startswith(FILES):
            command, _, name = text.partition(" ")
            names = sorted(glob.glob(glob.escape(os.path.expanduser(name)) + "*"))
            return [f"{command} {path}{'/' * os.path.isdir(path)}" for path in names]
        return [command for command in self.commands if text and command.startswith(text)]

    def __exit__(self, *exc) -> None:
        if self.readline:
            self.readline.set_completer(None)
            mask_before = os.umask(0o077)  # others must not read it
            with contextlib.suppress(OSError):  # a read-only home is no reason to fail
                files.make_folder(self.path.parent)
                self.readline.write_history_file(self.path)
                os.chmod(self.path, 0o600)
            os.umask(mask_before)


def read_message() -> str:
    '''Read a message: a line; lines that end with a backslash and the next one; all lines from a """ to the
    next; or all lines that were pasted together. Raises EOFError at the end of the input.'''
    line = input(PROMPT)
    if line.lstrip().startswith(QUOTE):
        lines = [line.lstrip().removeprefix(QUOTE)]
        while QUOTE not in lines[-1]:
            try:
                lines.append(input(MORE))
            except EOFError:  # counts as the end of the message
                break
        lines[-1] = lines[-1].partition(QUOTE)[0]
    else:
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(MORE))
        while _more_waits():
            lines.append(input())
    return "\n".join(lines).strip().encode("utf-8", "replace").decode("utf-8")


def _more_waits() -> bool:
    """Return whether the terminal already has more to read: the rest of a paste."""
    if not sys.stdin.isatty():
        return False
    try:
        return bool(select.select([sys.stdin], [], [], PASTED)[0])
    except (OSError, ValueError, TypeError):  # stdin was replaced by an object that is not a file
        return False
