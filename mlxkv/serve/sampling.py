"""Sample the next token of a reply, adjust its logits before that, and report log-probabilities: float32 softmaxes of
the model's logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isfinite
from typing import Any, cast

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
    make_sampler,
)

from mlxkv.serve.request import Request

LEAST = -9999.0  # OpenAI's log-probability of impossible tokens
# Bytes by the characters of byte-level vocabularies: printable ones stand for themselves, others start at 256.
PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
LETTERS = {chr(byte): byte for byte in PLAIN}
LETTERS |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PLAIN}))}
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
GREEDY = make_sampler(0.0)  # shared by all requests, so that a batch is sampled at once


def sampler_of(request: Request, tokenizer: Any) -> Callable[[mx.array], mx.array]:
    """Return the sampler of a request: log-probabilities [B, V] -> tokens [B]; B is 1 with a seed."""
    if not request.temperature:
        return GREEDY
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    if request.seed is not None:
        return Seeded(request, special)
    return make_sampler(
        request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        xtc_probability=request.xtc_probability,
        xtc_threshold=request.xtc_threshold,
        xtc_special_tokens=special,
    )


def processors_of(request: Request) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """Return the biases and penalties of a request: (tokens [N], logits [1, V]) -> logits [1, V]."""
    return make_logits_processors(
        request.logit_bias,
        request.repetition_penalty,
        request.repetition_context_size,
        request.presence_penalty,
        request.presence_context_size,
        request.frequency_penalty,
        request.frequency_context_size,
    )


class Seeded:
    """The sampler of a request with a seed: log-probabilities [1, V] -> tokens [1].

    Samples like mlx-lm's `make_sampler` after `mx.random.seed(seed)`, but with its own key, where mlx-lm has one state
    for all requests: so it works in a batch. special: tokens exempt from XTC.
    """

    def __init__(self, settings: Request, special: list[int]):
        assert settings.seed is not None
        self._settings, self._special = settings, special
        self._key = mx.random.key(settings.seed)

    def _next_key(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def __call__(self, logprobs: mx.array) -> mx.array:
        s = self._settings
        if 0 < s.top_p < 1:
            logprobs = apply_top_p(logprobs, s.top_p)
        if s.min_p:
            logprobs = apply_min_p(logprobs, s.min_p)
        if s.xtc_probability > 0:
            cut = apply_xtc(logprobs, 1.0, s.xtc_threshold, self._special)  # cuts always
            spared = mx.random.uniform(key=self._next_key()) > s.xtc_probability
            logprobs = mx.where(spared, logprobs, cut)
        if s.top_k > 0:
            logprobs = apply_top_k(logprobs, s.top_k)
        return mx.random.categorical(logprobs * (1.0 / s.temperature), key=self._next_key())


# -- log-probabilities in OpenAI's format


class LogProbs:
    """Entries for the tokens of one tokenizer (mlx-lm's wrapper)."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)

    def entry(self, token: int, logits: mx.array, count: int) -> dict | None:
        """Return the entry of a token, with those of the `count` most likely; None for an end-of-turn token, which is
        not text. logits: [V], in the model's type."""
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
        decode = self._tokenizer.decode  # after an anchor: some drop a space at the start of a text
        text = decode([*self._anchor, token])[len(decode(self._anchor)) :]
        data = text.encode()
        if "\ufffd" in text:  # a part of a character
            data = _bytes_of(self._tokenizer.convert_ids_to_tokens(token))
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return {"id": token, "token": text, "logprob": logprob, "bytes": list(data)}


def _bytes_of(piece: str) -> bytes:
    """Return the bytes of a vocabulary's piece: "<0xE2>", GPT-2's characters for bytes, or text in which U+2581 stands
    for a space."""
    if match := BYTE.fullmatch(piece):
        return bytes.fromhex(match[1])
    return b"".join(
        bytes([LETTERS[x]]) if x in LETTERS else x.encode() for x in piece.replace("\u2581", " ")
    )


def finite(logprob: float) -> float | None:
    """Return a log-probability valid in JSON: `LEAST` for minus infinity, None for NaN."""
    return max(logprob, LEAST) if isfinite(logprob) or logprob < 0 else None
