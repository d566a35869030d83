"""Every mistake a user can make, through the command: one line on stderr, the right exit code."""

from __future__ import annotations

import io
import json

import pytest
from random_model import write_model, write_tokenizer
from small_models import TINY

from mlxkv.chat.session import Session
from mlxkv.cli import main
from mlxkv.errors import UserError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fails(capsys, monkeypatch):
    """Runs a command that must fail; returns the one line it says."""

    def run(*args: str, code: int = 2, stdin: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert main([str(arg) for arg in args]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        # A chat has already said which model it loaded when a later step fails.
        notes = [line for line in said.err.splitlines() if line.startswith("[")]
        assert said.err.splitlines()[-1:] == notes and len(notes) == 1
        return notes[0]

    return run


@pytest.fixture
def chat(fails, model_folder):
    def run(*args, model=model_folder, **kwargs) -> str:
        return fails("chat", "--model", model, *args, **kwargs)

    return run


def test_unknown_command(fails):
    line = fails("chta")
    assert "got 'chta'; did you mean chat? choose from chat, " in line and "doctor" in line


def test_unknown_option(fails):
    assert "got --mdel; did you mean --model? choose from --model, --kv" in fails(
        "chat", "--mdel", "x"
    )


def test_option_without_value(fails):
    assert "--model" in fails("chat", "--model")


def test_superfluous_argument(fails):
    assert "hello" in fails("fit", "hello")


def test_not_a_number(fails):
    assert "--max-tokens" in fails("chat", "--max-tokens", "many")


def test_unknown_preset(chat):
    line = chat("--kv", "int5", "--prompt", "hi")
    assert (
        line.startswith("[--kv]")
        and "got 'int5'; did you mean int8 or int4? choose from fp16, int8" in line
    )


def test_unknown_model(chat):
    line = chat("--prompt", "hi", model="no-such-model")
    assert "'no-such-model'" in line and "gemma-3-1b" in line


def test_empty_prompt(chat):
    assert "empty prompt" in chat("--prompt", " ")
    assert "empty prompt" in chat(stdin="\n")


def test_no_stdin_at_all(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", "-m", TINY]) == 2
    assert capsys.readouterr().err.startswith("[chat] empty prompt")


def test_max_tokens(subtests, chat):
    for count in ["0", "-3"]:
        with subtests.test(count=count):
            assert f"at least 1; got {count}" in chat("--prompt", "hi", "--max-tokens", count)


def test_sampling(chat):
    for wrong in ("-1", "nan", "inf"):
        assert f"got {wrong}" in chat("--prompt", "hi", "--temp", wrong)
    for wrong in ("-1", "18446744073709551616"):
        assert f"[--seed] must be 0 or more, below 2^64; got {wrong}" in chat(
            "--prompt", "hi", "--seed", wrong
        )
    assert "--top-p" in chat("--prompt", "hi", "--top-p", "1.5")


def test_prompt_longer_than_the_context(chat):
    assert "longer than the model's context" in chat("--prompt", "x" * 3000)


def test_json_without_a_prompt(monkeypatch, capsys, model_folder):
    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["chat", "--model", str(model_folder), "--json"]) == 2
    assert capsys.readouterr().err.startswith("[--json] needs a prompt")


def test_no_chat_template(chat, tmp_path):
    folder = write_model(tmp_path / "plain", template=None)
    assert "no chat template; use --raw" in chat("--prompt", "hi", model=folder)


def test_nan_in_the_logits(chat, tmp_path):
    folder = write_model(tmp_path / "nan", poison=True)
    assert "[load] the weights hold NaN or infinity in model." in chat(
        "--prompt", "hi", model=folder
    )


def test_session_files(chat, tmp_path):
    assert "no such file" in chat("--prompt", "hi", "--load", tmp_path / "missing")
    assert "no file name" in chat("--prompt", "hi", "--load", "")
    (tmp_path / "notes.safetensors").write_text("hello")
    assert "no safetensors file" in chat("--prompt", "hi", "--load", tmp_path / "notes.safetensors")


def test_model_folder_with_a_broken_file(subtests, chat, tmp_path):
    folder = write_model(tmp_path / "broken")
    for broken, text in (
        *(("config.json", None), ("model.safetensors", None), ("tokenizer.json", None)),
        *(("config.json", "{"), ("config.json", "[]"), ("config.json", "{}")),
        ("config.json", '{"model_type": "no-such-architecture"}'),
        *(("model.safetensors", "not tensors"), ("tokenizer.json", "{")),
    ):
        with subtests.test(broken=broken, text=text):
            file, whole = folder / broken, (folder / broken).read_bytes()
            file.unlink()
            if text is not None:
                file.write_text(text)
            assert str(folder) in chat("--prompt", "hi", model=folder)
            file.write_bytes(whole)


def test_truncated_weights(chat, tmp_path):
    folder = write_model(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(folder) in chat("--prompt", "hi", model=folder)


def test_empty_model_folder(chat, tmp_path):
    write_tokenizer(tmp_path)
    assert "config.json" in chat("--prompt", "hi", model=tmp_path)


def test_hub_unreachable(chat, monkeypatch):
    line = chat("--prompt", "hi", model="nobody/no-such-model-here")
    assert "nobody/no-such-model-here" in line


def test_fit(fails, tmp_path):
    config = tmp_path / "config.json"
    assert "no such file" in fails("fit", "--config", config)
    config.write_text("{")
    assert "is not valid JSON" in fails("fit", "--config", config)
    config.write_text("[]")
    assert "not the config" in fails("fit", "--config", config)
    config.write_text('{"model_type": "bert"}')
    assert "no hidden_size" in fails("fit", "--config", config)
    assert "--context" in fails("fit", "--context", "long")
    assert "--memory" in fails("fit", "--memory", "much")
    assert "--kv" in fails("fit", "--kv", "int5")
    assert "no such model" in fails("fit", "--model", "no-such-model")
    assert "hub" in fails("fit", "--model", "nobody/no-such-model-here")
    config.write_text(json.dumps({"num_hidden_layers": 2}))
    assert "no hidden_size" in fails("fit", "--config", config)


def test_interrupt_is_130(fails, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxkv.doctor.listing.presets", interrupted)
    assert main(["presets"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_one_line_too(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("mlxkv.doctor.listing.presets", broken)
    assert main(["presets"]) == 1
    said = capsys.readouterr().err
    assert said == "[mlxkv] RuntimeError: first second; MLXKV_TRACEBACK=1 shows where\n"


LONG = "a" * 300


def test_names_that_no_file_can_have(subtests, chat, fails):
    for name in ["~nouser/x", LONG, f"{LONG}/x", "a\0b"]:
        with subtests.test(name=name):
            for option in ("--load", "--calibration"):
                line = chat("--prompt", "hi", option, name)
                assert "no file can have this name" in line and len(line) < 400
            for command in (("chat", "--prompt", "hi"), ("fit",), ("eval",), ("calibrate",)):
                line = fails(*command, "--model", name)
                assert line.startswith("[--model] no file can have this name") and len(line) < 400
            assert "no file can have this name" in fails("fit", "--config", name)
            assert "no file can have this name" in fails("calibrate", "--out", name)


def test_names_of_no_session(chat, loaded):
    session = Session(loaded)
    list(session.ask("hello"))
    for name in (".", "/", "..", "a" * 250):
        assert chat("--prompt", "hi", "--load", name).startswith("[load] "), name
        for act in (session.save, session.load):
            with pytest.raises(UserError, match=r"^\[(/save|load)\] (not a name|the name is too )"):
                act(name)
