"""At three widths and in both themes: nothing overflows, all can be reached, axe finds nothing."""

import json
import os
from pathlib import Path

import chromium
import pytest

REPLY = """## A plan

1. Read the *whole* text.
2. See `mlxkv fit`, or [the guide](https://example.org).

```python
print("a line that is far too long for a phone: " + ", ".join(str(i) for i in range(100)))
```

| preset | bits | what it costs |
|:--|--:|---|
| int4 | 4.25 | next to nothing on long texts |
| int2 | 2.25 | some |

#### Deep

> quoted
"""
# axe-core finds faults of accessibility in a page. It is not part of this repository.
PLACE = Path(__file__).parents[3] / "node_modules" / "axe-core" / "axe.min.js"
AXE = Path(os.environ.get("MLXKV_AXE") or PLACE)
pytestmark = pytest.mark.slow


def filled(tab, server, tmp_path):
    """A page that shows all it has: reasoning, Markdown, versions, files, a cut-off reply, an error, a notice."""
    (tmp_path / "notes.txt").write_text("A fact.\n" * 50)
    tab.drop_files(tmp_path / "notes.txt")
    server.says(("think", "Let me see."), ("say", REPLY), ("end", "stop"))
    tab.ask("What does this say, and which preset is right for a MacBook with 16 GB?")
    server.says(("say", "It begins so"), ("end", "length"))
    tab.ask("Say more")
    tab.button("Regenerate")
    tab.sees("2 / 2")
    tab.idle()
    server.says(
        ("status", 503, "[--kv-memory] 9000 tokens need 9.0 GiB of cache, the reply included")
    )
    tab.ask("Much more")
    tab.new_chat()
    tab.ask("A chat to delete")
    tab.button("Delete A chat to delete")
    tab.has_chats(1)
    tab.click("#chats .open")
    tab.until("document.querySelectorAll('.turn').length === 6")
    tab.drop_files(tmp_path / "notes.txt")
    tab.sees("No reply: [--kv-memory]")


@pytest.mark.parametrize("width", chromium.WIDTHS)
def test_widths(tab, server, tmp_path, width):
    filled(tab, server, tmp_path)
    tab.resize(width)
    tab.theme("light")
    tab.until(f"innerWidth === {chromium.WIDTHS[width][0]}")
    assert tab.js("document.documentElement.scrollWidth") <= chromium.WIDTHS[width][0]
    assert tab.js("document.documentElement.scrollHeight") <= chromium.WIDTHS[width][1]
    assert tab.js(
        "document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth"
    )
    assert tab.js("document.querySelector('header').offsetHeight") < 100  # a row, or two on a phone
    small = tab.js(
        "[...document.querySelectorAll('button, summary, select, input:not([hidden])')]"
        ".filter(x => x.checkVisibility()).map(x => [x.textContent, x.getBoundingClientRect()])"
        ".filter(([, r]) => r.width < 24 || r.height < 20).map(([t]) => t)"
    )
    assert small == []
    tab.js("document.querySelector('#log').scrollTop = 0")
    tab.click("#gauge summary")
    tab.until("document.querySelector('#gauge').open")
    box = tab.js(
        "(r => [r.left, r.right])(document.querySelector('#figures').getBoundingClientRect())"
    )
    assert box[0] >= 0 and box[1] <= chromium.WIDTHS[width][0]


def test_a_phone_can_do_all_of_it(tab, server):
    tab.resize("phone")
    tab.theme("light")
    tab.until("innerWidth === 390")
    tab.click("#text")
    tab.type("first chat")
    tab.click("#send")
    tab.sees("You said: first chat")
    tab.idle()
    tab.until("document.querySelector('#side').inert")  # not in the way of the keyboard
    tab.click("#open-side")
    tab.until("document.querySelector('#side').classList.contains('open')")
    tab.shows("document.activeElement.id", "close-side")
    tab.click("#new")
    tab.until(
        "document.querySelectorAll('.turn').length === 0 && document.querySelector('#side').inert"
    )
    tab.click("#text")
    tab.type("second chat")
    tab.click("#send")
    tab.sees("You said: second chat")
    tab.idle()
    tab.click("#open-side")
    tab.has_chats(2)
    tab.click("#chats li:last-child .open")
    tab.sees("You said: first chat")
    tab.until("!document.querySelector('#side').classList.contains('open')")
    tab.click("#open-side")
    tab.click("#chats li:last-child .delete")
    tab.has_chats(1)
    tab.until("document.activeElement.textContent === 'Undo'")
    tab.click(".notice button")
    tab.has_chats(2)
    tab.click("#open-side")
    tab.press("Escape", 27)
    tab.until("document.activeElement.id === 'open-side'")
    tab.click("#open-side")
    tab.until("document.querySelector('#side').classList.contains('open')")
    where = {"x": 380, "y": 300, "button": "left", "clickCount": 1}  # beside the drawer
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, **where)
    tab.until("!document.querySelector('#side').classList.contains('open')")
    # Whoever tabs out of the drawer has left it.
    tab.click("#open-side")
    tab.js("document.querySelector('#send').focus()")
    tab.until("!document.querySelector('#side').classList.contains('open')")


def violations(page) -> list[str]:
    """Every rule of axe that a page breaks, with the elements that break it."""
    page.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
    found = page.js(
        "axe.run(document, {resultTypes: ['violations', 'incomplete']}).then(r => JSON.stringify("
        "{passes: r.passes.length, violations: r.violations.map(v => "
        "`${v.id}: ${v.nodes.map(n => n.target.join(' ')).join(' | ')}`)}))"
    )
    found = json.loads(found)
    assert found["passes"] > 20, found  # it has looked
    return found["violations"]


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: npm install --no-save axe-core")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", chromium.WIDTHS)
def test_axe_finds_nothing(tab, server, tmp_path, width, theme):
    filled(tab, server, tmp_path)
    tab.resize(width)
    tab.theme(theme)
    tab.until(
        f"innerWidth === {chromium.WIDTHS[width][0]} && matchMedia('(prefers-color-scheme: {theme})').matches"
    )
    tab.js("document.querySelectorAll('.turn details').forEach(x => { x.open = true })")
    assert violations(tab) == []
    tab.js("document.querySelector('#gauge').open = true")
    assert violations(tab) == []
    tab.js("document.querySelector('#gauge').open = false")
    if width == "phone":
        tab.click("#open-side")
        assert violations(tab) == []
        tab.click("#close-side")
    tab.button("Edit")
    assert violations(tab) == []
    tab.click("#settings")
    tab.until("document.querySelector('#options').open")
    assert violations(tab) == []
