"""End a reply before its first stop word, however tokens split it.

Stop words are matched in the raw text of the model, thoughts and markup of tool calls included, as in vLLM and
llama.cpp: a stop word means that no text after it is wanted, and the marks that end thoughts or calls are part of
the same text. `StopMatcher` works on text, `ReplyText` on tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mlxkv.patching import mlx_lm_compat


class StopMatcher:
    """Finds the first stop word of a text given in pieces, wherever the pieces are split.

    The first is the one with the lowest start; at equal starts, the shorter. words: non-empty strings. word: the stop
    word that ended the text, or None.
    """

    def __init__(self, words: Iterable[str]):
        self._words = list(words)
        self._longest = max(map(len, self._words), default=0)
        self._pending = ""
        self.word: str | None = None

    def feed(self, piece: str) -> str:
        """Add a piece; return the text that cannot be part of a stop word. The rest is held back. Returns "" after a
        match."""
        if self.word is not None:
            return ""
        text = self._pending + piece
        start, _, word = self._first(text)
        tails = range(max(0, len(text) - self._longest + 1), start)
        begin = (i for i in tails if any(word.startswith(text[i:]) for word in self._words))
        safe = next(begin, start)
        if word is not None and safe == start:
            self.word, safe, text = word, start, text[:start]
        self._pending = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text held back, at the end of the input."""
        text, self._pending = self._pending, ""
        start, _, self.word = self._first(text) if self.word is None else (0, 0, self.word)
        return text[:start]

    def _first(self, text: str) -> tuple[int, int, str | None]:
        """Return start, length and word of the first stop word; (len(text), 0, None) if there is none."""
        matches = ((text.find(word), len(word), word) for word in self._words)
        return min((match for match in matches if match[0] >= 0), default=(len(text), 0, None))


class Front:
    """Restores the spaces at the start of a reply, which mlx-lm's detokenizers drop. Without a prefix the text equals
    the tokenizer's decoding of the reply alone.

    tokenizer: mlx-lm's wrapper. prefix: the last prompt token, if the prompt ends with the start of the reply; else
    empty.
    """

    def __init__(self, tokenizer: Any, prefix: Sequence[int] = ()):
        self._tokenizer, self._tokens = tokenizer, list(prefix)
        self._prefix, self._is_open = tokenizer.decode(self._tokens) if prefix else "", True

    def add(self, token: int) -> None:
        """Add the next token of the reply."""
        if self._is_open:
            self._tokens.append(token)

    def mended(self, text: str, last: bool = False) -> str:
        """Return the detokenizer's next text, with the dropped spaces restored."""
        if not self._is_open or not (text or last):
            return text
        self._is_open = False
        joint = self._tokenizer.decode(self._tokens)[len(self._prefix) :]
        blanks, present = (len(x) - len(x.lstrip(" ")) for x in (joint, text))
        return " " * (blanks - present) + text


class ReplyText:
    """The text of one reply, token by token, up to its first stop word.

    mlx-lm's batches use it in place of a request's stop sequences, so the reply ends with the token that completes a
    stop word, as with a token that ends the turn.

    tokenizer: mlx-lm's wrapper. prefix: as in `Front`.
    """

    def __init__(self, tokenizer: Any, words: Iterable[str], prefix: Sequence[int] = ()):
        self._tokenizer, self._detokenizer = tokenizer, tokenizer.detokenizer
        mlx_lm_compat.keep_zero_bytes(self._detokenizer)
        self._front = Front(tokenizer, prefix)
        self._matcher, self._ready = StopMatcher(words), ""

    @property
    def word(self) -> str | None:
        """The stop word that ended the reply, or None."""
        return self._matcher.word

    def matcher(self) -> ReplyText:
        """Return `self`: a request has one reply."""
        return self

    def advance(self, token: int) -> bool:
        """Add the next token. Returns whether it ends the reply."""
        if token in self._tokenizer.eos_token_ids:
            return True
        self._front.add(token)
        self._detokenizer.add_token(token)
        self._read()
        return self.word is not None

    def take(self, reason: str | None) -> tuple[str, str | None]:
        """Return the text ready to send since the last call, and the finish reason. reason: the finish reason without
        stop words; None while the reply continues."""
        if reason is not None and self.word is None:
            self._detokenizer.finalize()
            self._read(last=True)
            self._ready += self._matcher.flush()
            reason = reason if self.word is None else "stop"
        text, self._ready = self._ready, ""
        return text, reason

    def _read(self, last: bool = False) -> None:
        text = self._front.mended(self._detokenizer.last_segment, last)
        self._ready += self._matcher.feed(text)


def turn_end(tokenizer: Any) -> str | None:
    """Return the special token with which a chat template ends assistant messages. None if there is none, and for
    gpt-oss, where it also ends thoughts. tokenizer: mlx-lm's wrapper."""
    template, word = str(getattr(tokenizer, "chat_template", None) or ""), "continued"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]
    if not template or "<|channel|>" in template:
        return None
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # templates may raise any error
        return None
    tail = text.rpartition(word)[2].lstrip()
    ends = [token for token in tokenizer.all_special_tokens if tail.startswith(token)]
    return max(ends, key=len, default=None)
