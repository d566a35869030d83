"""One browser for all tests of the page; each test has a server and a profile of its own."""

from __future__ import annotations

import json

import chromium
import pytest
from scripted import Scripted, scripted

ENTER, ESCAPE = 13, 27
CHATS = "[...document.querySelectorAll('#chats .open')].map(x => x.textContent)"
TURNS = "[...document.querySelectorAll('.turn .body')].map(x => x.innerText.trim())"


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if chromium.where() is None:
        pytest.skip("no Chromium on this machine")
    browser = chromium.Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


class Tab(chromium.Page):
    """A tab with the chat page, and what its tests ask again and again."""

    def ready(self) -> Tab:
        self.until("document.body.dataset.ready === 'true'")
        return self

    def reload(self) -> None:
        self.js("globalThis.before = true")  # until the page is another
        self.call("Page.reload")
        self.until("!globalThis.before")
        self.ready()

    @property
    def turns(self) -> list[str]:
        return self.js(TURNS)

    @property
    def chats(self) -> list[str]:
        return self.js(CHATS)

    def ask(self, text: str, wait: bool = True) -> None:
        self.idle()  # while a reply is written, Enter does nothing; its last words are there before it ends
        count = len(self.turns)
        self.js("document.querySelector('#text').focus()")
        self.type(text)
        self.press("Enter", ENTER)
        self.until(f"document.querySelectorAll('.turn').length === {count + 2}")
        if wait:
            self.idle()

    def idle(self) -> None:
        self.until("document.querySelector('#send').textContent === 'Send'")

    def new_chat(self) -> None:
        self.button("New chat")
        self.until("document.querySelectorAll('.turn').length === 0")

    def has_chats(self, count: int) -> None:
        self.until(f"document.querySelectorAll('#chats li').length === {count}")

    def turns_are(self, *texts: str) -> None:
        self.shows(TURNS, list(texts))

    def last_is(self, text: str) -> None:
        self.shows(f"{TURNS}.at(-1)", text)

    def chats_are(self, *titles: str) -> None:
        self.shows(CHATS, list(titles))

    def button(self, label: str, within: str = "body") -> None:
        """Click the last button that reads so, or is called so."""
        found = (
            f"[...document.querySelectorAll({json.dumps(within + ' button')})].filter(x => "
            f"x.textContent === {json.dumps(label)} || x.getAttribute('aria-label') === {json.dumps(label)})"
        )
        self.until(f"{found}.length > 0")
        self.js(f"{found}.at(-1).click()")

    def sees(self, text: str) -> None:
        self.until(f"document.body.innerText.includes({json.dumps(text)})")


@pytest.fixture
def server():
    with scripted() as server:
        yield server


@pytest.fixture
def opened(browser, server: Scripted):
    """Opens tabs on the page; all of a test share one profile."""
    context, tabs = browser.context(), []

    def open_tab() -> Tab:
        tabs.append(Tab(browser, server.url, context))
        return tabs[-1].ready()

    yield open_tab
    for tab in tabs:
        assert [error for error in tab.errors if "/v1/" not in error] == []
    browser.drop(context)


@pytest.fixture
def tab(opened) -> Tab:
    return opened()
