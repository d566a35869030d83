"""The server behind a launched program: one that answers, or one of our own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from mlxkv.errors import MachineError, UserError
from mlxkv.serve.launch.tools import KEY, Served

USUAL = "http://127.0.0.1:8080"
ANSWER_SECONDS = 5.0
END_SECONDS = 30.0  # sessions go to disk meanwhile


def ask(url: str, key: str) -> Served | None:
    """The server at a URL, None where no server of ours answers. Raises UserError for a wrong key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Not by a proxy: the server is asked for by its address.
        with build_opener(ProxyHandler({})).open(
            Request(f"{url}/v1/kv", headers=headers), timeout=ANSWER_SECONDS
        ) as response:
            found = json.loads(response.read(1 << 20))
        return Served(url, key, str(found["model"]), int(found["longest_tokens"]))
    except HTTPError as error:
        if error.code in (401, 429):
            raise UserError(
                f"[--api-key] the server at {url} refuses this key; got "
                f"{'one' if key else 'none'}; set --api-key or {KEY}"
            ) from None
        return None
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None


class Own:
    """A server of our own, on a free port of this machine, with a key of its own.

    What it says goes to a file: a program that draws on the terminal would be written over."""

    def __init__(self, options: list[str]):
        self.key = secrets.token_urlsafe(24)
        command = [sys.executable, "-m", "mlxkv", "serve", "--port", "0", *options]
        self._said: IO[bytes] = TemporaryFile()  # noqa: SIM115 - as long as the server
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            env=os.environ | {KEY: self.key},
            start_new_session=True,  # Ctrl-C is for the program, and not for its server
        )

    def wait(self) -> Served:
        """Wait until it answers. Raises MachineError where it ends before that."""
        while True:
            for line in self._output().splitlines():
                if line.startswith("chat: "):
                    found = ask(line.split()[1].rstrip("/"), self.key)
                    if found is not None:
                        return found
            if self._process.poll() is not None:
                last = (self._output().strip().splitlines() or ["no output"])[-1]
                raise MachineError(f"[launch] the server did not start: {last}")
            time.sleep(0.1)

    def _output(self) -> str:
        descriptor = self._said.fileno()  # pread: reading must not move the server's position
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """End it as Ctrl-C would: sessions are put away."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def name_of(model: str) -> str:
    """The name under which a server of this model is asked."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
