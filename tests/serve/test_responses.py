"""/v1/responses through OpenAI's own client, and the items that Codex sends."""

import json

import pytest
import scripted_models
from request_bodies import MODEL_INFO
from scripted_models import WEATHER, call
from serving import send

from mlxkv.serve.apis import responses as api
from mlxkv.serve.apis.reply import Markup
from mlxkv.serve.refusals import Refused

TOOL = {"type": "function", "strict": False} | scripted_models.TOOL
PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
ASK = "What is the weather in Oslo?"


@pytest.fixture
def ask(client):
    def create(input=ASK, **more):
        return client.responses.create(model="caller", input=input, **more)

    return create


def test_a_reply_and_its_counts(ask, said):
    said[0] = "<think>Oslo lies north.</think>It rains."
    found = ask(instructions="Be brief.")
    assert found.output_text == "It rains." and found.status == "completed"
    thought, message = found.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Oslo lies north.")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = ask(instructions="Be brief.")
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1
    assert again.usage.total_tokens == usage.input_tokens + again.usage.output_tokens
    short = ask(max_output_tokens=20)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"


def test_a_loop_with_a_tool(ask, said):
    """The client sends back what it was given, as agents do."""
    said[0] = "<think>Look.</think>" + call(WEATHER)
    first = ask(tools=[TOOL])
    use = first.output[-1]
    assert (use.type, use.name, json.loads(use.arguments)) == (
        "function_call",
        "weather",
        WEATHER["arguments"],
    )
    said[0] = "It rains."
    answer = {"type": "function_call_output", "call_id": use.call_id, "output": "rain"}
    items = [{"role": "user", "content": ASK}, *first.output, answer]
    found = ask(items, tools=[TOOL])
    assert found.output_text == "It rains."
    assert found.usage.input_tokens_details.cached_tokens > 30


def test_the_events_of_a_stream(client, said):
    said[0] = "<think>So.</think>Yes. " + call(WEATHER)
    with client.responses.stream(model="caller", input=ASK, tools=[TOOL]) as stream:
        found = list(stream)
        final = stream.get_final_response()
    kinds = []
    for one in found:
        kinds += [one.type] if kinds[-1:] != [one.type] else []
    item = ["response.output_item.added", "response.output_item.done"]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(item[0], "response.content_part.added", "response.reasoning_text.delta"),
        *("response.reasoning_text.done", "response.content_part.done", item[1]),
        *(item[0], "response.content_part.added", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done", item[1]),
        *(item[0], "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", item[1]),
        "response.completed",
    ]
    assert [one.sequence_number for one in found] == list(range(len(found)))
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text.strip() == "Yes." and final.usage.output_tokens > 10


def test_a_call_that_cannot_be_read_is_text(ask, client, said):
    said[0] = 'Well. <tool_call>{"name": 7}</tool_call>'
    found = ask(tools=[TOOL])
    assert found.output_text == said[0] and len(found.output) == 1
    with client.responses.stream(model="caller", input=ASK, tools=[TOOL]) as stream:
        assert stream.until_done().get_final_response().output_text == said[0]
    said[0] += call(WEATHER)
    text, use = ask(tools=[TOOL]).output
    assert text.content[0].text + call(WEATHER) == said[0] and use.name == "weather"


def test_tools_that_take_free_text(ask, said):
    said[0] = call({"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}})
    found = ask(tools=[PATCH, {"type": "web_search", "name": "the web"}])
    (use,) = found.output
    assert (use.type, use.name, use.input) == ("custom_tool_call", "apply_patch", "*** Begin Patch")
    said[0] = "Done."
    answer = {"type": "custom_tool_call_output", "call_id": use.call_id, "output": "ok"}
    items = [{"role": "user", "content": ASK}, use, answer]
    assert ask(items, tools=[PATCH]).output_text == "Done."


def test_errors(openai, client, running, ask, said, monkeypatch):
    for name in ("previous_response_id", "conversation", "background"):
        with pytest.raises(openai.BadRequestError, match=name):
            ask(**{name: True if name == "background" else "x"})
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input=ASK)
    monkeypatch.setattr(Markup, "feed", lambda *_: {}["arguments"])
    said[0] = "Yes."
    with pytest.raises(openai.APIError, match="KeyError"):
        list(ask(stream=True))
    body = {"model": "caller", "input": ASK, "stream": True}
    data = send(running, "POST", "/v1/responses", body)[2].decode()
    last = json.loads(data.strip().rpartition("data: ")[2])
    assert last["type"] == "response.failed" and "KeyError" in last["response"]["error"]["message"]


def request(*items, **body):
    return api.read_response({"input": list(items)} | body, MODEL_INFO)


def test_items_become_messages():
    def text(role, words, kind="input_text"):
        return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}

    use = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    found = request(
        *(text("developer", "p"), text("user", "e"), text("user", "q"), thought),
        *(text("assistant", "a", "output_text"), use),
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        text("developer", "late"),
        instructions="i",
    )
    assert [(one["role"], one["content"]) for one in found.messages] == [
        ("system", "i\n\np"),
        ("user", "e\n\nq"),
        ("assistant", "a"),
        ("tool", "r"),
        ("user", "late"),
    ]
    said = found.messages[2]
    assert said["reasoning_content"] == "hm" and said["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": 7}, "input"),
        ({"input": [7]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_map"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"instruction": "x"}, "instruction"),
    ],
)
def test_fields_are_named(body, field):
    with pytest.raises(Refused) as found:
        api.read_response({"input": "a"} | body, MODEL_INFO)
    assert found.value.status == 400 and found.value.message.startswith(f"[{field}]")
