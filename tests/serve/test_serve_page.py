"""The chat page in a headless Chromium, by keyboard alone."""

from __future__ import annotations

import os
from pathlib import Path

import chromium
import pytest
from serving import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.where() is None, reason="no Chromium on this machine"),
]
ENTER, ESCAPE, UP, DOWN, BACKSPACE = 13, 27, 38, 40, 8
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
DONE = f"document.querySelector('#send').textContent === 'Send' && {LAST}?.querySelector('small').textContent"
CURRENT = "document.querySelector('[aria-current=true]').textContent"


def turns(page) -> list[str]:
    return page.js("[...document.querySelectorAll('.turn > :first-child')].map(x => x.textContent)")


def shot(page, name: str) -> None:
    """For eyes: MLXKV_SHOTS names a folder."""
    if folder := os.environ.get("MLXKV_SHOTS"):
        page.shot(Path(folder) / f"{name}.png")


def test_conversations_by_keyboard(tmp_path):
    with serving("tiny") as server:
        page = chromium.Page(server.url, tmp_path / "profile")
        try:
            talk(page, server)
            assert page.errors == []
        finally:
            page.close()


def talk(page, server) -> None:
    page.until("document.querySelector('#model').textContent === 'tiny'")
    assert page.js("document.querySelector('#preset').textContent") == "--kv int4"
    page.type("What is the capital of France?")
    page.press("Enter", ENTER)
    note = page.until(DONE)
    assert turns(page)[0] == "What is the capital of France?" and "Paris" in turns(page)[1]
    assert "tokens" in note and "fp16" in note and "0 tokens reused" in note
    page.type("Repeat it")
    page.press("Enter", ENTER)
    page.until(f"document.querySelectorAll('.assistant').length === 2 && {DONE}")
    assert " 0 tokens reused" not in page.js(f"{LAST}.querySelector('small').textContent")
    assert page.until("document.querySelector('#level').style.width !== '0%'")
    shot(page, "chat")
    # Stop in the middle, in a second conversation.
    page.press("k", 75, control=True)
    assert turns(page) == []
    page.js(
        "document.querySelector('#text').value = 'Tell me a long story about a mouse. '.repeat(60)"
    )
    page.press("Enter", ENTER)
    page.until("document.querySelector('#send').textContent === 'Stop'")
    shot(page, "stop")
    page.press("Escape", ESCAPE)
    assert page.until(DONE)
    page.until("document.querySelector('#send').textContent === 'Send'")
    # Both are there, also after the page was loaded again; then one is thrown away.
    assert "long story" in page.js(CURRENT)
    page.press("ArrowDown", DOWN, alt=True)
    assert "France" in page.js(CURRENT) and len(turns(page)) == 4
    page.call("Page.reload")
    page.until("document.querySelectorAll('#chats li').length === 2")
    page.press("Backspace", BACKSPACE, alt=True)
    assert page.js("document.querySelectorAll('#chats li').length") == 1
    # Markup in a message is text.
    page.press("k", 75, control=True)
    page.type("<img src=x onerror=alert(1)>")
    page.press("Enter", ENTER)
    page.until(DONE)
    assert page.js("document.querySelectorAll('.turn img').length") == 0
