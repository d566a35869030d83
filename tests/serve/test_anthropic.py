"""/v1/messages through Anthropic's own client: text, thinking, tools, streams, counts and errors."""

import json

import pytest
from request_bodies import MODEL_INFO
from scripted_models import ASK, SCHEMA, WEATHER, call
from serving import get, post, send, serving, settled

from mlxkv.serve.apis import anthropic as api
from mlxkv.serve.apis.reply import Markup
from mlxkv.serve.refusals import Refused

TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def anthropic():
    """Anthropic's library, which takes seconds to import: not by workers that need none."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic, running):
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ask(client):
    def create(messages=ASK, **more):
        asked = {"model": "caller", "max_tokens": 200} | more
        return client.messages.create(messages=messages, **asked)

    return create


def test_text_and_its_counts(ask, said):
    said[0] = "It rains."
    found = ask(system="Be brief.")
    assert [(block.type, block.text) for block in found.content] == [("text", "It rains.")]
    assert (found.role, found.model, found.type) == ("assistant", "caller", "message")
    assert found.stop_reason == "end_turn" and found.stop_sequence is None
    usage = found.usage
    whole = usage.input_tokens + usage.cache_read_input_tokens
    assert usage.output_tokens == len("It rains.") + 1 and whole > 30
    again = ask(system="Be brief.")
    assert again.usage.cache_read_input_tokens == whole - 1  # one token has to be read
    assert again.usage.input_tokens == 1


def test_a_call_its_answer_and_the_reply(ask, said):
    said[0] = "Let me look. " + call(WEATHER)
    found = ask(tools=[TOOL])
    assert found.stop_reason == "tool_use"
    text, use = found.content
    assert text.text.strip() == "Let me look."
    assert (use.type, use.name, use.input) == ("tool_use", "weather", WEATHER["arguments"])
    assert use.id.startswith("toolu_")
    said[0] = "It rains."
    answer = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    chat = [
        *ASK,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [answer]},
    ]
    then = ask(chat, tools=[TOOL])
    assert then.content[0].text == "It rains." and then.stop_reason == "end_turn"
    # What the model wrote is found again, up to the space that the template puts in JSON elsewhere.
    assert then.usage.cache_read_input_tokens > found.usage.input_tokens


def wire(server, **body) -> list[dict]:
    """The events of a stream as they come, whose names are those of their data."""
    asked = {"model": "caller", "max_tokens": 200, "messages": ASK, "stream": True} | body
    status, headers, data = send(server, "POST", "/v1/messages?beta=true", asked)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    out = []
    for one in data.decode().strip().split("\n\n"):
        name, line = one.split("\n")
        out.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


def test_a_call_that_cannot_be_read_is_text(ask, running, said):
    said[0] = 'Well. <tool_call>{"name": 7}</tool_call>'
    found = ask(tools=[TOOL])
    assert [block.text for block in found.content] == [said[0]] and found.stop_reason == "end_turn"
    deltas = [event.get("delta", {}) for event in wire(running, tools=[TOOL])]
    assert "".join(delta.get("text", "") for delta in deltas) == said[0]
    said[0] += call(WEATHER)
    text, use = ask(tools=[TOOL]).content
    assert (text.text, use.input) == (said[0].partition(call(WEATHER))[0], WEATHER["arguments"])


def test_the_order_on_the_wire(running, said):
    said[0] = "<think>So.</think>Yes." + call(WEATHER)
    found = [one for one in wire(running, tools=[TOOL]) if one["type"] != "ping"]
    kinds = []
    for one in found:
        kind = (one.get("delta") or {}).get("type") or one["type"].removeprefix("content_block_")
        kind += f" {one['index']}" if "index" in one else ""
        kinds += [kind] if kinds[-1:] != [kind] else []
    assert kinds == [
        *("message_start", "start 0", "thinking_delta 0", "signature_delta 0", "stop 0"),
        *("start 1", "text_delta 1", "stop 1", "start 2", "input_json_delta 2", "stop 2"),
        *("message_delta", "message_stop"),
    ]
    deltas = [one.get("delta") or {} for one in found]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "So."
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    last = found[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > 10 and last["kv"]["preset"] == "int4"


def test_starts_that_go_on_and_replies_of_nothing(ask, said):
    said[0] = " rains."
    found = ask([*ASK, {"role": "assistant", "content": "It"}])
    assert found.content[0].text == " rains."
    said[0] = ""
    found = ask()
    assert found.content == [] and found.stop_reason == "end_turn"


def test_tokens_are_counted_as_prompts_are(client, ask, said):
    said[0] = "x"
    asked = {"system": "Be brief.", "tools": [TOOL], "messages": ASK}
    count = client.messages.count_tokens(model="caller", **asked).input_tokens
    usage = ask(**asked).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    long = [{"role": "user", "content": "a" * 5000}]  # beyond the context: counted all the same
    assert client.messages.count_tokens(model="caller", messages=long).input_tokens > 5000


def test_errors_in_its_shape(anthropic, client, running, ask):
    with pytest.raises(anthropic.NotFoundError) as found:
        ask(model="qwen3-4b")
    assert found.value.body["error"]["type"] == "not_found_error"
    assert "choose 'caller'" in found.value.body["error"]["message"]
    part = {"type": "search", "text": "a"}
    for match, messages, more in (
        ("temperature", ASK, {"extra_body": {"temperature": -1}}),
        (r"messages.0.content.0.*or one of image", [{"role": "user", "content": [part]}], {}),
        ("web_search_1 runs on Anthropic", ASK, {"tools": [{"type": "web_search_1", "name": "w"}]}),
        (
            r"'prompt is too long: \d+ tokens > 2048 maximum'",
            [{"role": "user", "content": "a" * 5000}],
            {},
        ),
    ):
        with pytest.raises(anthropic.BadRequestError, match=match):
            ask(messages, **more)
    status, _, data = send(running, "GET", "/v1/messages")
    assert status == 405 and json.loads(data)["type"] == "error"


def test_a_fault_in_a_stream_is_an_event(running, said, monkeypatch):
    monkeypatch.setattr(Markup, "feed", lambda *_: {}["arguments"])
    said[0] = "Yes."
    found = wire(running)
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"
    assert "KeyError" in found[-1]["error"]["message"]
    assert settled(running)["memory"]["promised_bytes"] == 0


def test_tools_are_not_offered_where_none_is_wanted(client):
    count = client.messages.count_tokens
    asked = {"model": "caller", "messages": ASK}
    none = count(**asked, tools=[TOOL], tool_choice={"type": "none"}).input_tokens
    assert none == count(**asked).input_tokens < count(**asked, tools=[TOOL]).input_tokens


def request(**body):
    return api.read_messages({"messages": ASK} | body, MODEL_INFO)


def test_blocks_become_messages():
    def text(words: str) -> dict:
        return {"type": "text", "text": words}

    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("d")]}
    wrong = {"type": "tool_result", "tool_use_id": "t2", "content": "e", "is_error": True}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    secret = {"type": "redacted_thinking", "data": "x"}
    chat = [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [thought, secret, text("c"), use]},
        {"role": "user", "content": [text("c2"), result, wrong, text("f")]},
        {"role": "user", "content": "g"},
    ]
    found = request(messages=chat, system=[text("x-anthropic-billing-header: 7"), text("s")])
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    reply = {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]}
    assert found.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nb"},
        reply,
        {"role": "user", "content": "c2"},
        {"role": "tool", "content": "d", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: e", "tool_call_id": "t2"},
        {"role": "user", "content": "f\n\ng"},
    ]


def test_thinking_is_told_to_the_template():
    for thinking, wanted in (("enabled", True), ("adaptive", True), ("disabled", False)):
        found = request(thinking={"type": thinking}).chat_template_kwargs
        assert found == {"enable_thinking": wanted}
    assert request().chat_template_kwargs is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"system": 7}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequence": ["a"]}, "stop_sequence"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "<s>", "input_schema": {}}]}, "tools.0.name"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": "a"}, "top_k"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice.type"),
    ],
)
def test_fields_are_named(body, field):
    with pytest.raises(Refused) as found:
        request(**body)
    assert found.value.status == 400 and found.value.message.startswith(f"[{field}]")


def test_new_fields_of_its_clients_are_dropped():
    assert request(context_hints=1, betas=["x"], metadata={"user_id": "u"}) == request()


def test_a_reply_is_cut_to_what_memory_holds(model_folder):
    """Coding agents ask for 32,000 tokens each time. What would never fit is refused all the same."""
    with serving(model_folder, kv="fp16", kv_memory="600KB") as server:
        most = get(server, "/v1/kv")["longest_tokens"]
        assert most < 2000
        body = {"model": "random", "max_tokens": 32000}
        found = post(server, "/v1/messages", messages=ASK, **body)
        assert found["usage"]["input_tokens"] + found["usage"]["output_tokens"] == most
        assert found["stop_reason"] == "max_tokens"
        long = [{"role": "user", "content": "a" * (most + 9)}]
        status, _, data = send(server, "POST", "/v1/messages", body | {"messages": long})
        assert status == 503 and "kv-memory" in json.loads(data)["error"]["message"]
