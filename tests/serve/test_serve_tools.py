"""Tool calls through OpenAI's own client: asked for, parsed, answered; also those that are broken.

The sampler is scripted, since no embedded model writes such calls; all that reads them is real.
"""

import json

import pytest
from saying import ASK, TOOL, WEATHER, call

from mlxkv.serve.apis.reply import Markup


@pytest.fixture
def ask(client):
    def create(messages=ASK, **more):
        return client.chat.completions.create(
            model="caller",
            messages=messages,
            tools=[{"type": "function", "function": TOOL}],
            max_tokens=200,
            **more,
        )

    return create


def calls_of(stream) -> tuple[list[list[str]], str, str]:
    """Calls (name, arguments) of a stream, its finish reason, and its text."""
    calls, reason, text = {}, None, ""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                one = calls.setdefault(part.index, ["", ""])
                one[0] += part.function.name or ""
                one[1] += part.function.arguments or ""
    return list(calls.values()), reason, text.strip()


def test_a_call_its_answer_and_the_reply(ask, said):
    said[0] = "Let me look. " + call(WEATHER)
    choice = ask().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "Let me look."
    (one,) = choice.message.tool_calls
    assert one.type == "function" and one.function.name == "weather"
    assert json.loads(one.function.arguments) == WEATHER["arguments"]
    said[0] = "It rains."
    answer = {"role": "tool", "tool_call_id": one.id, "content": "rain"}
    found = ask([*ASK, choice.message.model_dump(exclude_none=True), answer])
    assert found.choices[0].message.content == "It rains."
    assert found.choices[0].finish_reason == "stop" and not found.choices[0].message.tool_calls
    assert found.usage.prompt_tokens_details.cached_tokens > 0  # the first question is still there


def test_calls_in_a_stream(ask, said):
    other = {"name": "weather", "arguments": {"city": 'Bergen "é"'}}
    said[0] = "Two. " + call(WEATHER, other)
    calls, reason, text = calls_of(ask(stream=True))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (one["name"], one["arguments"]) for one in (WEATHER, other)
    ]
    assert reason == "tool_calls" and text == "Two."


BROKEN = [
    *('{"name": "weather"}', "[1]", "7", '{"arguments": {}}', '{"name": "weather", "argu', "null"),
    *('{"name": "weather", "arguments": {"a": 1e400}}', '{"name": "f", "arguments": {"a": [NaN]}}'),
]


def test_a_broken_call_ends_that_request_alone(running, ask, said, subtests):
    """The call is dropped, as in mlx-lm, and the reply ends like one without calls."""
    for text in BROKEN:
        said[0] = f"Well. <tool_call>{text}</tool_call>"
        with subtests.test(text):
            (choice,) = ask().choices
            assert choice.message.content.strip() == "Well." and not choice.message.tool_calls
            assert choice.finish_reason == "stop"
            assert calls_of(ask(stream=True)) == ([], "stop", "Well.")
    said[0] = call({"name": "f", "arguments": {}})
    assert ask().choices[0].message.tool_calls[0].function.name == "f"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_what_formats_is_told(openai, ask, said, monkeypatch, stream):
    """Whatever is raised while a reply is written, the client reads an error, not the end of a connection."""
    monkeypatch.setattr(Markup, "feed", lambda *_: {}["arguments"])
    said[0] = "Yes."
    with pytest.raises(openai.APIError, match="KeyError"):
        list(ask(stream=stream))
