"""`mlxkv chat` speaks, and refuses, before anything heavy is imported or read."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from adapters import write_adapter

from mlxkv.chat.options import ChatOptions
from mlxkv.chat.run import read_prompt, text_of
from mlxkv.chat.session import Session
from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.loading.load import load

HEAVY = ("mlx_lm", "transformers", "torch", "mlx")
# Runs commands, a JSON list of words each, up to where heavy imports begin; prints the exit code of each.
START = """
import json, sys, mlxkv.chat.run as start
from mlxkv.cli import main
def stop(what):
    raise SystemExit(77)
start.working = stop
for words in sys.argv[1:]:
    try:
        code = main(json.loads(words))
    except SystemExit as end:
        code = end.code
    print(code)
print(*({name.split(".")[0] for name in sys.modules} & set(%r)))
"""


def begin(*commands: tuple) -> tuple[list[str], list[str]]:
    """Run commands in one process: (exit codes, 77 where heavy imports would begin, and the heavy modules that are
    imported), lines of stderr."""
    words = (json.dumps([str(word) for word in command]) for command in commands)
    call = [sys.executable, "-c", START % (HEAVY,), *words]
    done = subprocess.run(call, input="", capture_output=True, text=True)
    return done.stdout.split(), done.stderr.splitlines()


def test_the_first_line_comes_before_heavy_imports(with_torch, smollm2):
    codes, lines = begin(("chat", "hello", "--kv", "int2"), ("chat", "hello", "-q"))
    assert codes == ["77", "77"] and lines == ["smollm2 · --kv int2"]


WRONG = (
    *("--temp -1", "--top-p 2", "--seed -1", "--max-tokens 0", "--kv int5"),
    *("--kv int4+keep0.3", "--model tinny", "--dtype int8", "--chat-template-args [1]"),
    *('--chat-template-args {"tokenize":true}', "--load no-such-session", "--raw --system x"),
    "-p twice",
)


def test_wrong_options_are_refused_before_heavy_imports():
    codes, lines = begin(*(("chat", "hello", *wrong.split()) for wrong in WRONG))
    assert codes == ["2"] * len(WRONG) == ["2"] * len(lines)
    assert all(line.startswith("[") for line in lines)


def test_a_session_is_looked_at_before_the_model_is_read(model_folder, tmp_path, smollm2):
    session = Session(load(str(model_folder), "int4"), max_tokens=4)
    list(session.ask("hello"))
    path = session.save(str(tmp_path / "talk"))
    own = ("chat", "hi", "-m", model_folder, "--load", path)
    codes, lines = begin(own, (*own, "--kv", "int8"), ("chat", "hi", "--load", path))
    assert codes[:3] == ["77", "2", "2"]
    assert "was saved with another cache; got --kv int4" in lines[-2]
    assert "belongs to another model" in lines[-1]


def test_a_session_goes_on_with_the_adapter_that_it_was_saved_with(model_folder, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", load(str(model_folder), "fp16").model)
    session = Session(load(str(model_folder), "int4", adapter_path=adapter), max_tokens=4)
    list(session.ask("hello"))
    path = session.save(str(tmp_path / "talk"))
    own = ("chat", "hi", "-m", model_folder, "--load", path)
    codes, lines = begin((*own, "--adapter-path", adapter), own)
    assert codes[:2] == ["77", "2"]
    assert "belongs to another model" in lines[-1]


def test_a_session_of_an_older_name_goes_on_as_it_was_saved(model_folder, tmp_path):
    """Names took numbers once: such a file says what its cache was."""
    kv = replace(parse_kv("int4"), sink=4, name="int4+sink4")
    saved = Session(load(str(model_folder), kv), max_tokens=4)
    list(saved.ask("hello"))
    path = str(saved.save(str(tmp_path / "talk")))
    options = ChatOptions(kv="int4+sink4", load=path)
    assert options.cache == kv and options.cache.name == "int4+sink4"
    again = Session(load(str(model_folder), options.cache), max_tokens=4)
    again.load(path)
    assert again.tokens == saved.tokens
    for other in ("int4+sink8", "int4"):
        with pytest.raises(UserError, match="unknown preset|was saved with another cache"):
            Session(load(str(model_folder), ChatOptions(kv=other, load=path).cache)).load(path)
    with pytest.raises(UserError, match="unknown preset"):
        ChatOptions(kv="int4+sink4")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("options", "piped", "prompt"),
    [
        ({"text": ["Sum", "up"]}, "a long text\n", "a long text\n\nSum up"),
        ({"prompt": "Sum up"}, "a long text\n", "a long text\n\nSum up"),
        ({"prompt": "Sum up"}, "", "Sum up"),
        ({}, "a long text\n", "a long text"),
        ({}, "", ""),
        ({"text": ["Sum up"]}, None, "Sum up"),
        ({}, None, None),
    ],
)
def test_stdin_comes_before_the_text_of_the_command_line(options, piped, prompt, monkeypatch):
    stdin = Terminal() if piped is None else io.TextIOWrapper(io.BytesIO(piped.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert read_prompt(ChatOptions(**options)) == prompt


def test_what_is_piped_is_text(subtests):
    for data, text in (
        (b"plain\r\ntext", "plain\ntext"),
        ("für Ärzte".encode(), "für Ärzte"),
        ("für Ärzte".encode("utf-8-sig"), "für Ärzte"),
        ("für Ärzte".encode("utf-16"), "für Ärzte"),
        ("a long text für Ärzte".encode("latin-1"), "a long text f\ufffdr \ufffdrzte"),
        (b"", ""),
    ):
        with subtests.test(data=data):
            assert text_of(data) == text
    for data in (
        b"a long line with a zero \0 in it",
        b"%PDF-1.4\n\xe2\xe3\xcf\xd3 obj\n\0",
        bytes(range(128, 256)),
        b"\x89PNG\r\n\x1a\n\0",
    ):
        with subtests.test(data=data):
            with pytest.raises(UserError, match=r"\[stdin\] not text; got .* begin with b'"):
                text_of(data)


def test_a_pipe_that_stays_open_is_waited_for_aloud(monkeypatch, capsys):
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("mlxkv.chat.run.PATIENCE", 0.01)
        from threading import Timer

        Timer(0.5, os.close, [writer]).start()
        assert read_prompt(ChatOptions(prompt="hello")) == "hello"
    assert "waiting for text on stdin" in capsys.readouterr().err


def test_a_file_is_read_with_the_question(model_folder, tmp_path, capfd, monkeypatch):
    """As in a shell: cat FILE | mlxkv chat "..."."""
    file = tmp_path / "notes.txt"
    file.write_text("word " * 100)
    with file.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        options = ["-m", str(model_folder), "--max-tokens", "3", "--json"]
        assert main(["chat", *options, "Summarise"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["prompt_tokens"] > 500
    assert json.loads(out)["finish_reason"] == "length"
    assert "[cut off at 3 tokens; raise --max-tokens for more]" in err


def test_a_switch_that_a_template_lacks(loaded, model_folder):
    with pytest.raises(UserError, match="no switch for thinking"):
        Session(loaded, template=ChatOptions(think=False).template)
    session = Session(loaded, template={"colour": "red"}, max_tokens=2)
    assert "".join(session.ask("hello")) is not None


def test_a_temperature_of_zero_draws_nothing_whatever_the_makers_recommend(tmp_path, capsys):
    from random_models import write_model

    folder = write_model(tmp_path / "warm")
    said = {"do_sample": True, "temperature": 5.0}
    (folder / "generation_config.json").write_text(json.dumps(said))
    command = ["chat", "-m", str(folder), "--kv", "fp16", "-p", "hello", "--max-tokens", "8", "-q"]
    replies = []
    for options in (["--temp", "0", "--seed", "1"], ["--temp", "0", "--seed", "2"], []):
        assert main([*command, *options]) == 0
        replies.append(capsys.readouterr().out)
    assert replies[0] == replies[1] != replies[2]


def test_the_template_is_told_whether_to_think(tmp_path):
    from random_models import write_model

    template = (
        "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n"
        "{% if not enable_thinking %}silent{% endif %}"
    )
    loaded = load(str(write_model(tmp_path / "thinks", template=template)), "fp16")
    for think, seen in ((True, False), (False, True)):
        session = Session(loaded, template=ChatOptions(think=think).template, max_tokens=2)
        list(session.ask("hello"))
        assert ("silent" in loaded.tokenizer.decode(session.tokens)) == seen
