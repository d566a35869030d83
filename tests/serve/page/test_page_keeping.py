"""Nothing is lost: reloads, two tabs, drafts. Files go with a message as text."""

import pytest
from serving import until

pytestmark = pytest.mark.slow
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"


def test_a_reload_during_a_reply(tab, server):
    server.says(("think", "Hm."), ("say", "Once upon"), ("wait", server.pause()))
    tab.ask("A story", wait=False)
    tab.sees("Once upon")
    tab.reload()
    tab.turns_are("A story", "Once upon")
    tab.sees("The page was closed or reloaded during this reply.")
    server.says(("say", " a time"), ("end", "stop"))
    tab.button("Continue")
    tab.until("document.querySelectorAll('.turn .body')[1].innerText.trim() === 'Once upon a time'")
    assert server.asked[1]["continue_final_message"] is True


def test_a_reload_before_the_first_word(tab, server):
    server.says(("read", 1, 9), ("wait", server.pause()))
    tab.ask("A story", wait=False)
    tab.sees("Reading 1 of 9 tokens")
    tab.reload()
    tab.shows("document.querySelector('.turn .body').innerText.trim()", "A story")
    tab.button("Retry")
    tab.sees("You said: A story")
    tab.idle()
    tab.turns_are("A story", "You said: A story")


def test_two_tabs_add_to_each_other(opened, server):
    one, two = opened(), opened()
    one.ask("from the first tab")
    two.ask("from the second tab")
    for tab in (one, two):
        tab.has_chats(2)
    one.reload()
    two.reload()
    for tab, text in ((one, "from the first tab"), (two, "from the second tab")):
        until(lambda tab=tab: sorted(tab.chats) == ["from the first tab", "from the second tab"])
        tab.turns_are(text, f"You said: {text}")


def test_two_tabs_on_one_chat(opened, server):
    one = opened()
    one.ask("first")
    two = opened()
    two.click("#chats .open")
    two.sees("You said: first")
    # What one says, the other shows.
    more = server.pause()
    server.says(("say", "grow"), ("wait", more), ("say", "n"), ("end", "stop"))
    one.ask("second", wait=False)
    two.until("document.querySelectorAll('.turn').length === 4")
    two.sees("grow")
    more.set()
    two.until(f"{LAST}.querySelector('.body').innerText.trim() === 'grown'")
    one.idle()
    # Both at once: neither is lost, they are versions of one another.
    holds = [server.pause(), server.pause()]
    server.says(("wait", holds[0]), ("say", "to the one"), ("end", "stop"))
    one.ask("left", wait=False)
    until(lambda: len(server.asked) == 3)  # the first of the two replies is this one's
    two.until("document.querySelectorAll('.turn').length === 6")
    two.button("Edit", ".turn.user:last-of-type, .turn.user")
    two.until("!!document.querySelector('.edit textarea')")
    two.js("document.querySelector('.edit textarea').value = 'right'")
    server.says(("wait", holds[1]), ("say", "to the other"), ("end", "stop"))
    two.button("Send", ".edit")
    for hold in holds:
        hold.set()
    one.sees("to the one")
    two.sees("to the other")
    one.idle()
    two.idle()
    one.reload()
    one.until("document.body.innerText.includes('/ 2')")
    shown = "to the one" if "to the one" in one.turns else "to the other"
    one.button("Version before" if shown == "to the other" else "Version after", ".user")
    one.sees("to the other" if shown == "to the one" else "to the one")


def test_a_reply_goes_on_while_another_chat_is_shown(tab, server):
    more = server.pause()
    server.says(("say", "Slow"), ("wait", more), ("say", " and steady"), ("end", "stop"))
    tab.ask("slow one", wait=False)
    tab.sees("Slow")
    tab.new_chat()
    tab.until("document.querySelectorAll('#chats .busy').length === 1")
    tab.ask("quick one")
    tab.last_is("You said: quick one")
    more.set()
    tab.until("document.querySelectorAll('#chats .busy').length === 0")
    tab.js(
        "[...document.querySelectorAll('#chats .open')].find(x => x.textContent === 'slow one').click()"
    )
    tab.sees("Slow and steady")
    assert not server.left.is_set()


def test_what_is_not_sent_yet_stays(tab, tmp_path):
    (tmp_path / "notes.txt").write_text("a fact")
    tab.type("half a question")
    tab.drop_files(tmp_path / "notes.txt")
    tab.sees("notes.txt")
    tab.reload()
    tab.shows("document.querySelector('#text').value", "half a question")
    tab.sees("notes.txt")
    # Another chat has a draft of its own.
    tab.ask("")
    tab.new_chat()
    tab.shows("document.querySelector('#text').value", "")


def test_without_a_database_the_page_works(opened, browser, server):
    tab = opened()
    tab.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="Object.defineProperty(globalThis, 'indexedDB', {value: undefined})",
    )
    tab.reload()
    tab.sees("This browser stores nothing for this page")
    tab.ask("hello")
    tab.ask("again")
    tab.turns_are("hello", "You said: hello", "again", "You said: again")
    tab.chats_are("hello")
    tab.button("Delete hello")
    tab.button("Undo")
    tab.sees("You said: again")


def test_a_full_storage_loses_nothing_on_the_screen(tab, server):
    tab.ask("kept")
    tab.js(
        "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError') }"
    )
    tab.ask("not kept")
    tab.turns_are("kept", "You said: kept", "not kept", "You said: not kept")
    tab.sees("This browser's storage is full")
    tab.ask("goes on")
    assert len(server.asked[2]["messages"]) == 5


def test_two_clicks_ask_once(tab, server):
    tab.ask("hello")
    hold = server.pause()
    server.says(("wait", hold), ("say", "anew"), ("end", "stop"))
    tab.js(
        "(b => { b.click(); b.click() })"
        "([...document.querySelectorAll('button')].find(x => x.textContent === 'Regenerate'))"
    )
    tab.until("document.querySelector('#send').textContent === 'Stop'")
    hold.set()
    tab.sees("2 / 2")
    tab.last_is("anew")
    tab.idle()
    assert len(server.asked) == 2


def test_the_address_names_the_chat(opened, server):
    one = opened()
    one.ask("named")
    address = one.js("location.href")
    assert "#" in address
    two = opened()
    two.call("Page.navigate", url=address)
    two.turns_are("named", "You said: named")
    two.reload()
    two.turns_are("named", "You said: named")


def test_chats_are_renamed_searched_and_saved(tab):
    tab.ask("apples")
    for text in ("pears", "plums", "figs", "dates"):
        tab.new_chat()
        tab.ask(text)
    tab.button("Rename dates")
    tab.js("document.querySelector('#chats input').value = 'Fruit of palms'")
    tab.js("document.querySelector('#chats input').blur()")
    tab.chats_are("Fruit of palms", "figs", "plums", "pears", "apples")
    tab.js(
        "globalThis.saved = null; URL.createObjectURL = (blob) => { globalThis.saved = blob; return '#'; }"
    )
    tab.button("Save Fruit of palms as Markdown")
    tab.until("!!globalThis.saved")
    text = "# Fruit of palms\n\n## You\n\ndates\n\n## Reply\n\nYou said: dates\n"
    assert tab.js("globalThis.saved.text()") == text
    search = "document.querySelector('#search').value = {!r}; document.querySelector('#search').oninput()"
    tab.js(search.format("plum"))
    tab.chats_are("plums")
    tab.js(search.format("said: dates"))  # in what was said, too
    tab.chats_are("Fruit of palms")


def test_an_empty_chat_offers_prompts(tab, server):
    tab.until("document.querySelectorAll('.examples button').length === 3")
    tab.click(".examples button")
    tab.until("document.querySelectorAll('.turn').length === 2")
    tab.idle()
    assert server.asked[0]["messages"][0]["content"].startswith("Explain what a KV cache is")


# -- files go with a message as text


def test_dropped_files_are_read_as_text(tab, server, tmp_path):
    (tmp_path / "notes.md").write_text("A fact.\n```\ncode\n```\n", encoding="utf-8")
    (tmp_path / "wide.txt").write_bytes("Größe".encode("utf-16"))
    tab.drop_files(tmp_path / "notes.md", tmp_path / "wide.txt")
    tab.until("document.querySelectorAll('#attached li').length === 2")
    tab.ask("What is in them?")
    assert server.asked[0]["messages"] == [
        {
            "role": "user",
            "content": "File notes.md:\n````\nA fact.\n```\ncode\n```\n````\n\n"
            "File wide.txt:\n```\nGröße\n```\n\nWhat is in them?",
        }
    ]
    tab.shows("document.querySelectorAll('#attached li').length", 0)
    summaries = "[...document.querySelectorAll('.file summary')].map(x => x.textContent)"
    tab.shows(summaries, ["notes.md · 21 B", "wide.txt · 12 B"])
    tab.shows("document.querySelector('.turn .body').innerText.trim()", "What is in them?")
    tab.reload()
    tab.ask("And now?")
    assert "A fact." in server.asked[1]["messages"][0]["content"]


def test_what_is_no_text_is_refused(tab, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff\xfe")
    (tmp_path / "zeros.bin").write_bytes(b"abc\0def")
    (tmp_path / "large.txt").write_bytes(b"x" * ((4 << 20) + 1))
    (tmp_path / "long.txt").write_bytes(b"word " * 8000)
    names = ("picture.png", "zeros.bin", "large.txt", "long.txt")
    tab.drop_files(*(tmp_path / name for name in names))
    tab.sees(
        "These files have about 10,000 tokens; this model takes 8,192. Not attached: "
        "picture.png (not text), zeros.bin (not text), large.txt (4.0 MiB; at most 4.0 MiB). "
        "pdftotext makes text of a PDF; for images run mlx-vlm by mlxkv run."
    )
    tab.button("Remove long.txt")
    tab.shows("document.querySelectorAll('#attached li, .notice').length", 0)


def test_a_file_can_be_picked_and_taken_away(tab, server, tmp_path):
    (tmp_path / "notes.txt").write_text("A fact.")
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", nodeId=root, selector="#picker")["nodeId"]
    tab.call("DOM.setFileInputFiles", files=[str(tmp_path / "notes.txt")], nodeId=node)
    tab.until("document.querySelectorAll('#attached li').length === 1")
    tab.button("Remove notes.txt")
    tab.until("document.querySelectorAll('#attached li').length === 0")
    tab.ask("hello")
    assert server.asked[0]["messages"][0]["content"] == "hello"


def test_dragged_text_belongs_to_the_text_box(tab):
    assert tab.js(
        "(() => { const data = new DataTransfer(); data.setData('text/plain', 'words'); "
        "const event = new DragEvent('dragover', {dataTransfer: data, bubbles: true, cancelable: true}); "
        "document.querySelector('#text').dispatchEvent(event); "
        "return !event.defaultPrevented && document.querySelector('#drop').hidden })()"
    )
