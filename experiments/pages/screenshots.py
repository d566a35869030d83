"""Take the ten pictures of the chat page: `python -m experiments.pages.screenshots` (needs Chromium and Pillow).

SmolLM2 answers, except where a picture needs what it does not write (reasoning, Markdown, errors):
there a server says what is written below, and the page calls its model "scripted".
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import chromium  # noqa: E402
from PIL import Image  # noqa: E402
from scripted import scripted  # noqa: E402
from serving import serving  # noqa: E402

from experiments.options import Parser  # noqa: E402
from experiments.pages.memory import FOLDER  # noqa: E402
from mlxkv import console  # noqa: E402

LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
REPLY = """The standard library can read it, and keeps the names of the columns:

```python
import csv

with open("planets.csv", newline="") as file:
    for row in csv.DictReader(file):
        print(row["name"], row["moons"])
```

| reader | a row is | names of columns |
|:--|:--|:-:|
| `csv.reader` | a list | no |
| `csv.DictReader` | a *dictionary* | **yes** |
"""
THOUGHTS = "A file of comma-separated values: the standard library is enough. I should show `DictReader`, then compare."


class Tab(chromium.Page):
    def ask(self, text: str, wait: bool = True) -> None:
        count = self.js("document.querySelectorAll('.turn').length")
        self.js(
            f"document.querySelector('#text').value = {text!r}; document.querySelector('#ask').requestSubmit()"
        )
        self.until(f"document.querySelectorAll('.turn').length === {count + 2}")
        if wait:
            self.until("document.querySelector('#send').textContent === 'Send'", 300)
            self.until(f"!!{LAST}.querySelector('footer').childNodes.length")

    def take(self, path: Path) -> None:
        """A screenshot in at most 64 colours, of which text needs fewer."""
        self.shot(path)
        Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
            path, optimize=True
        )

    def fresh(self) -> None:
        self.click("#new")
        self.until("document.querySelectorAll('.turn').length === 0")

    def size(self, width: int, height: int, phone: bool = False) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)


def opened(browser: chromium.Browser, url: str, theme: str = "light") -> Tab:
    tab = Tab(browser, url, browser.context())
    tab.theme(theme)
    tab.size(1000, 640)
    tab.until(
        "document.body.dataset.ready === 'true' && document.querySelector('#model').textContent !== '…'"
    )
    return tab


def embedded(browser: chromium.Browser, folder: Path) -> None:
    with serving("smollm2", prefill_step=128) as server:
        tab = opened(browser, server.url)
        for text in ("Who are you?", "What is the capital of France?", "What is 17 plus 26?"):
            tab.ask(text)
        tab.take(folder / "page-chat.png")
        tab.fresh()
        text = folder / "internals.md"
        text.write_text(
            (ROOT / "docs" / "internals" / "kernels.md").read_text(encoding="utf-8")[:7000],
            encoding="utf-8",
        )
        tab.drop_files(text)
        tab.until("!!document.querySelector('#attached li')")
        tab.ask("Tell me a story.", wait=False)
        tab.until(
            "document.body.innerText.match(/Reading [\\d,]+ of [\\d,]+ tokens · about/)?.[0]", 120
        )
        tab.until("document.querySelector('progress').value > 1000", 300)
        tab.take(folder / "page-reading.png")
        tab.until("document.querySelector('#send').textContent === 'Send'", 300)
        tab.click("#gauge summary")
        tab.until("document.querySelector('#figures table')?.textContent.includes('%') ?? false")
        tab.take(folder / "page-memory.png")
        text.unlink()
        tab.fresh()
        tab.click("#settings")
        tab.js(
            "document.querySelector('#max-tokens').value = 24; document.querySelector('#save-options').click()"
        )
        tab.ask("Name the months of the year.")
        tab.take(folder / "page-cut-off.png")
        tab.theme("dark")
        tab.size(390, 700, phone=True)
        tab.until("innerWidth === 390")
        tab.take(folder / "page-phone.png")
        tab.click("#open-side")
        tab.take(folder / "page-phone-chats.png")


def written(browser: chromium.Browser, folder: Path) -> None:
    with scripted() as server, tempfile.TemporaryDirectory() as temporary:
        server.usage = {"prompt_tokens": 31, "completion_tokens": 118, "total_tokens": 149}
        server.kv |= {
            "tokens": 149,
            "bytes": 1 << 20,
            "note": "nothing compressed yet (exact up to 192 tokens)",
        }
        server.document["memory"] = {"bound_bytes": 8 << 30}
        server.says(
            ("sleep", 0.5),
            ("think", THOUGHTS),
            ("sleep", 2),
            *(s for line in REPLY.splitlines(True) for s in (("say", line), ("sleep", 0.15))),
            ("end", "stop"),
        )
        tab = opened(browser, server.url, "dark")
        tab.ask("How do I read a CSV file in Python?")
        tab.take(folder / "page-markdown.png")
        server.says(("status", 503, "[--kv-memory] 9000 tokens need 2.1 GiB of cache, the reply included; "
                     "the bound is 2.0 GiB; ask for fewer tokens, or start the server with more"))  # fmt: skip
        tab.theme("light")
        tab.ask("And one with a million rows? Show all of it.")
        tab.take(folder / "page-retry.png")
        notes = Path(temporary) / "notes.txt"
        notes.write_text("The key is under the blue pot.\n" * 40, encoding="utf-8")
        tab.fresh()
        tab.ask("A chat to delete")
        tab.js("document.querySelector('#chats .delete').click()")
        tab.until("!!document.querySelector('.notice')")
        tab.drop_files(notes)
        tab.until("!!document.querySelector('#attached li')")
        tab.take(folder / "page-undo-and-files.png")
        tab.size(1000, 760)
        tab.click("#settings")
        tab.js(
            "document.querySelector('#system').value = 'Answer in one sentence.'; "
            "document.querySelector('#temperature').value = 0.7"
        )
        tab.take(folder / "page-settings.png")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("pages.screenshots", __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    folder = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = chromium.Browser(Path(profile))
        try:
            embedded(browser, folder)
            written(browser, folder)
        finally:
            browser.close()
    for path in sorted(folder.glob("page-*.png")):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    console.run_tool(main)
