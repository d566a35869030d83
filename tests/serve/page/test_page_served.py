"""The page with `mlxkv serve` itself, on the embedded model; other tests of this room have no model."""

import pytest
from serving import serving
from small_models import TINY

pytestmark = pytest.mark.slow
LONG = "The quiet cat sat on the warm mat and looked at the rain. " * 150
REUSED = "[...document.querySelectorAll('.assistant small')].at(-1).textContent"


@pytest.fixture
def server():
    with serving(TINY, chunk=256) as server:
        yield server


def test_a_conversation(tab):
    tab.until("document.querySelector('#model').textContent.endsWith('tiny')")
    assert tab.js("document.querySelector('#preset').textContent") == "--kv int4"
    tab.ask("What is the capital of France?")
    assert "Paris" in tab.turns[1]
    tab.until(f"{REUSED} && !{REUSED}.includes('reused')")
    tab.ask("Repeat it")
    tab.until(f"/[1-9]\\d* tokens reused/.test({REUSED})")
    tab.until("document.querySelector('#memory').textContent.includes('of 8,192')")
    # A long prompt tells how far it is read.
    tab.new_chat()
    tab.js(f"document.querySelector('#text').value = {LONG!r}")
    tab.js("document.querySelector('#text').focus()")
    tab.press("Enter", 13)
    tab.until("document.body.innerText.match(/Reading [\\d,]+ of [\\d,]+ tokens/)?.[0]")
    tab.js("document.querySelector('#send').click()")
    tab.sees("Stopped.")
    # A reply that was cut off goes on where it ended.
    tab.new_chat()
    tab.click("#settings")
    tab.js("document.querySelector('#max-tokens').value = 21")
    tab.button("Save")
    tab.ask("Tell me a story about a mouse.")
    half = tab.turns[-1]
    tab.button("Continue")
    tab.sees("Cut off at 42 tokens")
    assert tab.turns[-1].startswith(half) and len(tab.turns[-1]) > len(half)
