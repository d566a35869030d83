"""`StopMatcher` and `ReplyText`: text up to the first stop word, however it is cut into pieces and tokens."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_models import TEMPLATE, write_model

from mlxkv.generate.stops import ReplyText, StopMatcher
from mlxkv.loading.load import load

LETTERS = st.text("abé😀 ", max_size=24)
WORDS = st.lists(st.text("abé😀 ", min_size=1, max_size=5), max_size=4)


def first(text: str, words: list[str]) -> tuple[str, str | None]:
    """The text before the first stop word, and that word, of the whole text."""
    for start in range(len(text)):
        for word in sorted(words, key=len):
            if text.startswith(word, start):
                return text[:start], word
    return text, None


@settings(deadline=None)  # the machine may be busy
@given(text=LETTERS, words=WORDS, cuts=st.lists(st.integers(0, 24), max_size=8))
@example("xabcbd", ["abcd", "bc"], [3])  # the second comes first, while the first may still come
@example("abcd", ["abcd", "bc"], [1, 2, 3])
@example("abc", ["abcd", "bc"], [])
@example("xaby", ["ab", "a"], [])  # of two that begin at one place, the shorter
@example("aab", ["ab"], [1, 2])  # the start of a word that begins anew inside it
def test_the_result_is_that_of_the_whole_text(text, words, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    matcher, sent = StopMatcher(words), []
    want, word = first(text, words)
    for a, b in zip(ends, ends[1:], strict=False):
        sent.append(matcher.feed(text[a:b]))
        assert want.startswith("".join(sent))  # nothing was sent that has to be taken back
        if matcher.word is not None:
            break
    sent.append(matcher.flush())
    assert ("".join(sent), matcher.word) == (want, word)
    assert matcher.feed("more") + matcher.flush() == "" or word is None


@given(text=LETTERS, words=WORDS)
def test_no_more_is_held_back_than_could_become_a_stop_word(text, words):
    matcher, sent = StopMatcher(words), ""
    for end, letter in enumerate(text, 1):
        sent += matcher.feed(letter)
        held = text[len(sent) : end]
        if matcher.word is not None:
            return
        assert not held or any(word.startswith(held) or word in held for word in words)


class Bytes:
    """A tokenizer whose tokens are bytes, which 256 ends; its detokenizer is `Held`."""

    eos_token_ids = {256}

    @property
    def detokenizer(self):
        return Held()

    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", "replace")


class Held:
    """Holds incomplete characters back, and the space at the start of a text for good, as mlx-lm's do."""

    def __init__(self):
        self.text, self._bytes, self._at = "", b"", 0

    def add_token(self, token):
        self._bytes += bytes([token])
        if not self._bytes.decode("utf-8", "replace").endswith("\ufffd"):
            self.finalize()

    def finalize(self):
        text = self._bytes.decode("utf-8", "replace")
        self.text += text if self.text else text.removeprefix(" ")
        self._bytes = b""

    @property
    def last_segment(self):
        text, self._at = self.text[self._at :], len(self.text)
        return text


def written(text: str | bytes, words, before=(), limit: int = 100):
    """Pieces, reason, stop word and tokens of a reply; as mlx-lm's loop asks for them."""
    reply, pieces, reason, count = ReplyText(Bytes(), words, before), [], None, 0
    matcher = reply.matcher()
    for token in [*(text if isinstance(text, bytes) else text.encode()), 256]:
        count += 1
        reason = "stop" if matcher.advance(token) else "length" if count == limit else None
        piece, reason = reply.take(reason)
        pieces.append(piece)
        if reason is not None:
            break
    return "".join(pieces), reason, reply.word, count


def test_a_reply_of_tokens():
    for text, words, want in [
        ("naïve éé end", ["éé"], ("naïve ", "stop", "éé", 11)),
        ("a😀b", ["😀"], ("a", "stop", "😀", 5)),  # at the last byte of the character
        ("a😀b", ["b"], ("a😀", "stop", "b", 6)),
        ("a😁b", ["😀"], ("a😁b", "stop", None, 7)),  # three bytes of four are the same
        ("one", ["one"], ("", "stop", "one", 3)),
        ("a man", ["man."], ("a man", "stop", None, 6)),
        ("", ["a"], ("", "stop", None, 1)),
        (" \n ", ["x"], (" \n ", "stop", None, 4)),
        ("    return", ["x"], ("    return", "stop", None, 11)),  # code
        ("   ", ["x"], ("   ", "stop", None, 4)),
        (" b", [" b"], ("", "stop", " b", 2)),
        (b"ab\xf0\x9f", ["b\ufffd"], ("a", "stop", "b\ufffd", 5)),  # never completed
    ]:
        assert written(text, words) == want


def test_a_limit_keeps_what_was_held_back_and_a_stop_word_at_the_limit_is_one():
    assert written("one two", ["two!"], limit=7) == ("one two", "length", None, 7)
    assert written("one two", ["two"], limit=7) == ("one ", "stop", "two", 7)
    assert written("abcx", ["bcxy", "cx"], limit=4) == ("ab", "stop", "cx", 4)


def test_behind_a_start_a_space_is_text(monkeypatch):
    """It is none where the tokenizer itself drops it at the start of a text."""
    monkeypatch.setattr(Bytes, "decode", lambda self, x: bytes(x).decode().removeprefix(" "))
    assert written(" two", [" t"])[:3] == ("two", "stop", None)
    assert written("   two", ["x"])[0] == "  two"
    assert written(" two", [" t"], before=b"e") == ("", "stop", " t", 2)
    for text in (" two", " "):
        assert written(text, ["x"], before=b"e")[0] == text


START, END, LETTER = (
    256,
    257,
    65,
)  # "<s>", "</s>", which the tokenizer names as the end, and another
# config.json, generation_config.json, what stands behind a turn in the template; and the ends of replies.
ENDS = {
    "one": (END, None, "", {END}),
    "none": (None, None, "", {END}),
    "a list": ([END, LETTER], None, "", {END, LETTER}),
    "config.json names more": ([END, LETTER], END, "", {END, LETTER}),
    "generation_config.json names more": (END, [END, LETTER], "", {END, LETTER}),
    "each names its own": ([LETTER], [START], "", {START, END, LETTER}),
    "the template alone": (END, END, "<s>\n", {START, END}),
    "the template, behind a line": (END, END, "\n<s>", {START, END}),
    "a thought of gpt-oss": (END, END, "<s><|channel|>", {END}),
    "no special token": (END, END, "\nUser:", {END}),
    "no number": (END, {"a": 1}, "", {END}),
}


def test_each_end_of_a_turn_ends_replies(tmp_path, subtests):
    for i, (name, (config, generation, tail, ends)) in enumerate(ENDS.items()):
        template = TEMPLATE.replace("</s>", tail) if tail else TEMPLATE
        folder = write_model(tmp_path / str(i), template=template, eos_token_id=config)
        if generation is not None:
            text = json.dumps({"eos_token_id": generation})
            (folder / "generation_config.json").write_text(text)
        with subtests.test(name):
            assert load(str(folder)).tokenizer.eos_token_ids == ends
