"""The memory gauge: this chat, all chats, and what 16 bits would take, or why there is nothing to compare."""

import pytest

pytestmark = pytest.mark.slow
MEMORY = "document.querySelector('#memory').innerText"
FIGURES = "document.querySelector('#figures').textContent"
SMALL = "document.querySelector('small').textContent"
ROWS = "[...document.querySelectorAll('#figures tbody tr')].map(r => [...r.cells].map(c => c.textContent))"


def test_what_a_chat_takes_and_saves(tab, server):
    assert "no cache yet" in tab.until(FIGURES)
    tab.ask("hello")
    tab.until(f"{MEMORY} === '4,096 of 8,192 tokens · saves 69 %'")
    tab.shows("document.querySelector('#level').style.width", "50%")
    meter = "document.querySelector('[role=meter]')"
    tab.shows(f"{meter}.getAttribute('aria-valuetext')", "4,096 of 8,192 tokens of the context")
    tab.click("#gauge summary")
    rows = [
        ["This chat", "4,096", "5.0 MiB", "16.0 MiB", "69 %"],
        ["All chats here", "", "6.0 MiB", "20.0 MiB", "70 %"],
    ]
    tab.shows(ROWS, rows)  # the server's own row comes with its answer
    tab.until(f"{FIGURES}.includes('room to grow: 7.0 MiB for this chat, 9.0 MiB for all.')")
    tab.until(f"{SMALL}.includes('cache 5.0 MiB of 16.0 MiB')")
    server.document["memory"]["bytes"] = 4 << 20
    tab.until(f"{FIGURES}.includes('less at rest than during a reply')")
    # Each chat has its own; a new one has none.
    tab.button("New chat")
    tab.until(f"{MEMORY} === 'Memory'")
    tab.shows("document.querySelector('#level').style.width", "0%")


def test_what_a_share_came_to_is_said(tab, server):
    server.document["chosen"] = "99%: fill-6.5, same next token 99.8 %"
    tab.reload()
    tab.ask("hello")
    tab.until(f"{FIGURES}.includes('Chosen for 99%: fill-6.5, same next token 99.8 %.')")


def test_no_saving_is_claimed_where_nothing_is_compressed(tab, server):
    note = "nothing compressed yet (exact up to 192 tokens)"
    server.kv |= {"tokens": 30, "bytes": 240 << 10, "bytes_fp16": 120 << 10, "note": note}
    server.document["memory"] |= {"bytes": 240 << 10, "bytes_fp16": 120 << 10}
    tab.ask("hello")
    tab.until(f"{MEMORY} === '30 of 8,192 tokens'")
    tab.until(f"{ROWS}.map(row => row[4]).join() === '–,–'")
    tab.until(f"{FIGURES}.includes('This chat: {note}.')")
    tab.until(f"{SMALL}.includes(' · cache 240 KiB · ')")


def test_numbers_that_are_for_the_first_key_alone(tab, server):
    server.document["memory"] = {"bound_bytes": 8 << 30}
    tab.ask("hello")
    tab.until("document.querySelector('#preset').textContent === '--kv int4'")  # it has answered
    tab.until(f"{ROWS}.length === 1")
    assert "All chats" not in tab.js(FIGURES)


def test_a_chat_on_another_model_has_the_context_of_that_model(tab, server):
    tab.shows("document.querySelector('#models').hidden", True)
    server.document["models"] = ["scripted", "other"]
    server.kv["context"] = 16384
    tab.reload()
    tab.until("document.querySelector('#model').textContent === 'scripted'")
    tab.click("#settings")
    tab.shows("document.querySelector('#models').hidden", False)
    tab.js("document.querySelector('#for-model').value = 'other'")
    tab.button("Save")
    tab.ask("hello")
    assert server.asked[0]["model"] == "other"
    tab.until(f"{MEMORY} === '4,096 of 16,384 tokens · saves 69 %'")
    tab.until(f"{ROWS}.length === 1")  # others are about the first model
    del server.kv["context"]
    tab.ask("again")
    tab.until(f"{MEMORY} === '4,096 tokens · saves 69 %'")
    # The server was started without it, and the page is asked before it knows.
    server.document["models"], server.delay = ["scripted"], 0.5
    tab.reload()
    tab.ask("more")
    assert "model" not in server.asked[2]
    tab.until(f"{MEMORY} === '4,096 of 8,192 tokens · saves 69 %'")
