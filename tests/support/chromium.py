"""Drives a headless Chromium by its DevTools protocol, over a pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path


def where() -> str | None:
    """The path of the browser; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Page:
    """One tab. Every wait has a time limit."""

    def __init__(self, url: str, profile: Path, size: tuple[int, int] = (1100, 720)):
        read, ours_out = os.pipe()
        ours_in, write = os.pipe()

        def place() -> None:  # the protocol speaks on descriptors 3 and 4
            low, high = os.dup(read), os.dup(write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run")
        flags += ("disable-background-networking", "remote-debugging-pipe")
        flags += (f"user-data-dir={profile}", f"window-size={size[0]},{size[1]}")
        self._process = subprocess.Popen(
            [where(), *(f"--{flag}" for flag in flags), "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._out, self._in, self._rest, self._count = ours_out, ours_in, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params) -> dict:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            answer = self._receive(end)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
        raise TimeoutError(method)

    def _receive(self, end: float) -> dict:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise ConnectionError("the browser has ended")
            self._rest += part
        one, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(one)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(entry["text"])
        return message

    def js(self, expression: str):
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 30):
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.js(f"(() => {{ try {{ return {expression} }} catch {{ }} }})()")
            if found:  # while a page loads, much is not there yet
                return found
            time.sleep(0.03)
        raise AssertionError(f"never true: {expression}; {self.js('document.body.innerText')}")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, alt: bool = False, control: bool = False) -> None:
        modifiers = 1 * alt + 2 * control
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                **{"type": kind, "key": key, "code": key, "modifiers": modifiers},
                windowsVirtualKeyCode=code,
            )

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
