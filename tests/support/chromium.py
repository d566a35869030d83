"""Drives a headless Chromium by its DevTools protocol, over a pipe."""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

WIDTHS = {"phone": (390, 780), "tablet": (768, 900), "desktop": (1280, 800)}


def where() -> str | None:
    """The path of the browser; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Browser:
    """One process, for any number of tabs. Every wait has a time limit."""

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 800)):
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
        self.heard: dict[str, list[str]] = {}  # errors, by the session of a tab

    def call(self, method: str, session: str | None = None, **params) -> dict:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
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
        errors = self.heard.setdefault(message.get("sessionId", ""), [])
        if message.get("method") == "Runtime.exceptionThrown":
            errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                errors.append(f"{entry['text']} {entry.get('url', '')}")
        return message

    def context(self) -> str:
        """A profile of its own: no other context sees its storage."""
        return self.call("Target.createBrowserContext")["browserContextId"]

    def drop(self, context: str) -> None:
        self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


class Page:
    """One tab. errors: exceptions, and what the browser logs as an error."""

    def __init__(self, browser: Browser, url: str, context: str | None = None):
        self.browser = browser
        made = {"browserContextId": context} if context else {}
        self._target = browser.call("Target.createTarget", url="about:blank", **made)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)[
            "sessionId"
        ]
        self.errors = browser.heard.setdefault(self._session, [])
        for one in ("Runtime", "Log", "Page"):
            self.call(f"{one}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params) -> dict:
        return self.browser.call(method, self._session, **params)

    def front(self) -> None:
        self.call("Page.bringToFront")

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, name: str) -> None:
        """Be as wide as one of `WIDTHS`; a phone is touched."""
        width, height = WIDTHS[name]
        phone = name == "phone"
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def theme(self, name: str) -> None:
        """light or dark"""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def js(self, expression: str):
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 30):
        """Wait until an expression is true, and return its value."""
        return self._wait(expression, bool, "never true", seconds)

    def shows(self, expression: str, value, seconds: float = 30) -> None:
        """Wait until an expression has a value: what a page does about an answer comes after the answer."""
        self._wait(expression, lambda found: found == value, f"never {value!r}", seconds)

    def _wait(self, expression: str, right, never: str, seconds: float):
        end, found = time.monotonic() + seconds, None
        while time.monotonic() < end:
            try:
                found = self.js(f"(() => {{ try {{ return {expression} }} catch {{ }} }})()")
                if right(found):  # while a page loads, much is not there yet
                    return found
            except AssertionError as gone:  # asked of a page that has just made way for another
                if not re.search("navigated|execution context", str(gone)):
                    raise
            time.sleep(0.03)
        text = self.js("document.body.innerText")
        raise AssertionError(f"{never}: {expression}; last {found!r}; {text}")

    def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does: what covers it gets the click."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.until(f"!!{found}")
        self.js(f"{found}.scrollIntoView({{block: 'nearest'}})")
        box = self.js(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def drop_files(self, *paths: Path) -> None:
        """Drag files onto the middle of the page and let them go."""
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=400, y=300, data=data)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(
        self,
        key: str,
        code: int,
        alt: bool = False,
        control: bool = False,
        shift: bool = False,
        command: bool = False,
        commands: tuple[str, ...] = (),
    ) -> None:
        """Press a key. commands: what a text box makes of it on a Mac, such as deleteWordBackward."""
        modifiers = 1 * alt + 2 * control + 4 * command + 8 * shift
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                **{"type": kind, "key": key, "code": key, "modifiers": modifiers},
                windowsVirtualKeyCode=code,
                commands=list(commands) if kind == "rawKeyDown" else [],
            )

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
