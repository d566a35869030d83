"""The chat page on the embedded model, in a headless Chromium. `tests/serve/page` has its parts, without a model."""

import chromium
import pytest
from serving import serving
from small_models import TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.where() is None, reason="no Chromium on this machine"),
]
ENTER = 13
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
DONE = f"document.querySelector('#send').textContent === 'Send' && {LAST}.querySelector('small').textContent"
LONG = "The quiet cat sat on the warm mat and looked at the rain. " * 150


@pytest.fixture
def page(tmp_path):
    browser = chromium.Browser(tmp_path / "profile")
    try:
        with serving(TINY, chunk=256) as server:
            page = chromium.Page(browser, server.url)
            page.until("document.querySelector('#model').textContent.endsWith('tiny')")
            yield page
            assert page.errors == []
    finally:
        browser.close()


def ask(page, text: str, count: int) -> str:
    """The reply, the conversation's `count`th."""
    page.js("document.querySelector('#text').focus()")
    page.type(text)
    page.press("Enter", ENTER)
    page.until(f"document.querySelectorAll('.assistant').length === {count}")
    page.until(DONE)
    return page.js(f"{LAST}.querySelector('.body').innerText")


def new_chat(page) -> None:
    page.js("document.querySelector('#new').click()")
    page.until("document.querySelectorAll('.turn').length === 0")


def test_a_conversation(page):
    assert page.js("document.querySelector('#preset').textContent") == "--kv int4"
    assert "Paris" in ask(page, "What is the capital of France?", 1)
    assert "0 tokens reused" in page.js(DONE)
    ask(page, "Repeat it", 2)
    assert " 0 tokens reused" not in page.js(DONE)
    page.until("document.querySelector('#memory').textContent.includes('of 8,192')")
    # A long prompt tells how far it is read.
    new_chat(page)
    page.js(f"document.querySelector('#text').value = {LONG!r}")
    page.js("document.querySelector('#text').focus()")
    page.press("Enter", ENTER)
    page.until("document.body.innerText.match(/Reading [\\d,]+ of [\\d,]+ tokens/)?.[0]")
    page.js("document.querySelector('#send').click()")
    page.until("document.body.innerText.includes('Stopped.')")
    # A reply that was cut off goes on where it ended.
    new_chat(page)
    page.js("document.querySelector('#settings').click()")
    page.js("document.querySelector('#max-tokens').value = 21")
    page.js("document.querySelector('#save-options').click()")
    half = ask(page, "Tell me a story about a mouse.", 1)
    page.until(
        "[...document.querySelectorAll('.ending button')].find(x => x.textContent === 'Continue').click() === undefined"
    )
    page.until("document.body.innerText.includes('Cut off at 42 tokens')")
    whole = page.js(f"{LAST}.querySelector('.body').innerText")
    assert whole.startswith(half) and len(whole) > len(half)
