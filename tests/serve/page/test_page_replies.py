"""Replies: reasoning, Markdown, what stops or fails, and what can be done then."""

import time

import pytest

pytestmark = pytest.mark.slow
BODY = "[...document.querySelectorAll('.assistant .body')].at(-1)"
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
CLIP = """Object.defineProperty(navigator, 'clipboard', {configurable: true,
    value: {writeText: async text => { globalThis.clip = text }}})"""
REPLY = """# A title

Some **bold**, a [link](https://example.org/a) and `code`.

```python
print("hi")  # <b>
```

| a | b |
|---|--:|
| 1 | 2 |

- [x] done
- plain

<script>alert(1)</script> <img src=x onerror=alert(2)>

![pixel](https://evil.example/p.png)

[bad](javascript:alert(3))
"""


def roles(request: dict) -> list[str]:
    return [one["role"] for one in request["messages"]]


def test_reasoning_is_folded(tab, server):
    more = server.pause()
    server.says(
        ("think", "First **this**,"),
        ("wait", more),
        ("think", " then that."),
        ("say", "So."),
        ("end", "stop"),
    )
    tab.ask("Why?", wait=False)
    tab.until(f"{LAST}.querySelector('summary').textContent === 'Thinking…'")
    tab.shows(f"{LAST}.querySelector('details').open", False)
    tab.until(f"{LAST}.querySelector('.waiting').hidden")  # something is seen to happen
    more.set()
    tab.idle()
    tab.until(f"{LAST}.querySelector('summary').textContent.startsWith('Thought for')")
    tab.last_is("So.")
    tab.click(".reasoning summary")
    tab.until(f"{LAST}.querySelector('.thoughts').innerText.includes('First this, then that.')")
    tab.ask("And?")
    first, second = server.asked
    thoughts = {"reasoning": "First **this**, then that."}  # the chat template keeps them or not
    assert second["messages"][1] == {"role": "assistant", "content": "So."} | thoughts
    assert first["max_tokens"] == second["max_tokens"] == -1  # until the context is full


def test_markdown_is_shown_and_is_never_script(tab, server):
    server.says(*(("say", REPLY[i : i + 7]) for i in range(0, len(REPLY), 7)), ("end", "stop"))
    tab.ask("Show me")
    found = tab.js(
        f"(b => ({{heading: b.querySelector('h3').textContent, bold: b.querySelector('strong').textContent, "
        "code: b.querySelector('pre code').textContent, language: b.querySelector('.head span').textContent, "
        "right: b.querySelectorAll('td')[1].getAttribute('align'), items: b.querySelectorAll('li').length, "
        "links: [...b.querySelectorAll('a')].map(a => [a.getAttribute('href'), a.rel, a.target]), "
        "live: b.querySelectorAll('script, img, iframe, input, [onerror], [style]').length, "
        "coloured: [...b.querySelectorAll('pre span')].map(s => `${s.className} ${s.textContent}`), "
        f"text: b.innerText}}))({BODY})"
    )
    assert found["heading"] == "A title" and found["bold"] == "bold" and found["right"] == "right"
    assert found["code"] == 'print("hi")  # <b>\n' and found["language"] == "python"
    assert found["coloured"] == ["is-func print", 'is-str "hi"', "is-cmnt # <b>"]
    assert found["items"] == 2 and "☑ done" in found["text"]
    assert found["live"] == 0 and "<script>alert(1)</script>" in found["text"]
    assert found["links"] == [
        ["https://example.org/a", "noopener noreferrer nofollow", "_blank"],
        ["https://evil.example/p.png", "noopener noreferrer nofollow", "_blank"],
    ]
    assert "bad" in found["text"]


def test_formulas_are_mathml_and_prices_are_prices(tab, server):
    """TeX in all its delimiters; the source stays where it is no formula, or none that KaTeX reads."""
    server.says(
        ("say", "Then $x^2$, \\(y<1\\) and $$\\sum_i i$$ in a line.\n\n\\[\n\\frac{a}{b}\n\\]\n\n"),
        (
            "say",
            "It costs $5 and $6, `$a$`, $\\nonsense{$, $HOME/$USER and $\\href{javascript:alert(1)}{z}$.",
        ),
        ("end", "stop"),
    )
    tab.ask("Show me")
    tab.until(f"{BODY}.querySelectorAll('math').length === 5")
    found = tab.js(
        f"(b => ({{source: [...b.querySelectorAll('annotation')].map(a => a.textContent.trim()), "
        "display: [...b.querySelectorAll('math[display=block]')].map(m => m.closest('p').innerText.length > 20), "
        "code: [...b.querySelectorAll('code')].map(c => c.textContent), links: b.querySelectorAll('a, [href]').length, "
        f"last: b.lastElementChild.textContent}}))({BODY})"
    )
    assert found["source"][:4] == ["x^2", "y<1", "\\sum_i i", "\\frac{a}{b}"]
    assert found["display"] == [True, False]  # in its text, and alone
    assert found["code"] == ["$a$", "\\nonsense{"] and found["links"] == 0
    assert (
        found["last"].startswith("It costs $5 and $6, $a$, ") and "$HOME/$USER and" in found["last"]
    )


def test_a_growing_reply_leaves_what_is_there(tab, server):
    more = server.pause()
    server.says(("say", "One\n\nTwo"), ("wait", more), ("say", " more\n\nThree"), ("end", "stop"))
    tab.ask("Grow", wait=False)
    tab.until(f"{BODY}.querySelectorAll('p').length === 2")
    tab.js(f"globalThis.first = {BODY}.querySelector('p'); getSelection().selectAllChildren(first)")
    more.set()
    tab.idle()
    tab.last_is("One\n\nTwo more\n\nThree")
    assert tab.js(f"globalThis.first === {BODY}.querySelector('p')")
    tab.shows("getSelection().toString()", "One")


def test_the_policy_forbids_what_gets_through(tab):
    """Even markup that a fault let in would neither run nor load."""
    tab.js(
        "addEventListener('securitypolicyviolation', e => (globalThis.broken ||= []).push(e.effectiveDirective))"
    )
    for markup in (
        "document.body.innerHTML = '<b>'",
        "document.createElement('b').setAttribute('onclick', '1')",
    ):
        code = f"(() => {{ try {{ {markup} }} catch (e) {{ return e.name }} }})()"
        assert tab.js(code) == "TypeError"
    tab.js("(x => { x.src = 'https://evil.example/x'; document.body.append(x) })(new Image())")
    tab.until("globalThis.broken?.includes('img-src')")
    tab.errors.clear()  # they are the point


def test_copying(tab, server):
    server.says(("say", "Text\n\n```\na < b\n```\n"), ("end", "stop"))
    tab.ask("question")
    tab.js(CLIP)
    for label, text in (
        ("Copy code", "a < b"),
        ("Copy reply", "Text\n\n```\na < b\n```\n"),
        ("Copy message", "question"),
    ):
        tab.button(label)
        tab.until(f"document.querySelector(`[aria-label='{label}']`).textContent === 'Copied'")
        tab.shows("globalThis.clip", text)


def test_copying_without_a_clipboard(tab):
    """Plain http: of another machine has none."""
    tab.ask("question")
    tab.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.js(
        "document.oncopy = () => { globalThis.clip = getSelection().toString() || document.activeElement.value }"
    )
    tab.button("Copy reply")
    tab.until("globalThis.clip === 'You said: question'")


def test_an_error_ends_nothing(tab, server):
    server.says(("status", 503, "[--kv-memory] 900 tokens need 9.0 GiB of cache"))
    tab.ask("too much")
    tab.sees("[--kv-memory] 900 tokens need 9.0 GiB of cache")
    tab.ask("something else")
    assert roles(server.asked[1]) == ["user"]  # the question without a reply is left out
    assert server.asked[1]["messages"][0]["content"] == "something else"
    tab.ask("third")
    assert roles(server.asked[2]) == ["user", "assistant", "user"]


def test_retrying(tab, server):
    server.says(("status", 500, "[serve] generation failed"))
    tab.ask("hello")
    tab.button("Retry")
    tab.turns_are("hello", "You said: hello")
    assert roles(server.asked[1]) == ["user"]
    server.says(("say", "Half"), ("fault", "[serve] the server is ending"))
    tab.ask("again")
    tab.sees("the server is ending")
    tab.last_is("Half")


def test_a_server_that_is_gone(tab, server):
    server.says(("say", "Hal"), ("hang up",))
    tab.ask("hello")
    tab.sees("The connection ended before the reply did.")
    tab.last_is("Hal")


def test_a_reply_that_was_cut_off_goes_on(tab, server):
    server.says(("think", "hm"), ("say", "One two"), ("end", "length"))
    tab.ask("Count")
    tab.sees("Cut off at 7 tokens")
    server.says(("say", " three"), ("end", "stop"))
    tab.button("Continue")
    tab.until(f"{BODY}.innerText.trim() === 'One two three'")
    tab.idle()
    body = server.asked[1]
    assert body["continue_final_message"] is True
    assert "continue_final_message" not in server.asked[0]
    assert body["messages"][-1] == {"role": "assistant", "content": "One two", "reasoning": "hm"}
    tab.until(f"{LAST}.querySelector('.ending').hidden")
    tab.until(f"{LAST}.innerText.includes('13 + 14 tokens')")


def test_what_failed_earlier_is_retried_beside_what_followed(tab, server):
    server.says(("status", 500, "[serve] generation failed"))
    tab.ask("one")
    tab.ask("two")
    tab.button("Retry")
    tab.sees("You said: one")
    tab.idle()
    tab.turns_are("one", "You said: one")
    tab.button("Version before", ".assistant")
    tab.sees("You said: two")


def test_a_full_context_offers_no_more_of_it(tab, server):
    server.document["context"] = 27
    tab.js("document.dispatchEvent(new Event('visibilitychange'))")
    server.says(("say", "One"), ("end", "length"))
    tab.until("document.querySelector('#figures').textContent.includes('27 tokens')")
    tab.ask("Count")
    tab.sees("The context is full: 27 tokens")
    tab.until(f"!{LAST}.innerText.includes('Continue')")


def test_editing_and_regenerating_keep_the_versions(tab, server):
    tab.ask("first")
    tab.ask("second")
    tab.click(".turn.user:nth-of-type(1) .acts button:nth-child(2)")
    tab.until("!!document.querySelector('.edit textarea')")
    tab.shows("document.activeElement.value", "first")
    tab.js("document.activeElement.value = 'other'")
    tab.button("Send", ".edit")
    tab.until("document.body.innerText.includes('You said: other')")
    tab.idle()
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "other"}]
    tab.turns_are("other", "You said: other")
    server.says(("say", "Anew"), ("end", "stop"))
    tab.button("Regenerate")
    tab.sees("Anew")
    tab.idle()
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "other"}]
    assert server.asked[-1]["temperature"] > 0 and "temperature" not in server.asked[0]
    tab.button("Version before", ".assistant")
    tab.sees("You said: other")
    tab.button("Version before", ".user")
    tab.sees("You said: second")
    tab.turns_are("first", "You said: first", "second", "You said: second")
    tab.reload()
    tab.sees("You said: second")


def test_the_progress_of_a_long_prompt(tab, server):
    more = server.pause()
    server.says(
        ("read", 2048, 9713),
        ("wait", more),
        ("read", 9713, 9713),
        ("say", "Read."),
        ("end", "stop"),
    )
    tab.ask("long", wait=False)
    tab.sees("Reading 2,048 of 9,713 tokens")
    tab.sees("left")
    bar = tab.js(f"(p => [p.value, p.max])({LAST}.querySelector('progress'))")
    assert bar == [2048, 9713]
    more.set()
    tab.idle()
    tab.last_is("Read.")
    tab.until(f"{LAST}.querySelector('.waiting').hidden")


def test_settings_of_a_chat(tab, server):
    tab.click("#settings")
    tab.until("document.querySelector('#options').open")
    tab.shows("document.querySelector('#max-tokens').placeholder", "until the context is full")
    tab.js(
        "[['system', 'Be brief.'], ['temperature', '0.7'], ['max-tokens', '99'], ['thinking', 'off']]"
        ".forEach(([id, value]) => { document.getElementById(id).value = value })"
    )
    tab.button("Save")
    tab.ask("hello")
    body = server.asked[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.7, 99)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    tab.reload()
    tab.ask("again")
    assert roles(server.asked[1]) == ["system", "user", "assistant", "user"]
    tab.new_chat()
    tab.ask("plain")
    assert set(server.asked[2]) == {"messages", "stream", "stream_options", "max_tokens"}


def test_the_settings_of_new_chats(tab, server):
    tab.click("#settings")
    tab.js(
        "document.querySelector('#temperature').value = '1'; document.querySelector('#for-all').checked = true"
    )
    tab.button("Save")
    tab.reload()
    tab.ask("hello")
    assert server.asked[0]["temperature"] == 1
    # Escape closes the dialog, changes nothing and stops nothing.
    server.says(("say", "Still"), ("wait", server.pause()))
    tab.ask("more", wait=False)
    tab.sees("Still")
    tab.click("#settings")
    tab.js("document.querySelector('#temperature').value = '2'")
    tab.press("Escape", 27)
    tab.until("!document.querySelector('#options').open")
    tab.shows("document.querySelector('#send').textContent", "Stop")


def test_the_key_of_a_server(opened, server):
    server.key = "a right key"
    tab = opened()
    tab.until("document.querySelector('#locked').open")
    for key in ("wrong", "a right key"):
        tab.until(
            "document.querySelector('#locked').open && document.querySelector('#key').value === ''"
        )
        tab.type(key)
        tab.button("Use it")
    tab.until("document.querySelector('#model').textContent === 'scripted'")
    tab.reload()
    tab.ask("hello")
    tab.last_is("You said: hello")


def test_a_key_that_nobody_gives_is_asked_for_once(opened, server):
    server.key = "a right key"
    tab = opened()
    tab.until("document.querySelector('#locked').open")
    tab.button("Cancel", "#locked")
    tab.sees("[--api-key] wrong")
    tab.js("document.dispatchEvent(new Event('visibilitychange'))")
    time.sleep(0.5)
    assert not tab.js("document.querySelector('#locked').open")
    tab.ask("hello", wait=False)
    tab.until("document.querySelector('#locked').open")
