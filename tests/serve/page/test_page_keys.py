"""The keyboard belongs to the text box; the page has Enter and Escape. Chats are deleted by a button."""

import pytest
from serving import until

pytestmark = pytest.mark.slow
TEXT = "document.querySelector('#text').value"
KEPT = """new Promise(done => { const open = indexedDB.open('mlxkv', 1); open.onsuccess = () => {
    const all = open.result.transaction('messages').objectStore('messages').getAll();
    all.onsuccess = () => { open.result.close(); done(all.result.map(m => m.content)) } } })"""
# Keys that macOS, Emacs habits or browsers give a text box: key, code, modifiers, editing command.
OWNED = [
    ("Backspace", 8, {"alt": True}, ("deleteWordBackward",)),
    ("ArrowUp", 38, {"alt": True}, ("moveToBeginningOfParagraph",)),
    ("ArrowDown", 40, {"alt": True}, ("moveToEndOfParagraph",)),
    ("k", 75, {"control": True}, ("deleteToEndOfParagraph",)),
    ("k", 75, {"command": True}, ()),
    ("Backspace", 8, {"command": True}, ("deleteToBeginningOfLine",)),
    ("/", 191, {}, ()),
]


def test_a_key_of_the_text_box_does_nothing_else(tab):
    tab.ask("first chat")
    tab.new_chat()
    tab.ask("second chat")
    tab.js("onkeydown = event => { globalThis.prevented = event.defaultPrevented }")
    for key, code, held, commands in OWNED:
        tab.js("document.querySelector('#text').value = ''")
        tab.type("please rewrite this wrnog")
        tab.press(key, code, commands=commands, **held)
        assert not tab.js("globalThis.prevented")  # the text box has it
        if commands == ("deleteWordBackward",):
            tab.shows(TEXT, "please rewrite this ")
        tab.chats_are("second chat", "first chat")
        tab.turns_are("second chat", "You said: second chat")
    tab.reload()
    tab.chats_are("second chat", "first chat")
    tab.turns_are("second chat", "You said: second chat")


def test_enter_sends_and_shift_enter_does_not(tab, server):
    tab.type("one")
    tab.press("Enter", 13, shift=True, commands=("insertNewline",))
    tab.type("two")
    tab.shows(TEXT, "one\ntwo")
    assert not server.asked
    tab.press("Enter", 13)
    tab.until("document.querySelectorAll('.assistant footer small').length === 1")
    assert server.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_enter_of_an_input_method_or_a_phone_is_its_own(tab, server):
    tab.type("nihon")
    for event in ("{isComposing: true}", "{keyCode: 229}"):
        tab.js(
            "document.querySelector('#text').dispatchEvent(new KeyboardEvent('keydown', "
            f"{{key: 'Enter', bubbles: true, cancelable: true, ...{event}}}))"
        )
    assert not server.asked and tab.turns == []
    tab.resize("phone")
    tab.press("Enter", 13, commands=("insertNewline",))
    tab.type("go")
    tab.shows(TEXT, "nihon\ngo")
    assert not server.asked
    tab.click("#send")
    tab.until("document.querySelectorAll('.turn').length === 2")
    tab.idle()
    assert len(server.asked) == 1


def test_escape_stops_a_reply_and_keeps_it(tab, server):
    server.says(("say", "Half of"), ("wait", server.pause()))
    tab.ask("Go on", wait=False)
    tab.sees("Half of")
    tab.shows("document.querySelector('#send').textContent", "Stop")
    tab.press("Escape", 27)
    tab.sees("Stopped.")
    tab.turns_are("Go on", "Half of")
    assert server.left.wait(60)


def test_deleting_is_a_button_and_can_be_undone(tab):
    tab.ask("first chat")
    tab.new_chat()
    tab.ask("second chat")
    tab.button("Delete first chat")
    tab.has_chats(1)
    tab.chats_are("second chat")
    tab.turns_are("second chat", "You said: second chat")
    tab.reload()  # the offer stays
    tab.button("Undo")
    tab.has_chats(2)
    tab.until("document.querySelector('.turn .body').innerText === 'first chat'")
    # Of the chat on the screen, too; then it is gone for good.
    tab.button("Delete first chat")
    tab.has_chats(1)
    tab.turns_are()
    assert "first chat" in tab.js(KEPT)
    tab.button("Dismiss")
    until(lambda: "first chat" not in tab.js(KEPT))
    assert "second chat" in tab.js(KEPT)
    tab.reload()
    tab.chats_are("second chat")
    tab.shows("document.querySelectorAll('.notice').length", 0)
