"""What the chat says of the embedded models is true: they answer these five prompts, with and without
compression."""

from __future__ import annotations

import pytest

from mlxkv.chat.session import Session
from mlxkv.chat.welcome import REAL, answers, welcome
from mlxkv.models import load
from mlxkv.models.catalog.aliases import CHAT, EMBEDDED, HUB


@pytest.mark.parametrize("kv", ["fp16", "int4"])
@pytest.mark.parametrize("name", EMBEDDED)
def test_the_prompts_work(name, kv):
    loaded = load(name, kv)
    assert len(answers(name)) == 5
    talk = Session(loaded, max_tokens=60)
    for prompt, answer in answers(name).items():
        alone = Session(loaded, max_tokens=60)
        assert answer in "".join(alone.ask(prompt)), prompt
        assert alone.stats.finish_reason == "stop"
        assert answer in "".join(talk.ask(prompt)), f"{prompt} in a conversation"


def test_two_lines():
    for name in (CHAT,):
        what, prompts = welcome(load(name))
        assert what.startswith(f"{name} has 8 million parameters")
        assert f"mlxkv chat -m {REAL}" in what and REAL in HUB
        assert all(prompt in prompts for prompt in answers(name))
