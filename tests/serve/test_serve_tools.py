"""Tool calls through OpenAI's own client: asked for, parsed, answered; also those that are broken
(each form of them: test_calls.py).

The sampler is scripted, since no embedded model writes such calls; all that reads them is real.
"""

import json

import pytest
from scripted_models import ASK, TOOL, WEATHER, call

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


BROKEN = [
    *('{"name": "read"}', "[1]", "7", '{"arguments": {}}', '{"name": "weather", "argu', "null", ""),
    *('{"name": "weather", "arguments": {"a": 1e400}}', '{"name": "f", "arguments": {"a": [NaN]}}'),
    '{"name": "weather", "arguments": {"city": "C:\\Users\\new"}}',
]


def test_a_broken_call_is_text(running, ask, said, subtests):
    """Nothing that the model writes is lost; the reply ends like one without calls."""
    for text in BROKEN:
        said[0] = f"Well. <tool_call>{text}</tool_call>"
        with subtests.test(text):
            (choice,) = ask().choices
            assert choice.message.content == said[0] and not choice.message.tool_calls
            assert choice.finish_reason == "stop"
            assert calls_of(ask(stream=True)) == ([], "stop", said[0])
    said[0] = call({"name": "f", "arguments": {}})
    assert ask().choices[0].message.tool_calls[0].function.name == "f"


def test_a_broken_call_beside_a_right_one(ask, said):
    broken = f"<tool_call>{BROKEN[0]}</tool_call>"
    for said[0] in (broken + call(WEATHER), call(WEATHER) + broken):
        (choice,) = ask().choices
        assert choice.message.content == broken and choice.finish_reason == "tool_calls"
        (one,) = choice.message.tool_calls
        assert json.loads(one.function.arguments) == WEATHER["arguments"]
        calls, reason, text = calls_of(ask(stream=True))
        assert (len(calls), reason, text) == (1, "tool_calls", broken)


def test_a_call_that_is_cut_is_text(client, said):
    """By the length of the reply, or by a stop word."""
    said[0] = "Well. " + call(WEATHER)
    cut = {"model": "caller", "messages": ASK, "max_tokens": 60}
    (choice,) = client.chat.completions.create(**cut).choices
    assert choice.message.content == said[0][:60] and not choice.message.tool_calls
    assert choice.finish_reason == "length"
    text = said[0][:60].strip()
    assert calls_of(client.chat.completions.create(stream=True, **cut)) == ([], "length", text)
    (choice,) = client.chat.completions.create(**cut | {"max_tokens": 200}, stop="}").choices
    assert choice.message.content == said[0].partition("}")[0] and choice.finish_reason == "stop"


def test_completions_have_every_mark(client, said):
    """Text that is not a chat has no thoughts and no calls."""
    said[0] = "<think>Hm.</think>" + call(WEATHER)
    asked = {"model": "caller", "prompt": "a", "max_tokens": 200}
    assert client.completions.create(**asked).choices[0].text == said[0]
    stream = client.completions.create(stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == said[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_what_formats_is_told(openai, ask, said, monkeypatch, stream):
    """Whatever is raised while a reply is written, the client reads an error, not the end of a connection."""
    monkeypatch.setattr(Markup, "feed", lambda *_: {}["arguments"])
    said[0] = "Yes."
    with pytest.raises(openai.APIError, match="KeyError"):
        list(ask(stream=stream))
