"""Chats of given lengths for a server, and where two replies to the same chat part."""

from __future__ import annotations

from mlxkv.errors import MachineError
from mlxkv.texts.corpus import interleaved

QUESTION = "Repeat the last sentence in your own words."
SHARE = 0.5  # of a prompt: a system prompt that other chats share


def lengths(count: int, shortest: int, longest: int) -> list[int]:
    """`count` lengths with equal ratios between neighbours."""
    if count == 1:
        return [longest]
    return [round(shortest * (longest / shortest) ** (i / (count - 1))) for i in range(count)]


class Texts:
    """Prompts cut from the evaluation texts. per_token: characters of one token."""

    def __init__(self, per_token: float = 4.0):
        self.per_token = per_token
        self._all = "\n\n".join(interleaved("evaluation"))

    def calibrate(self, server, tokens: int) -> None:
        """Set per_token by the tokenizer of a server. Raises MachineError if it does not answer."""
        sample = self.cut(tokens, start=1 << 20)
        reply = server.ask([{"role": "user", "content": sample}], 1)
        if reply.error is not None:
            raise MachineError(f"[bench] the server does not answer: {reply.error}")
        self.per_token = len(sample) / reply.prompt_tokens

    def cut(self, tokens: int, start: int = 0) -> str:
        """About `tokens` tokens, from a different place for every `start`."""
        size = max(1, round(tokens * self.per_token))
        at = start * 997 % len(self._all)
        times = -(-(at + size) // len(self._all))
        return (self._all * times)[at : at + size]

    def chat(self, index: int, tokens: int) -> list[dict]:
        """Chat `index`, of about `tokens` tokens; every second one opens with the same system prompt."""
        if index % 2:
            shared = int(tokens * SHARE)
            own = self.cut(tokens - shared, 1 + index)
            messages = [{"role": "system", "content": self.cut(shared)}]
        else:
            own, messages = self.cut(tokens, 1 + index), []
        return [*messages, {"role": "user", "content": f"{own}\n\n{QUESTION}"}]


def parting(alone: str, other: str, steps: list[dict]) -> dict | None:
    """Where `other` parts from `alone`, whose logprobs are `steps`; None if they are equal.

    Returns the index of the token in `alone` and the gap between its logit and the second best.
    """
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
    """Replace the marks of byte-level BPE and SentencePiece by spaces and line ends."""
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
