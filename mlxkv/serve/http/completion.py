"""mlx-lm's writing of one reply, with finite numbers, calls that can be read, and the field `kv`."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite

from mlx_lm import server

from mlxkv.serve.http.caller import Caller
from mlxkv.serve.http.request import Request

LEAST = -9999.0  # the log-probability of what cannot come, as OpenAI writes it
# mlx-lm's handler keeps a request as attributes with the same names, but for these.
APART = (
    *("chat", "include_usage", "stop", "prompt", "messages", "tools", "continue_final_message"),
    *("grammar", "shorten"),
)
SETTINGS = [one.name for one in fields(Request) if one.name not in APART]


def finite(logprobs: list[float]) -> list[float | None]:
    """Log-probabilities that JSON has: minus infinity is `LEAST`, what is no number null."""
    return [max(x, LEAST) if isfinite(x) or x < 0 else None for x in logprobs]


def finite_steps(steps: list[tuple[dict, ...]]) -> list[tuple[dict, ...]]:
    """The same for the best tokens of each step."""
    return [tuple(one | {"logprob": finite([one["logprob"]])[0]} for one in step) for step in steps]


class Completion(server.APIHandler):
    """mlx-lm's handler of replies. What it writes goes to `wfile`, heads to `send_response`,
    `send_header` and `end_headers`: of whoever inherits from this."""

    _called = False

    def complete(self, request: Request, caller: Caller, model: str) -> None:
        """Hand a request to mlx-lm's `handle_completion`, which writes the reply. model: its name in it.

        Raises `Answer` and `Left`, which pass mlx-lm by."""
        for name in SETTINGS:
            setattr(self, name, getattr(request, name))
        self.stream_options = {"include_usage": request.include_usage}
        self.requested_model, self.requested_draft_model = model, "default_model"
        self.num_draft_tokens, self.adapter = 0, None
        if request.chat:
            self.body = {"messages": request.messages, "tools": request.tools}
            completion = self.handle_chat_completions()
        else:
            self.body = {"prompt": request.prompt}
            completion = self.handle_text_completions()
        self.response_generator = caller
        try:
            self.handle_completion(completion, request.stop)
        finally:
            caller.stop()  # mlx-lm's does not when the head of the reply cannot be written

    def generate_response(self, text, finish_reason, *args, **kwargs):
        self._called = self._called or bool(kwargs.get("tool_calls"))
        if finish_reason is not None:
            # mlx-lm's is always "length", and may be that of calls which could not be read.
            finish_reason = self.response_generator.reason
            if finish_reason == "stop" and self._called:
                finish_reason = "tool_calls"
        for name, plain in (("token_logprobs", finite), ("top_tokens", finite_steps)):
            if kwargs.get(name):
                kwargs[name] = plain(kwargs[name])
        response = super().generate_response(text, finish_reason, *args, **kwargs)
        message = response["choices"][0].get("message", {"content": text})
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # as the pieces of a stream join
        if finish_reason is not None:
            response["kv"] = self.response_generator.numbers()
        return response

    def completion_usage_response(self, *args, **kwargs):
        response = super().completion_usage_response(*args, **kwargs)
        return response | {"kv": self.response_generator.numbers()}
