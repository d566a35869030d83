"""Log probabilities of tokens as OpenAI writes them: float32 softmaxes of the model's logits."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any, cast

import mlx.core as mx

LEAST = -9999.0  # of what cannot come, as OpenAI writes it
# Bytes by the letters of byte-level vocabularies: printable ones are themselves, the others come from 256 on.
PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
LETTERS = {chr(byte): byte for byte in PLAIN}
LETTERS |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PLAIN}))}
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class LogProbs:
    """Entries for the tokens of one tokenizer (mlx-lm's wrapper)."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)

    def entry(self, token: int, logits: mx.array, count: int) -> dict | None:
        """Return the entry of a token, with those of the `count` best; None for one that ends the turn and is no text.
        logits: [V], of the model's type, whose rounding is not repeated."""
        if token in self._tokenizer.eos_token_ids:
            return None
        count, logits = min(count, logits.size), logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits)
        best = mx.argpartition(-logprobs, kth=count - 1)[:count].tolist() if count > 0 else []
        ids = [token, *cast(list[int], best)]
        values = [finite(x) for x in cast(list[float], logprobs[mx.array(ids)].tolist())]
        entries = [self._named(*pair) for pair in zip(ids, values, strict=True)]
        top = sorted(entries[1:], key=lambda entry: -(entry["logprob"] or 0.0))
        return entries[0] | {"top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict:
        decode = self._tokenizer.decode  # inside of a text: at its start some drop a space
        text = decode([*self._anchor, token])[len(decode(self._anchor)) :]
        data = text.encode()
        if "\ufffd" in text:  # a part of a character
            data = _bytes_of(self._tokenizer.convert_ids_to_tokens(token))
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return {"id": token, "token": text, "logprob": logprob, "bytes": list(data)}


def _bytes_of(piece: str) -> bytes:
    """Return the bytes of a piece of a vocabulary: "<0xE2>", or letters that stand for bytes as in GPT-2, or text in
    which one stands for a space."""
    if match := BYTE.fullmatch(piece):
        return bytes.fromhex(match[1])
    return b"".join(
        bytes([LETTERS[x]]) if x in LETTERS else x.encode() for x in piece.replace("\u2581", " ")
    )


def finite(logprob: float) -> float | None:
    """Return a log-probability that JSON has: minus infinity is `LEAST`, what is no number null."""
    return max(logprob, LEAST) if isfinite(logprob) or logprob < 0 else None
