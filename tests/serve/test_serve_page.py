"""The chat page on the embedded model, in a headless Chromium. `tests/serve/page` has its parts, without a model."""

from __future__ import annotations

import os
from pathlib import Path

import chromium
import pytest
from serving import serving
from small_models import TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.where() is None, reason="no Chromium on this machine"),
]
ENTER, ESCAPE = 13, 27
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
DONE = f"document.querySelector('#send').textContent === 'Send' && {LAST}.querySelector('small').textContent"
LONG = "The quiet cat sat on the warm mat and looked at the rain. " * 150


def turns(page) -> list[str]:
    return page.js("[...document.querySelectorAll('.turn .body')].map(x => x.innerText.trim())")


def shot(page, name: str) -> None:
    """For eyes: MLXKV_SHOTS names a folder."""
    if folder := os.environ.get("MLXKV_SHOTS"):
        page.shot(Path(folder) / f"{name}.png")


def test_a_conversation(tmp_path):
    browser = chromium.Browser(tmp_path / "profile")
    try:
        with serving(TINY, chunk=256) as server:
            page = chromium.Page(browser, server.url)
            talk(page)
            assert page.errors == []
    finally:
        browser.close()


def ask(page, text: str, count: int) -> None:
    page.js("document.querySelector('#text').focus()")
    page.type(text)
    page.press("Enter", ENTER)
    page.until(f"document.querySelectorAll('.assistant').length === {count}")


def talk(page) -> None:
    page.until("document.querySelector('#model').textContent.endsWith('tiny')")
    assert page.js("document.querySelector('#preset').textContent") == "--kv int4"
    ask(page, "What is the capital of France?", 1)
    note = page.until(DONE)
    assert turns(page)[0] == "What is the capital of France?" and "Paris" in turns(page)[1]
    assert "tokens" in note and "0 tokens reused" in note
    ask(page, "Repeat it", 2)
    assert " 0 tokens reused" not in page.until(DONE)
    page.until("document.querySelector('#memory').textContent.includes('of 8,192')")
    shot(page, "chat")
    # A long prompt tells how far it is read; then the reply is stopped, and goes on.
    page.js("document.querySelector('#new').click()")
    page.until("document.querySelectorAll('.turn').length === 0")
    page.js(
        f"document.querySelector('#text').value = {LONG!r}; document.querySelector('#text').focus()"
    )
    page.press("Enter", ENTER)
    page.until("document.body.innerText.match(/Reading [\\d,]+ of [\\d,]+ tokens/)?.[0]")
    shot(page, "reading")
    page.press("Escape", ESCAPE)
    page.until("document.body.innerText.includes('Stopped.')")
    # A reply that was cut off goes on where it ended.
    page.js("document.querySelector('#new').click()")
    page.until("document.querySelectorAll('.turn').length === 0")
    page.js("document.querySelector('#settings').click()")
    page.js(
        "document.querySelector('#max-tokens').value = 21; document.querySelector('#save-options').click()"
    )
    ask(page, "Tell me a story about a mouse.", 1)
    page.until("document.body.innerText.includes('Cut off at 21 tokens')")
    half = turns(page)[1]
    # The button comes when the reply has ended, which is after the words that say why.
    page.until(
        "[...document.querySelectorAll('.ending button')].find(x => x.textContent === 'Continue').click() === undefined"
    )
    page.until("document.body.innerText.includes('Cut off at 42 tokens')")
    assert turns(page)[1].startswith(half) and len(turns(page)[1]) > len(half)
    shot(page, "continued")
