"""Bodies: every field with every type, extremes, nests, and names that nobody knows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from http.client import HTTPConnection

from experiments.attack.frame import PATIENCE, Attempt, alive, server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
VALUES = (
    *(None, True, False, 0, -1, 1, 10**30, 0.5, -1e308, 1e308, 5e-324, "", "x", "1", "\x00", "é" * 300),
    *([], [None], [[]], ["x", 1], [{}], {}, {"x": 1}, {"1": "x"}, {"type": 1}, {"": {"": []}}),
)  # fmt: skip
FIELDS = (
    *("model", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "logit_bias", "tools"),
    *("messages", "chat_template_kwargs", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty", "frequency_penalty"),
    *("presence_context_size", "frequency_context_size", "xtc_probability", "xtc_threshold"),
    *("max_tokens", "max_completion_tokens", "response_format", "tool_choice", "modalities", "kv"),
    *("adapters", "draft_model", "role_mapping", "functions", "best_of", "echo", "suffix", "user"),
)  # fmt: skip
EXTREMES = {
    "temperature": (0, 5e-324, 1e-320, 1e-45, 1e-40, 1e-38, 1e-7, 1e-3, 1, 100),
    "top_p": (0, 5e-324, 1e-45, 1e-7, 1e-3, 0.5, 1),
    "min_p": (0, 5e-324, 1e-45, 0.5, 1),
    "top_k": (0, 1, 2, 1 << 19, 1 << 20),
    "repetition_penalty": (0, 5e-324, 1e-300, 1e-45, 0.01, 1, 1.1, 100),
    "presence_penalty": (-100, -1e-45, 0, 1e-45, 100),
    "frequency_penalty": (-100, -1e-45, 0, 1e-45, 100),
    "xtc_probability": (0, 5e-324, 0.5, 1),
    "xtc_threshold": (0, 5e-324, 0.1, 0.5),
    "logit_bias": ({}, {"0": -100}, {"0": 100}, {str(i): -100 for i in range(900)}),
    "seed": (0, 1, (1 << 63) - 1),
    "logprobs": (True, False),
    "top_logprobs": (0, 1, 11),
    "stop": ("a", ["a", "b"]),
}
OPENAI = {
    "audio": {"voice": "a"}, "metadata": {"a": "b"}, "parallel_tool_calls": True, "store": False,
    "prediction": {"type": "content", "content": "a"}, "reasoning_effort": "low", "user": "me",
    "safety_identifier": "x", "service_tier": "auto", "verbosity": "low", "prompt_cache_key": "k",
    "function_call": "auto", "web_search_options": {}, "modalities": ["text"], "n": 1,
    "response_format": {"type": "text"}, "tool_choice": "auto", "stream_options": {"include_usage": True},
    "cache_prompt": True, "mirostat": 0, "ignore_eos": False, "min_tokens": 0, "keep_alive": "5m",
    "skip_special_tokens": True, "repeat_penalty": 1.1, "typical_p": 1, "options": {"num_ctx": 4096},
}  # fmt: skip
DEPTHS = (976, 50, 70, 980, 500, 970, 20_000, 990, 1100)
UNKNOWN = (
    *("temprature", "max_token", "topp", "message", "", "\x1b[31m", "a\nb", "x" * 3000),
    *("__class__", "temperature ", "Temperature"),
)


class Client:
    """One connection that asks and looks at each answer."""

    def __init__(self, port: int):
        self._line = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def ask(self, body, path: str = CHAT) -> tuple[int, object]:
        """Status and document of the answer; -1 and why for one that is no JSON, 0 for none."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self._line.request("POST", path, data)
            response = self._line.getresponse()
            found = response.read()
        except OSError as error:
            self._line.close()
            return 0, repr(error)
        if b"text/event-stream" in (response.headers.get("Content-Type") or "").encode():
            lines = [part[6:] for part in found.split(b"\n") if part.startswith(b"data: {")]
        else:
            lines = [found]
        try:
            documents = [json.loads(line, parse_constant=_none) for line in lines]
        except ValueError as error:
            return -1, f"{error}: {found[:200]!r}"
        return response.status, documents[-1] if documents else None

    def error(self, body, path: str = CHAT) -> tuple[int, str]:
        """Status, and the message of an error, or the document itself where it is none."""
        status, found = self.ask(body, path)
        error = found.get("error") if isinstance(found, dict) else None
        return status, error["message"] if error else str(found)[:200]


def _none(name: str):
    raise ValueError(f"not JSON: {name}")


def attempts(short: bool) -> Iterator[Attempt]:
    with server() as running:
        client = Client(running.port)
        yield from _types(client, VALUES[::5] if short else VALUES)
        yield from _nests(client, DEPTHS[::3] if short else DEPTHS)
        yield from _names(client)
        yield from _greedy(client)
        yield from _extremes(client, short)
        yield from _raw(client)
        yield Attempt("no traceback in the log", "Traceback" not in running.output())
        yield Attempt("the server is well after all of that", alive(running.port))


def _types(client: Client, values) -> Iterator[Attempt]:
    for field in FIELDS:
        for value in values:
            status, said = client.error(GOOD | {"max_tokens": 1, field: value})
            refused = status in (400, 404) and said.startswith(f"[{field}") and said.isprintable()
            name = f"{field} = {json.dumps(value)[:30]}"
            yield Attempt(name, status == 200 or refused, f"{status} {said[:160]}")


def _nests(client: Client, depths) -> Iterator[Attempt]:
    for depth in depths:
        for kind, data in (
            ("list", b"[" * depth + b"]" * depth),
            ("object", b'{"a":' * depth + b"1" + b"}" * depth),
        ):
            places = {
                "whole": data,
                "content": b'{"messages": [{"role": "user", "content": %s}]}' % data,
                "metadata": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "metadata": %s}'
                % data,
                "tools": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools":'
                b' [{"type": "function", "function": {"name": "f", "parameters": %s}}]}' % data,
                "arguments": b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
                b'"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": %s}}]},'
                b' {"role": "user", "content": "b"}], "max_tokens": 1}' % json.dumps(data.decode()).encode(),
            }  # fmt: skip
            for place, body in places.items():
                status, said = client.error(body)
                held = status == 400 or (status == 200 and depth < 64)
                yield Attempt(f"{kind}s nested {depth} deep: {place}", held, f"{status} {said}")


def _names(client: Client) -> Iterator[Attempt]:
    for name in UNKNOWN:
        status, said = client.error(GOOD | {name: 1})
        held = status == 400 and "no such field" in said and said.isprintable() and len(said) < 250
        yield Attempt(f"unknown field {name[:20]!r} is refused by name", held, f"{status} {said}")
    for name, value in OPENAI.items():
        status, said = client.error(GOOD | {name: value})
        yield Attempt(f"known field {name} is taken", status == 200, f"{status} {said}")


def _greedy(client: Client) -> Iterator[Attempt]:
    def text(**more) -> object:
        _, found = client.ask({"prompt": "Once upon a time", "max_tokens": 12} | more, TEXT)
        return found["choices"][0]["text"] if isinstance(found, dict) else found

    want = text()
    for cold in (0, 5e-324, 1e-320, 1e-45, 1e-40, 1e-38, 1e-20, 1e-7):
        for more in ({}, {"seed": 1}, {"top_p": 0.9}):
            found = text(temperature=cold, **more)
            yield Attempt(f"temperature {cold} is greedy {more or ''}", found == want, repr(found))
    for tiny in (5e-324, 1e-45, 1e-7):
        found = text(temperature=1, top_p=tiny)
        yield Attempt(f"top_p {tiny} takes the best token", found == want, repr(found))


def _extremes(client: Client, short: bool) -> Iterator[Attempt]:
    shown = {"logprobs": True, "top_logprobs": 11}
    for field, values in EXTREMES.items():
        for value in values:
            for more in (shown, shown | {"temperature": 1})[: 1 if short else 2]:
                status, said = client.error(GOOD | more | {field: value})
                held = status == 200 or (status == 400 and said.startswith(f"[{field}]"))
                at = "" if more is shown else ", at a temperature"
                yield Attempt(f"{field} = {str(value)[:20]}{at}", held, f"{status} {said}")
    draw, bad, count = random.Random(5), [], 80 if short else 1200
    for _ in range(count):
        some = draw.sample(sorted(EXTREMES), draw.randrange(1, 7))
        body = GOOD | {field: draw.choice(EXTREMES[field]) for field in some}
        body["stream"] = draw.random() < 0.2
        status, said = client.error(body)
        if status not in (200, 400):
            bad.append((body, status, said))
    yield Attempt(f"{count} random bodies of extreme values", not bad, str(bad[:2]))


def _raw(client: Client) -> Iterator[Attempt]:
    table = {
        "empty": b"",
        "not JSON": b"{",
        "a list": b"[]",
        "a text": b'"x"',
        "a number": b"1",
        "null": b"null",
        "not UTF-8": b"\xff\xfe",
        "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
        "half of a surrogate pair": b'{"prompt": "\\ud800"}',
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "-Infinity": b'{"prompt": "a", "temperature": -Infinity}',
        "1e999": b'{"prompt": "a", "temperature": 1e999}',
        "a number of 5,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        "text behind the end": b'{"prompt": "a"} {"prompt": "b"}',
        "zero bytes": bytes(1000),
        "only spaces": b" " * 100_000,
    }
    for name, data in table.items():
        status, said = client.error(data, TEXT)
        held = status == 400 and said.startswith("[") and said.isprintable()
        yield Attempt(f"a body that is {name}", held, f"{status} {said}")
    status, said = client.error(b" " * (9 << 20), TEXT)
    yield Attempt("a body above --max-body", status == 413, f"{status} {said}")
