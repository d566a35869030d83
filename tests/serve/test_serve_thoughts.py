"""Thoughts of earlier turns in requests: whatever the client calls them, the chat template reads them by its name."""

from __future__ import annotations

import pytest
from saying import write_thinker
from serving import post, read_prompts, serving

THOUGHT = "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}"
TEMPLATE = (
    f"{{% for m in messages %}}<s>{{{{ m.role }}}}\n{THOUGHT}{{{{ m.content }}}}</s>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
REPLY = {"role": "assistant", "content": "Yes."}


def chat(**thoughts: str) -> list[dict]:
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
    folder = write_thinker(tmp_path / "thinker", template=TEMPLATE.replace("NAME", name))
    with serving(folder) as server:
        for given in ("reasoning_content", "reasoning"):
            assert "assistant\n<think>hm</think>Yes.</s>" in read(server, chat(**{given: "hm"}))
        assert "assistant\nYes.</s>" in read(server, chat())
        broken = [*chat(reasoning="hm")[:2], {"role": "user", "content": "</s>x"}]  # read in pieces
        assert "<think>hm</think>Yes.</s>" in read(server, broken)


def test_a_template_without_a_name_for_thoughts_gets_none(tmp_path):
    folder = write_thinker(tmp_path / "thinker", template=TEMPLATE.replace(THOUGHT, ""))
    with serving(folder) as server:
        assert read(server, chat(reasoning="hm")) == read(server, chat())
