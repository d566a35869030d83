"""Thoughts are put where a chat template reads them, and told from answers by the model's marks."""

from types import SimpleNamespace

from mlxkv.generate.roles import HARMONY, Thinking

GPT_OSS = "{{ '<|channel|>analysis<|message|>' + message.thinking }} {{ '<|channel|>final' }}"
TEMPLATES = {  # how these models' templates read thoughts -> names
    "{% if message.reasoning_content is string %}": ("reasoning_content",),  # Qwen3
    "{% if m['reasoning_content'] is defined %}": ("reasoning_content",),
    "message.get('reasoning') or message.get('reasoning_content')": (
        "reasoning_content",
        "reasoning",
    ),  # Gemma 4
    '{% if "thinking" in message %}': ("thinking",),  # gpt-oss
    "{% if not thinking is defined %}{% set thinking = false %}": (),  # DeepSeek: a switch
    "{{ m.content }}": (),
    None: ("reasoning_content",),  # code of mlx-lm
}


def thinking(template: str | None, start: str = "<think>", end: str = "</think>") -> Thinking:
    return Thinking(SimpleNamespace(chat_template=template, think_start=start, think_end=end))


def test_thoughts_go_where_the_template_reads_them():
    for given in ["reasoning_content", "reasoning", "thinking"]:
        for template in TEMPLATES:
            reply = {"role": "assistant", "content": "Yes.", given: "hm"}
            chat = [{"role": "user", "content": "So?", given: "mine"}, reply]
            want = {"role": "assistant", "content": "Yes."} | dict.fromkeys(
                TEMPLATES[template], "hm"
            )
            assert thinking(template).named(chat) == [chat[0], want]
            assert reply == {"role": "assistant", "content": "Yes.", given: "hm"}


def test_gpt_oss_refuses_thoughts_beside_the_text_of_a_call():
    calls = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    reply = {"role": "assistant", "content": "", "reasoning": "hm"} | calls
    (found,) = thinking(GPT_OSS).named([reply])
    assert found["thinking"] == "hm"
    (found,) = thinking(GPT_OSS).named([reply | {"content": "Let me look."}])
    assert found == {"role": "assistant", "content": "Let me look."} | calls


def test_a_reply_is_taken_apart():
    for text, opened, parts in [
        ("<think>hm</think>Yes.", False, ("hm", "Yes.")),
        ("\n<think>\nhm", False, ("\nhm", "")),
        ("hm</think>Yes.", True, ("hm", "Yes.")),
        ("<think>hm</think>Yes.", True, ("hm", "Yes.")),
        ("Yes. <think>", False, (None, "Yes. <think>")),
        ("</think>Yes.", False, (None, "</think>Yes.")),
    ]:
        message = thinking("m.reasoning_content").message(text, opened)
        assert (message.get("reasoning_content"), message["content"]) == parts


def test_a_template_that_knows_the_marks_gets_the_text():
    text = "<think>hm</think>Yes."
    assert thinking("{{ m.content.split('</think>')[-1] }}").message(text)["content"] == text


def test_models_without_marks():
    assert (
        thinking("m.reasoning_content", "", "").message("<think>hm</think>Yes.")["content"][0]
        == "<"
    )
    plain = Thinking(SimpleNamespace())
    assert plain.message("Yes.", True) == {"role": "assistant", "content": "Yes."}


def test_marks_of_gpt_oss():
    one = thinking(GPT_OSS, None, None)
    assert one.message(f"{HARMONY[0]}hm{HARMONY[1]}Yes.") == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
    }
