"""Calls of tools in a chat that goes on: each template gets arguments as it wants them, and no history is refused."""

import json
from types import SimpleNamespace

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from random_model import write_tokenizer
from request_bodies import SERVED
from saying import write_thinker
from serving import post, read_prompts, refused, serving
from small_models import TINY

from mlxkv.models.replies.continuing import continued
from mlxkv.serve.http import request
from mlxkv.serve.reading import Prompts

HEAD = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content if m.content is not none else '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
)
TAIL = "</tool_call>{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
TEMPLATES = {
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}",
    "tojson": "{{ c.function.arguments | tojson }}",
    "joined by +, as DeepSeek R1 does": "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}",
    "is string": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "mlx-lm's own for DeepSeek V3.2": None,
}  # fmt: skip
# Arguments as clients send them, and words that the model has to read.
ARGUMENTS = {
    "an object as text": ('{"city": "Oslo \\"é\\"", "days": 2}', "Oslo"),
    "an object": ({"city": "Oslo"}, "Oslo"),
    "empty text": ("", ""),
    "null": (None, ""),
    "an empty object": ("{}", ""),
    "a list": ("[1, 2]", "1, 2"),
    "a number": ("7", "7"),
    "no JSON": ("city: Oslo", "city: Oslo"),
    "half of it": ('{"city": "Os', "Os"),
    "too deep": ("[" * 50_000, "[[[["),
    "deep": ('{"a":' * 500 + '"Oslo"' + "}" * 500, "Oslo"),
    "a number that is none": ('{"a": 1e400, "b": NaN}', "NaN"),
    "a mark": ('{"city": "\\u003c/s>Oslo"}', "</s>Oslo"),
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_chats_with_calls_go_on(tmp_path, subtests):
    for name, template in TEMPLATES.items():
        folder = tmp_path / name[:4]
        folder.mkdir()
        write_tokenizer(folder, template and HEAD + template + TAIL)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        if template is None:
            file = folder / "tokenizer_config.json"
            settings = json.loads(file.read_text()) | {"chat_template_type": "deepseek_v32"}
            file.write_text(json.dumps(settings))
        tokenizer = load_tokenizer(folder)
        prompts = Prompts(tokenizer, {})
        for kind, (arguments, word) in ARGUMENTS.items():
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": arguments},
            }
            chat = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "tool_calls": [call]},
            ]
            body = {"messages": [*chat, {"role": "tool", "tool_call_id": "1", "content": "rain"}]}
            with subtests.test(name, arguments=kind):
                asked = request.check(body | {"tools": [TOOL]}, True, SERVED)
                prompt = prompts.read(asked)
                text = tokenizer.decode(prompt.tokens)
                assert "rain" in text and text.count(word) >= 1
                assert '\\"city' not in text or kind == "half of it"  # encoded once
                ends = prompt.tokens.count(tokenizer.eos_token_id)
                assert ends == (0 if template is None else 3)


# -- thoughts of earlier turns, which the chat template reads by its name, whatever the client calls them

THOUGHT = "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}"
THINKING = (
    f"{{% for m in messages %}}<s>{{{{ m.role }}}}\n{THOUGHT}{{{{ m.content }}}}</s>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
REPLY = {"role": "assistant", "content": "Yes."}


def talk(**thoughts: str) -> list[dict]:
    user = [{"role": "user", "content": text} for text in ("So?", "Why?")]
    return [user[0], REPLY | thoughts, user[1]]


def read(server, messages: list[dict]) -> str:
    """The prompt that the model read."""
    with pytest.MonkeyPatch.context() as patch:
        prompts = read_prompts(server, patch)
        post(server, "/v1/chat/completions", messages=messages, max_tokens=1)
    return server.engine.tokenizer.decode(prompts[-1].tokens)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_the_template_reads_thoughts_by_its_name(tmp_path, name):
    folder = write_thinker(tmp_path / "thinker", template=THINKING.replace("NAME", name))
    with serving(folder) as server:
        for given in ("reasoning_content", "reasoning"):
            assert "assistant\n<think>hm</think>Yes.</s>" in read(server, talk(**{given: "hm"}))
        assert "assistant\nYes.</s>" in read(server, talk())
        broken = [*talk(reasoning="hm")[:2], {"role": "user", "content": "</s>x"}]  # read in pieces
        assert "<think>hm</think>Yes.</s>" in read(server, broken)


def test_a_template_without_a_name_for_thoughts_gets_none(tmp_path):
    folder = write_thinker(tmp_path / "thinker", template=THINKING.replace(THOUGHT, ""))
    with serving(folder) as server:
        assert read(server, talk(reasoning="hm")) == read(server, talk())


# -- a reply that was cut off goes on where it ended

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Tell me a story about a mouse."}]


@pytest.fixture(scope="module")
def server():
    with serving(TINY) as server:
        yield server


def reply(server, messages=ASK, **more) -> tuple[str, dict]:
    found = post(server, CHAT, messages=messages, **more)
    return found["choices"][0]["message"]["content"], found


def test_two_halves_are_the_whole(server):
    whole, _ = reply(server, max_tokens=60)
    half, first = reply(server, max_tokens=21)
    assert first["choices"][0]["finish_reason"] == "length" and half and whole.startswith(half)
    start = [*ASK, {"role": "assistant", "content": half}]
    rest, second = reply(server, start, max_tokens=39, continue_final_message=True)
    assert half + rest == whole
    usage = second["usage"]
    assert usage["prompt_tokens"] == first["usage"]["prompt_tokens"] + 21
    assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]
    # Without the field the same messages are a chat that has ended its turn.
    assert reply(server, start, max_tokens=39)[0] != rest


def test_there_has_to_be_a_start(server, subtests):
    for messages in (
        ASK,
        [{"role": "assistant", "content": "Once"}],
        [*ASK, {"role": "assistant", "content": ""}],
        [*ASK, {"role": "assistant", "content": "", "reasoning": "it does not reason"}],
    ):
        with subtests.test(messages=messages):
            error = refused(server, 400, CHAT, messages=messages, continue_final_message=True)
            assert "continue_final_message" in error["message"]


class Plain:
    """Stands for `Turns` with tokens that are characters."""

    def marked(self, chat):
        return None, [chat]

    def encode(self, parts):
        return [ord(c) for part in parts for c in part]


THINKS = SimpleNamespace(has_thinking=True, think_start="<think>", think_end="</think>")


@pytest.mark.parametrize(
    ("state", "message", "text", "then"),
    [
        ("normal", {"content": "a"}, "a", "normal"),
        ("normal", {"content": "a", "reasoning": "\nr\n"}, "<think>\nr\n</think>a", "normal"),
        ("normal", {"content": "", "reasoning_content": "r"}, "<think>r", "reasoning"),
        ("reasoning", {"content": "a", "reasoning": "r"}, "r</think>a", "normal"),
        ("reasoning", {"content": "", "reasoning": "r"}, "r", "reasoning"),
        ("reasoning", {"content": "a"}, "</think>a", "normal"),
    ],
)
def test_reasoning_goes_where_the_model_wrote_it(state, message, text, then):
    prompt = ([1, 2, 3], [[1], [2, 3]], state)
    tokens, segments, state = continued(THINKS, Plain(), prompt, message)
    assert "".join(map(chr, tokens[3:])) == text and state == then
    assert tokens == [1, *segments[1]] and segments[0] == [1]
