"""Words of a reply are not broken at the edge of a terminal, however the reply is cut into pieces."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mlxkv.chat.wrap import Wrap

WORDS = st.lists(
    st.sampled_from(["a", "bird", "日本語", "  ", "\n", "longer-than-all"]), max_size=40
)


def wrapped(text: str, width: int, cuts: list[int]) -> str:
    out: list[str] = []
    wrap, start = Wrap(out.append, width), 0
    for cut in sorted(c % (len(text) + 1) for c in cuts):
        wrap(text[start:cut])
        start = cut
    wrap(text[start:])
    wrap.close()
    return "".join(out)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(WORDS, st.integers(1, 30), st.lists(st.integers(0, 200), max_size=9))
def test_only_spaces_become_ends_of_lines(words, width, cuts):
    text = " ".join(words)
    found = wrapped(text, width, cuts)
    assert found.split() == text.split()
    assert found == wrapped(text, width, [])
    for line in found.split("\n"):
        code = line.startswith("    ")
        assert cell_len(line.rstrip()) <= width or len(line.split()) == 1 or code


def test_a_line_that_fits_stays_as_it_is():
    text = "# Title\n\n- one  two\n\n    code that is longer than the line\n```\nso is this one here\n```\n"
    assert wrapped(text, 12, [5, 20]) == text
    assert wrapped("one two three", 8, [4]) == "one two\nthree"
    assert wrapped("one two three", 3, []) == "one\ntwo\nthree"
