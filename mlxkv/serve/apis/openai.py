"""Replies of OpenAI's chat and text completions."""

from __future__ import annotations

import time
from functools import lru_cache
from platform import platform
from typing import Any
from uuid import uuid4

import mlx.core as mx
import mlx_lm

from mlxkv.serve.apis.reply import Reply, event
from mlxkv.serve.http.request import ModelInfo, check_request
from mlxkv.serve.job import Token
from mlxkv.serve.refusals import Refused

SPOKEN = ("text", "thinking")


def read_completion(body: dict, model_info: ModelInfo, chat: bool) -> Completion:
    """Return the request in a body, for a chat or a text. Raises Refused."""
    return Completion(check_request(body, chat, model_info), model_info.model)


@lru_cache(1)
def fingerprint() -> str:
    mlx = mx.__version__  # pyright: ignore[reportAttributeAccessIssue] mlx's stub lacks it
    return f"{mlx_lm.__version__}-{mlx}-{platform()}-{mx.device_info()['architecture']}"


class Completion(Reply):
    """A completion, or its chunks."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._parts: list[tuple] = []
        self._logprobs: list[dict] = []
        self._calls, self._bytes, self._has_role = 0, b"", False

    def start(self) -> None:
        chat = self.request.chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4()}",
            "system_fingerprint": fingerprint(),
            "object": f"{kind}.chunk" if chat and self.streams else kind,
            "model": self.model,
            "created": int(time.time()),
        }

    def add_parts(self, parts: list[tuple], token: Token) -> None:
        self._parts += parts
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        if self.streams and (parts or token.logprob is not None) and token.reason is None:
            self._send(None)

    def _send(self, reason: str | None, **more: Any) -> None:
        """Send a chunk; the first of a chat is its role, which clients would join if it came again."""
        if self.request.chat and not self._has_role:
            delta = {"role": "assistant", "content": ""}
            self.event(
                self._head | {"choices": [{"index": 0, "finish_reason": None, "delta": delta}]}
            )
            self._has_role = True
        self.event(self._chunk(reason) | more)

    def _chunk(self, reason: str | None) -> dict:
        """Return what was said since the last one."""
        texts = {kind: "".join(x[1] for x in self._parts if x[0] == kind) for kind in SPOKEN}
        calls = [self._call(*part[1:]) for part in self._parts if part[0] == "call"]
        choice = {"index": 0, "finish_reason": reason}
        if self._logprobs:
            choice["logprobs"] = self._logprobs_document()
        self._parts, self._logprobs = [], []
        if not self.request.chat:
            return self._head | {"choices": [choice | {"text": texts["text"]}]}
        message: dict = {}
        if not self.streams:
            message = {"role": "assistant", "content": texts["text"] or (None if calls else "")}
        elif texts["text"]:
            message["content"] = texts["text"]
        if texts["thinking"]:
            message["reasoning"] = texts["thinking"]
        if calls:
            message["tool_calls"] = calls
        name = "delta" if self.streams else "message"
        return self._head | {"choices": [choice | {name: message}]}

    def _call(self, id: str, name: str, arguments: str) -> dict:
        out = {"function": {"name": name, "arguments": arguments}, "type": "function", "id": id}
        if self.streams:
            out["index"] = self._calls
            self._calls += 1
        return out

    def _logprobs_document(self) -> dict:
        steps = self._logprobs
        if self.request.chat:
            return {"content": steps}
        offsets = []
        for step in steps:
            offsets.append(len(self._bytes.decode(errors="ignore")))
            self._bytes += bytes(step["bytes"])
        tops = [{one["token"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
        return {
            "tokens": [step["token"] for step in steps],
            "token_logprobs": [step["logprob"] for step in steps],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def end(self) -> None:
        if not self.streams:
            return
        self._send(self.reason, kv=self.kv)
        if self.request.include_usage:
            self.event(self._head | {"choices": []} | self._usage() | {"kv": self.kv})
        self._buffer += b"data: [DONE]\n\n"

    def document(self) -> dict:
        return self._chunk(self.reason) | self._usage() | {"kv": self.kv}

    def _usage(self) -> dict:
        prompt, cached = self.prompt.prompt_tokens, self.prompt.cached_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": self.count}
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"usage": counts | {"total_tokens": prompt + self.count} | details}

    def error_event(self, refused: Refused) -> bytes:
        return event(refused.body())
