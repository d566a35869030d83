"""Calls of tools in a chat that goes on: each template gets arguments as it wants them, and no history is refused."""

import json
from types import SimpleNamespace

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from random_models import write_tokenizer
from request_bodies import MODEL_INFO
from scripted_models import write_thinker
from serving import post, read_prompts, refused, serving
from small_models import TINY

from mlxkv.generate.prompt_escaping import continued
from mlxkv.serve.apis.openai import read_chat
from mlxkv.serve.prompts import Prompts

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
                asked = read_chat(body | {"tools": [TOOL]}, MODEL_INFO)
                prompt = prompts.prompt(asked)
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


# -- one rule for the order of roles, whatever the API and the template

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TURNS = (  # as Mistral's: calls and results are no turns; no system
    "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}<s>{{ m.role }}\n{{ m.content }}"
    "{{ 'call' if m.tool_calls }}</s>\n{% endfor %}"
)
CHAT = "/v1/chat/completions"
U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
USED = [A | {"tool_calls": CALLS}, {"role": "tool", "tool_call_id": "1", "content": "r"}]


def system(text: str, role: str = "system") -> dict:
    return {"role": role, "content": text}


# Chats, what a strict template writes of them, and what one that wants turns and no system writes.
BE = system("s")
ORDERS = {
    "two first": ([BE, system("t"), U], "system s//t; user u", "user s//t//u"),
    "developer": ([system("s", "developer"), BE, U], "system s//s; user u", "user s//s//u"),
    "late": (
        [BE, U, A, BE],
        "system s; user u; assistant a; user s",
        "user s//u; assistant a; user s",
    ),
    "two questions": ([U, U], "user u//u", "user u//u"),
    "two answers": ([U, A, A, U], *["user u; assistant a//a; user u"] * 2),
    "the assistant first": ([A, U], "assistant a; user u", "user ...; assistant a; user u"),
    "only then": ([BE, A, U], "system s; assistant a; user u", "user s; assistant a; user u"),
    "the system alone": ([BE], "system s", "user s"),
    "a question behind a result": (
        [U, *USED, U],
        "user u; assistant a; tool r; user u",
        "user u; assistant acall; tool r; assistant ...; user u",
    ),
}


def read_by(server, path: str, messages: list[dict]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        prompts = read_prompts(server, patch)
        body = {"input": messages} if path == "/v1/responses" else {"messages": messages}
        post(server, path, model="default", **body, **LONGEST[path])
    text = server.engine.tokenizer.decode(prompts[-1].tokens).removesuffix("<s>assistant\n")
    text = text.removeprefix("<s>").removesuffix("</s>\n").replace("</s>\n<s>", "; ")
    return text.replace("\n\n", "//").replace("\n", " ")


LONGEST = {
    CHAT: {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
}


def test_one_rule_for_the_order_of_roles(tmp_path, subtests, caplog):
    for place, template in ((1, STRICT), (2, TURNS)):
        folder = write_thinker(tmp_path / str(place), template=template)
        with serving(folder) as server:
            for name, row in ORDERS.items():
                messages, wanted = row[0], row[place]
                plain = all(one["role"] in ("user", "assistant", "system") for one in messages)
                plain = plain and not any(one.get("tool_calls") for one in messages)
                for path in LONGEST if plain else (CHAT,):
                    if path == "/v1/messages" and messages[-1]["role"] == "assistant":
                        continue
                    with subtests.test(name, path=path, template=place):
                        assert read_by(server, path, messages) == wanted
            assert caplog.text.count("takes no system message") == place - 1


def test_caches_of_the_system_are_kept_where_it_is_in_the_question(tmp_path):
    folder = write_thinker(tmp_path / "turns", template=TURNS)
    with serving(folder) as server, pytest.MonkeyPatch.context() as patch:
        prompts = read_prompts(server, patch)
        post(server, CHAT, messages=[system("Be brief."), U], max_tokens=1)
        first, *_ = prompts[-1].segments
        assert server.engine.tokenizer.decode(first) == "<s>user\nBe brief."


# -- what a model that reads text alone is not shown: a line says so, and the chat goes on

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
LINE = "[{}: not shown, this model reads text only]"
SHOWN = {
    CHAT: {
        "image": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}},
        "audio": {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        "video": {"type": "video_url", "video_url": {"url": "x"}},
        "file": {"type": "file", "file": {"file_id": "x"}},
    },
    "/v1/messages": {"image": PICTURE, "document": PICTURE | {"type": "document"}},
    "/v1/responses": {"image": {"type": "input_image"}, "file": {"type": "input_file"}},
}


def test_a_line_stands_for_what_is_not_shown(tmp_path, subtests):
    folder = write_thinker(tmp_path / "strict", template=STRICT)
    with serving(folder) as server:
        for path, parts in SHOWN.items():
            kind = "input_text" if path == "/v1/responses" else "text"
            for medium, part in parts.items():
                content = [{"type": kind, "text": "What?"}, part, {"type": kind, "text": "Well?"}]
                asked = [{"role": "user", "content": content}]
                for messages in (asked, [*asked, A, U]):
                    with subtests.test(path, medium=medium, length=len(messages)):
                        text = read_by(server, path, messages)
                        assert f"{LINE.format(medium)}" in text and "Well?" in text
                        assert f"What?{LINE[:1]}" not in text and "]Well" not in text
        result = {"type": "tool_result", "tool_use_id": "t", "content": [PICTURE]}
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        chat = [U, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        assert f"tool {LINE.format('image')}" in read_by(server, "/v1/messages", [*chat, A, U])
        output = [{"type": "input_image"}]
        items = [{"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}]
        items += [{"type": "function_call_output", "call_id": "t", "output": output}]
        assert f"tool {LINE.format('image')}" in read_by(server, "/v1/responses", [U, *items])
        for source, words in (
            ({"type": "text", "media_type": "text/plain", "data": "words"}, "t words"),
            ({"type": "content", "content": [{"type": "text", "text": "words"}]}, "t words"),
        ):
            part = {"type": "document", "title": "t", "source": source}
            chat = [{"role": "user", "content": [part]}]
            assert read_by(server, "/v1/messages", chat) == f"user {words}"


# -- a reply that was cut off goes on where it ended

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
    """Stands for `PromptEscaper` with tokens that are characters."""

    def marked(self, chat):
        return None, [chat]

    def encode(self, parts, add_special_tokens):
        return [ord(c) for part in parts for c in part]


THINKS = SimpleNamespace(
    has_thinking=True, think_start="<think>", think_end="</think>", has_chat_template=True
)


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
    tokens, segments, state = continued(THINKS, Plain(), prompt, ["\1\2\3"], message)
    assert "".join(map(chr, tokens[3:])) == text and state == then
    assert tokens == [1, *segments[1]] and segments[0] == [1]
