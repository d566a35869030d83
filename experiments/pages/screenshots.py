"""Take the pictures of the chat page: `python -m experiments.pages.screenshots` (needs Chromium and Pillow).

SmolLM2 answers, except where a picture needs what it does not write (reasoning, Markdown):
there a server says what is written below, and the page calls its model "scripted".
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
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
from mlxkv.corpora import corpus  # noqa: E402

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
        """Take a screenshot in at most 64 colours, of which text needs fewer."""
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
    text = folder / "glass.txt"
    text.write_text(corpus.passages("evaluation")["prose"][1200:3600], encoding="utf-8")
    with serving("smollm2", max_tokens=100) as server:
        tab = opened(browser, server.url)
        tab.js("localStorage.setItem('mlxkv.settings', '{\"maxTokens\": 60}')")
        tab.fresh()
        tab.drop_files(text)
        tab.until("!!document.querySelector('#attached li')")
        tab.ask("What is glass made from?")
        tab.ask("Thank you!")
        tab.until("document.querySelector('#memory').innerText.includes('saves')")
        tab.take(folder / "page-chat.png")
        tab.click("#gauge summary")
        tab.until("document.querySelector('#figures table')?.textContent.includes('%') ?? false")
        time.sleep(5)  # the server puts the chat away, and the page asks every 2 s
        tab.take(folder / "page-memory.png")
        tab.click("#gauge summary")
        tab.theme("dark")
        tab.size(390, 700, phone=True)
        tab.until("innerWidth === 390")
        tab.take(folder / "page-phone.png")
    text.unlink()


def written(browser: chromium.Browser, folder: Path) -> None:
    with scripted() as server:
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
        tab.theme("light")
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
