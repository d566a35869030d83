"""Chat templates run in a process of their own: the same texts, within bounds of time and memory."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mlxkv.catalog import bounded, rendering
from mlxkv.catalog.bounded import Excess, Process, ProcessStopped
from mlxkv.catalog.rendering import RENDERER, bound
from mlxkv.errors import MachineError, UserError

TALK = [
    {"role": "system", "content": "Be kind. \x1b\u202e😀 é"},
    {"role": "user", "content": "Hi", "extra": {"a": [1, 2.5, None, True]}},
    {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ m.extra | default(1) | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ tools | tojson }}{{ bos_token }}{{ key }}"
)
EXCESSIVE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 10000000000 }}",
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", chat_template=PLAIN)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "key": "value"},
        {"continue_final_message": True},
        {"chat_template": "{{ messages[1].content }}"},
    ],
)
def test_texts_are_those_of_transformers(tokenizer, given, tmp_path):
    original = PreTrainedTokenizerBase.apply_chat_template
    expected = original(tokenizer, TALK, tokenize=False, **given)
    bound(tokenizer, tmp_path)
    assert tokenizer.apply_chat_template(TALK, tokenize=False, **given) == expected
    ids = original(tokenizer, TALK, return_dict=False, **given)
    assert tokenizer.apply_chat_template(TALK, return_dict=False, **given) == ids
    assert type(tokenizer).apply_chat_template is original  # of all others


def test_functions_as_tools_stay_possible(tokenizer, tmp_path):
    def look(place: str) -> str:
        """Look somewhere.

        Args:
            place: where
        """

    bound(tokenizer, tmp_path)
    assert "look" in tokenizer.apply_chat_template(TALK, tools=[look], tokenize=False)


def test_what_a_template_says_is_passed_on(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ raise_exception('roles ' ~ messages[0].role) }}"
    bound(tokenizer, tmp_path)  # no fault yet: it may want another beginning
    with pytest.raises(ValueError, match="^roles system$"):
        tokenizer.apply_chat_template(TALK, tokenize=False)
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(ValueError, match="Expected an expression"):
        tokenizer.apply_chat_template(TALK, tokenize=False)


@pytest.mark.parametrize("name", EXCESSIVE)
def test_an_excessive_template_is_refused(tokenizer, name, tmp_path, monkeypatch):
    """By the time of the processor, long before the clock would end it, which has patience."""
    monkeypatch.setattr(bounded, "PATIENCE", 30.0)
    tokenizer.chat_template, start = EXCESSIVE[name], time.monotonic()
    with pytest.raises(
        UserError,
        match=r"^\[load\] the chat template takes more than .*; got /",
    ):
        bound(tokenizer, tmp_path)
    assert time.monotonic() - start < 20
    tokenizer.chat_template = PLAIN  # and the next one is rendered
    assert tokenizer.apply_chat_template(TALK, tokenize=False).startswith("<system>Be kind.")


def test_what_waits_is_ended_by_the_clock(tmp_path, monkeypatch):
    """It takes no time of the processor: the server says that it is busy, not that the request is at fault."""
    waits = "import time\n\n\ndef prepare():\n    return lambda question: time.sleep(20)\n"
    (tmp_path / "waiting.py").write_text(waits)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bounded, "PATIENCE", 0.2)
    start = time.monotonic()
    with pytest.raises(ProcessStopped):
        Process("waiting").ask(b"", 0.1)
    assert time.monotonic() - start < 15


def test_threads_and_a_killed_process():
    renderer = Process(rendering.__name__)
    question = b'{"conversations": [[{"role": "user", "content": "%d"}]], "chat_template": "%s"}'
    text = b"{{ messages[0].content }}"

    def ask(i: int) -> list[str]:
        return json.loads(renderer.ask(question % (i, text)))["texts"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(64))) == [[str(i)] for i in range(64)]
    process = renderer._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert ask(3) == ["3"] and renderer._process is not process
    renderer.end()
    renderer.end()


def test_memory_that_a_text_took_is_given_back():
    renderer = Process(rendering.__name__)
    template = b"{%% set x = messages[0].content * %d %%}b"
    question = b'{"conversations": [[{"role": "user", "content": "a"}]], "chat_template": "%s"}'
    question %= template
    pids = []
    for size in (1, 1 << 20, 400 << 20, 1):
        assert json.loads(renderer.ask(question % size, 60, 1 << 30))["texts"] == ["b"]
        pids.append(renderer._process and renderer._process.pid)
    assert pids[0] == pids[1] and pids[2] is None and pids[3]
    renderer.ask(question % (400 << 20))  # without a bound: it stays
    assert renderer._process and renderer._process.pid == pids[3]
    renderer.end()


def test_a_process_that_cannot_start_is_no_fault_of_a_template():
    process = Process("no.such.module")
    with pytest.raises(MachineError, match=r"^\[memory\] Python cannot start another process"):
        process.ask(b"{}", 1, 1 << 30)


def test_nothing_around_the_process_chooses_its_modules(tmp_path, monkeypatch):
    for name in ("json.py", "transformers.py", "jinja2.py"):
        (tmp_path / name).write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    renderer = Process(rendering.__name__)
    question = b'{"conversations": [[{"role": "user"}]], "chat_template": "x"}'
    assert json.loads(renderer.ask(question))["texts"] == ["x"]
    renderer.end()


def test_the_process_ends_with_its_pipe():
    RENDERER.start()
    renderer = Process(rendering.__name__)
    renderer.start()
    process = renderer._process
    process.stdin.close()
    start = time.perf_counter()
    process.wait(30)
    assert time.perf_counter() - start < 30
    process.stdout.close()
    assert rendering.RENDERER is RENDERER


def test_excess_that_depends_on_the_messages(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% if messages[0].content == 'go' %}{{ 'a' * 99999999999 }}{% endif %}"
    )
    bound(tokenizer, tmp_path)
    with pytest.raises(Excess):
        tokenizer.apply_chat_template([{"role": "user", "content": "go"}], tokenize=False)
