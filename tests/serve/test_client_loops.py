"""Conversations of some turns, as the makers of the clients write them: a stream is joined by the client's own helper,
and what it joined goes back as history."""

import json

import pytest
from scripted_models import ASK, SCHEMA, TOOL, WEATHER, call

THOUGHT = "<think>Hm.</think>"
OSLO, BERGEN = WEATHER, {"name": "weather", "arguments": {"city": 'Bergen "é☃"'}}
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "C:\\new \\d"}}\n</tool_call>'
# What the model says, the text and the calls of it.
TURNS = [
    ("It rains.", "It rains.", []),
    (THOUGHT + "Two. " + call(OSLO, BERGEN), "Two.", [OSLO, BERGEN]),
    (call(OSLO), "", [OSLO]),
    ("I look. " + BROKEN, "I look. " + BROKEN, []),
    ("a\U0001f600é☃", "a\U0001f600é☃", []),
]


def test_chats_of_openai(client, said):
    tools = [{"type": "function", "function": TOOL}]
    messages, prompt_tokens = [*ASK], 0
    for said[0], text, calls in TURNS:
        with client.chat.completions.stream(
            model="caller",
            messages=messages,
            tools=tools,
            max_tokens=400,
            stream_options={"include_usage": True},
        ) as stream:
            final = stream.get_final_completion()
        (choice,) = final.choices
        message = choice.message
        assert message.role == "assistant" and (message.content or "").strip() == text
        functions = [one.function for one in message.tool_calls or []]
        assert [{"name": x.name, "arguments": json.loads(x.arguments)} for x in functions] == calls
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert final.usage.prompt_tokens > prompt_tokens
        prompt_tokens = final.usage.prompt_tokens
        messages.append(message.to_dict())
        messages += [
            {"role": "tool", "tool_call_id": one.id, "content": "rain"}
            for one in message.tool_calls or []
        ] or [{"role": "user", "content": "And then?"}]


def test_the_role_comes_once(client, said):
    """First, with an empty text, also where the reply has none."""
    for said[0] in ("It rains.", ""):
        stream = client.chat.completions.create(model="caller", messages=ASK, stream=True)
        first, *others = [chunk.choices[0].delta for chunk in stream]
        assert (first.role, first.content) == ("assistant", "")
        assert others and all(delta.role is None for delta in others)


def test_responses_of_openai(client, said):
    tools = [{"type": "function", "strict": False} | TOOL]
    items = [*ASK]
    for said[0], text, calls in TURNS:
        with client.responses.stream(model="caller", input=items, tools=tools) as stream:
            final = stream.until_done().get_final_response()
        assert final.output_text.strip() == text
        found = [one for one in final.output if one.type == "function_call"]
        assert [{"name": x.name, "arguments": json.loads(x.arguments)} for x in found] == calls
        items += [one.to_dict() for one in final.output]
        items += [
            {"type": "function_call_output", "call_id": one.call_id, "output": "rain"}
            for one in found
        ] or [{"role": "user", "content": "And then?"}]


def test_messages_of_anthropic(running, said):
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    messages = [*ASK]
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        for said[0], text, calls in TURNS:
            with client.messages.stream(
                model="caller", max_tokens=400, messages=messages, tools=tools
            ) as stream:
                final = stream.get_final_message()
            assert "".join(x.text for x in final.content if x.type == "text").strip() == text
            found = [one for one in final.content if one.type == "tool_use"]
            assert [{"name": one.name, "arguments": one.input} for one in found] == calls
            assert final.stop_reason == ("tool_use" if calls else "end_turn")
            messages.append({"role": "assistant", "content": [x.to_dict() for x in final.content]})
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": "rain"} for one in found
            ]
            messages.append({"role": "user", "content": results or "And then?"})
