"""Ollama's API through Ollama's own client."""

from __future__ import annotations

import json

import pytest
from saying import call, saying, write_thinker
from serving import get, send

from mlxkv.serve.apis import ollama as api
from mlxkv.serve.http.request import Served
from mlxkv.serve.refusals import Refused

ollama = pytest.importorskip("ollama")

WEATHER = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of some days.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
SERVED = Served("m", "int4", longest=1000, max_tokens=512, vocabulary=260)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return [""]


@pytest.fixture(scope="module")
def running(said, tmp_path_factory):
    folder = write_thinker(tmp_path_factory.mktemp("ollama") / "caller")
    with saying(folder, said) as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with ollama.Client(host=running.url) as client:
        yield client


def test_a_reply_and_its_counts(client, said):
    said[0] = "<think>Oslo lies north.</think>It rains."
    found = client.chat("caller", ASK)
    assert (found.message.content, found.message.thinking) == ("It rains.", "Oslo lies north.")
    assert found.done and found.done_reason == "stop" and found.model == "caller"
    # <think>, the thought, </think>, the text and the end.
    assert found.eval_count == 1 + 16 + 1 + 9 + 1 and found.prompt_eval_count > 30
    assert found.total_duration >= found.eval_duration > 0
    short = client.chat("caller:latest", ASK, options={"num_predict": 3}, think=False)
    assert short.done_reason == "length" and short.eval_count == 3


def test_a_stream(client, said):
    said[0] = "<think>So.</think>Yes. " + call(WEATHER)
    parts = list(client.chat("caller", ASK, tools=[TOOL], stream=True))
    assert "".join(one.message.thinking or "" for one in parts) == "So."
    assert "".join(one.message.content or "" for one in parts).strip() == "Yes."
    (use,) = [use for one in parts for use in one.message.tool_calls or ()]
    assert (use.function.name, use.function.arguments) == ("weather", WEATHER["arguments"])
    assert [one.done for one in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count > 10


def test_a_call_its_answer_and_the_reply(client, said):
    said[0] = call(WEATHER)
    first = client.chat("caller", ASK, tools=[TOOL])
    assert first.message.tool_calls[0].function.arguments == WEATHER["arguments"]
    said[0] = "It rains."
    answer = {"role": "tool", "tool_name": "weather", "content": "rain"}
    found = client.chat("caller", [*ASK, first.message, answer], tools=[TOOL])
    assert found.message.content == "It rains." and not found.message.tool_calls


def test_what_clients_read_first(client, running):
    (one,) = client.list().models
    assert one.model == "caller" and one.size > 100_000 and one.details.family == "llama"
    about = client.show("caller")
    assert {"completion", "tools", "thinking"} == set(about.capabilities)
    assert about.modelinfo["llama.context_length"] == 2048
    assert get(running, "/api/version")["version"].count(".") == 2
    with pytest.raises(ollama.ResponseError, match="choose 'caller'"):
        client.show("qwen3")


def test_errors_in_its_shape(client, running, said, monkeypatch):
    from mlx_lm import server as lm_server

    with pytest.raises(ollama.ResponseError, match="no such model") as found:
        client.chat("qwen3", ASK)
    assert found.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        client.chat("caller", ASK, options={"temperature": -1})
    status, _, data = send(running, "POST", "/api/generate", {"model": "caller"})
    assert status == 404 and isinstance(json.loads(data)["error"], str)

    def broken(*args):
        raise KeyError("arguments")

    monkeypatch.setattr(lm_server.ToolCallFormatter, "__call__", broken)
    said[0] = "Yes."
    with pytest.raises(ollama.ResponseError, match="KeyError"):
        list(client.chat("caller", ASK, stream=True))


def request(**body):
    return api.request_of({"messages": ASK} | body, SERVED)


def test_options_by_our_names():
    options = {
        **{"temperature": 0.5, "top_k": 7, "repeat_penalty": 1.2, "repeat_last_n": 9, "seed": 3},
        **{"stop": ["a"], "num_predict": 5, "num_ctx": 4096, "mirostat": 0},
    }
    found = request(options=options, keep_alive="5m")
    assert (found.temperature, found.top_k, found.seed, found.max_tokens) == (0.5, 7, 3, 5)
    assert (found.repetition_penalty, found.repetition_context_size) == (1.2, 9)
    assert found.stop == ["a"]
    plain = request(options={"repeat_penalty": 1.0, "seed": -1, "num_predict": -1})
    assert (plain.repetition_penalty, plain.seed, plain.max_tokens) == (0, None, 1000)
    assert request(think=True).chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [7]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages.0.images"),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name"),
        ({"options": 7}, "options"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"format": 7}, "format"),
        ({"think": "much"}, "think"),
        ({"optoins": {}}, "optoins"),
    ],
)
def test_fields_are_named(body, field):
    with pytest.raises(Refused) as found:
        request(**body)
    assert found.value.status == 400 and found.value.message.startswith(f"[{field}]")
