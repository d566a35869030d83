"""Files go with a message as text."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_dropped_files_are_read_as_text(tab, server, tmp_path):
    (tmp_path / "notes.md").write_text("A fact.\n```\ncode\n```\n", encoding="utf-8")
    (tmp_path / "wide.txt").write_bytes("Größe".encode("utf-16"))
    tab.drop_files(tmp_path / "notes.md", tmp_path / "wide.txt")
    tab.until("document.querySelectorAll('#attached li').length === 2")
    tab.keep("attached")
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
    tab.drop_files(*(tmp_path / name for name in ("picture.png", "zeros.bin", "large.txt")))
    tab.sees(
        "Not attached: picture.png (not text), zeros.bin (not text), large.txt (4.0 MiB; at most 4.0 MiB)"
    )
    tab.shows("document.querySelectorAll('#attached li').length", 0)


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
