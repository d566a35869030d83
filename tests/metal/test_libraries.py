"""What a chat waits for before its first answer: libraries that are compiled, and their lines."""

from __future__ import annotations

import pytest
from metal import libraries, texts

# (libraries, lines) at most of a chat at 128 dims in bfloat16.
BOUNDS = {
    ("int4", "portable"): (4, 2000),
    ("int4", "tiles"): (4, 2000),
    ("int8", "tiles"): (4, 2000),
}


@pytest.mark.parametrize(("preset", "body"), BOUNDS)
def test_a_chat_compiles_few_libraries(preset, body):
    found = libraries.of_a_chat(preset, body)
    most, lines = BOUNDS[preset, body]
    said = {text.kernel.name: libraries.lines(text) for text in found}
    assert len(found) <= most and sum(said.values()) <= lines, said


def test_the_table_has_every_preset_with_its_bodies():
    rows = [line.split(" | ") for line in list(libraries.table())[2:]]
    found = {(row[0].removeprefix("| "), row[1]): (int(row[2]), int(row[3])) for row in rows}
    assert {preset for preset, _ in found} == set(libraries.PRESETS)
    assert all(count >= 2 and lines > 500 for count, lines in found.values())
    for preset in libraries.PRESETS:  # rotation, attention and merge in one
        if (preset, "tiles") in found:
            assert found[preset, "tiles"][0] < found[preset, "portable"][0]
    assert ("int4", "tiles") in found


def test_a_text_counts_once_however_often_it_is_used():
    found = libraries.of_a_chat("int8", "portable")
    assert len({text.kernel for text in found}) == len(found)
    assert {text.name for text in found} >= {"attend", "seal"}
    assert all(isinstance(text, texts.Text) for text in found)
