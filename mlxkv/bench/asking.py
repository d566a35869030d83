"""Chats of given lengths for a server, and where two replies to one of them part."""

from __future__ import annotations

from mlxkv.corpus import interleaved
from mlxkv.errors import MachineError

QUESTION = "Repeat the last sentence in your own words."
SHARE = 0.5  # of a prompt that opens with what others open with, too


def lengths(count: int, shortest: int, longest: int) -> list[int]:
    """`count` lengths, evenly spaced by their ratio."""
    if count == 1:
        return [longest]
    return [round(shortest * (longest / shortest) ** (i / (count - 1))) for i in range(count)]


class Texts:
    """Cuts of the evaluation texts. per_token: characters of one token, as a server counted them."""

    def __init__(self, per_token: float = 4.0):
        self.per_token = per_token
        self._all = "\n\n".join(interleaved("evaluation"))

    def calibrate(self, server, tokens: int) -> None:
        """Have a server count. Raises MachineError when it does not answer."""
        sample = self.cut(tokens, start=1 << 20)
        reply = server.ask([{"role": "user", "content": sample}], 1)
        if reply.error is not None:
            raise MachineError(f"[bench] the server does not answer: {reply.error}")
        self.per_token = len(sample) / reply.prompt_tokens

    def cut(self, tokens: int, start: int = 0) -> str:
        """About so many tokens, from another place for every `start`."""
        size = max(1, round(tokens * self.per_token))
        at = start * 997 % len(self._all)
        times = -(-(at + size) // len(self._all))
        return (self._all * times)[at : at + size]

    def chat(self, index: int, tokens: int) -> list[dict]:
        """Chat `index`, of about so many tokens; every second opens with the same system prompt."""
        if index % 2:
            shared = int(tokens * SHARE)
            own = self.cut(tokens - shared, 1 + index)
            messages = [{"role": "system", "content": self.cut(shared)}]
        else:
            own, messages = self.cut(tokens, 1 + index), []
        return [*messages, {"role": "user", "content": f"{own}\n\n{QUESTION}"}]


def parting(alone: str, other: str, steps: list[dict]) -> dict | None:
    """Where `other` leaves `alone`, whose logprobs are `steps`: the token's index and how far its
    logit lies above that of the next best; None where they are equal."""
    if alone == other:
        return None
    pairs = zip(alone, other, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(alone), len(other)))
    end = 0
    for index, step in enumerate(steps):
        end += len(readable(step["token"]))
        if end > common or index == len(steps) - 1:
            best = sorted((top["logprob"] for top in step["top_logprobs"]), reverse=True)
            return {"token": index, "gap": best[0] - best[1]}
    return {"token": 0, "gap": float("inf")}


def readable(token: str) -> str:
    """The text of a vocabulary's entry: byte-level BPE and SentencePiece write spaces their own way."""
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
