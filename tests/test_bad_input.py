"""Every mistake a user can make, through the command: one line on stderr, the right exit code."""

import io
import json
import os
import socket
import subprocess
import sys

import pytest
from random_models import write_model

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
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
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


# What is typed behind `mlxkv`, and a part of the line that says what is wrong.
SLIPS = (
    ("chta", "got 'chta'; did you mean chat? choose from chat, "),
    ("pull qwen3-4b", "got 'pull'; did you mean mlxkv models get qwen3-4b? choose from chat, "),
    ("list", "got 'list'; did you mean mlxkv models? choose"),
    ("rm smollm2", "did you mean mlxkv models rm smollm2? choose"),
    ("help chat", "did you mean mlxkv chat --help? choose"),
    ("version", "did you mean mlxkv --version? choose"),
    ("qwen3-4b", "got 'qwen3-4b'; did you mean mlxkv chat -m qwen3-4b? choose"),
    ("models list", "got 'list'; did you mean mlxkv models? choose from get, rm"),
    ("run qwen3-4b", "[run] no such program; got 'qwen3-4b'; did you mean mlxkv chat -m qwen3-4b?"),
    (
        "chat smollm2",
        "[chat] the name of a model, and no question; got 'smollm2'; write mlxkv chat -m",
    ),
    (
        "-m smollm2 chat hi",
        "[mlxkv] options go after the command; got -m before it; write mlxkv chat -m smollm2",
    ),
    ("--kv int4 serve", "after the command; got --kv before it; write mlxkv serve --kv int4"),
    ("chat --version", "[chat] no such option; got --version; did you mean mlxkv --version?"),
    ("chat hi --ctx 8192", "got --ctx; none is needed: the model's whole context is used"),
    ("chat hi -m ./none.gguf", "[--model] no such file; got './none.gguf'; check the path"),
    ("chat --mdel x", "[chat] no such option; got --mdel; did you mean --model? mlxkv chat --help"),
    ("presets --zz", "[presets] no such option; got --zz; choose from --all, --json"),
    ("chat --model", "[--model] needs a value after it"),
    ("chat --json=x", "[--json] takes no value"),
    ("fit hello", "[fit] takes no words without an option; got hello; write it like mlxkv fit -m "),
    ("launch", "[launch] TOOL is missing; write it like mlxkv launch claude"),
    ("chat --max-tokens many", "[--max-tokens] not a whole number; got 'many'; write it like 12"),
    ("chat --max-tokens=1.5", "[--max-tokens] not a whole number; got '1.5'"),
    ("chat --temp hot", "[--temp] not a number; got 'hot'; write it like 0.5"),
    ("chat --temperature=", "[--temp] not a number; got ''"),
    (
        "chat hi --kv int5",
        "[--kv] unknown preset; got 'int5'; did you mean int8 or int4? choose from fp16, int8",
    ),
    ("chat hi --kv q5_0", "got 'q5_0'; did you mean 5? choose from fp16, int8"),
    ("chat hi --kv q5_1", "got 'q5_1'; did you mean 5? choose"),
    ("chat hi --kv iq4_nl", "got 'iq4_nl'; did you mean int4? choose"),
    ("chat hi --kv q4_k_m", "got 'q4_k_m'; did you mean int4? choose"),
    ("chat hi --kv -3", "[--kv] unknown preset; got '-3'; "),
    ("chat hi --max-tokens 0", "at least 1; got 0"),
    ("chat hi --max-tokens -3", "at least 1; got -3"),
    ("chat hi --temp -1", "got -1"),
    ("chat hi --temp nan", "got nan"),
    ("chat hi --temp inf", "got inf"),
    ("chat hi --seed -1", "[--seed] must be 0 or more, below 2^64; got -1"),
    ("chat hi --seed 18446744073709551616", "below 2^64; got 18446744073709551616"),
    ("chat hi --top-p 1.5", "--top-p"),
    ("chat hi -m no-such-model", "got 'no-such-model'; choose a name that mlxkv models lists"),
    ("chat hi -m qwen3-4c", "did you mean qwen3-4b or qwen3.5-4b or qwen3-8b? choose a name"),
    ("chat hi -m llama", "did you mean llama-3.1-8b or llama-3.2-1b or llama-3.2-3b? choose"),
    ("models get llama", "did you mean llama-3.1-8b or llama-3.2-1b or llama-3.2-3b? choose"),
    ("models get gemma-3-270m", "or gemma-3-1b? make evidence downloads this base model to runs/e"),
    ("chat hi -m nobody/no-such-model-here", "nobody/no-such-model-here"),
    ("fit --context long", "--context"),
    ("fit --context 64k", "[--context] is for one model; got 64k; add --model NAME"),
    ("fit --memory much", "--memory"),
    ("fit --kv int5", "--kv"),
    ("fit --model no-such-model", "no such model"),
    ("fit --model nobody/no-such-model-here", "hub"),
)


def test_slips(subtests, fails):
    for typed, message in SLIPS:
        with subtests.test(typed=typed):
            assert message in fails(*typed.split())


def test_empty_prompt(chat):
    assert "empty prompt" in chat("--prompt", " ")
    assert "empty prompt" in chat(stdin="\n")


def test_switches_of_the_environment(fails, monkeypatch):
    monkeypatch.setenv("MLXKV_KERNELS", "maybe")
    assert fails("presets") == "[MLXKV_KERNELS] neither on nor off; got 'maybe'; choose 0 or 1"


def test_a_server_without_room_for_a_request(fails, model_folder):
    line = fails("serve", "-m", model_folder, "--port", "0", "--kv-memory", "1KB")
    assert "no room for a single short request; got 1KB; 64 tokens need " in line


def test_a_port_in_use(fails, model_folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = fails("serve", "-m", model_folder, "--port", port, code=1)
    assert line.endswith("in use; choose another port, or 0 for a free one")


# What a shell does to the streams, the exit code, and what stderr says. With "1 " Python keeps no buffer.
STREAMS = (
    ("--version >&-", 0, ""),
    ("--version 2>&-", 0, ""),
    ("presets <&- >&- 2>&-", 0, ""),
    ("chat <&-", 2, "[chat] empty prompt; pass --prompt TEXT or pipe some text in\n"),
    ("--version 2>/dev/full", 0, ""),
    ("nonsense 2>/dev/full", 2, ""),
    ("1 nonsense 2>/dev/full", 2, ""),
    ("1 presets <&- >&- 2>&-", 0, ""),
    ("--version >/dev/full", 1, "[stdout] cannot be written to: No space left on device\n"),
    ("presets >/dev/full", 1, "[stdout] cannot be written to: No space left on device\n"),
    ("1 presets >/dev/full", 1, "[stdout] cannot be written to: No space left on device\n"),
)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_streams_that_are_closed_or_full(subtests, smollm2):
    for typed, code, said in STREAMS:
        with subtests.test(typed=typed):
            env = os.environ | {"PYTHONUNBUFFERED": "1" if typed.startswith("1 ") else ""}
            line = f"exec {sys.executable} -m mlxkv {typed.removeprefix('1 ')}"
            done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (code, said)


def test_ctrl_c_while_it_starts(subtests, tmp_path):
    """Modules that are imported first and later, in whose place Ctrl-C comes."""
    for name in ("hashlib", "typer"):
        with subtests.test(name=name):
            (tmp_path / f"{name}.py").write_text("raise KeyboardInterrupt")
            env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
            call = [sys.executable, "-m", "mlxkv", "--version"]
            done = subprocess.run(call, env=env, capture_output=True, text=True)
            assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
            (tmp_path / f"{name}.py").unlink()


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
    assert "got 'nope.kvpack'" in chat("--prompt", "hi", "--load", "nope.kvpack")
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


def test_fit(fails, tmp_path):
    config = tmp_path / "config.json"
    assert "no such file" in fails("fit", "--model", config)
    config.write_text("{")
    assert "is not valid JSON" in fails("fit", "--model", config)
    config.write_text("[]")
    assert "not the config" in fails("fit", "--model", config)
    config.write_text('{"model_type": "bert"}')
    assert "no hidden_size" in fails("fit", "--model", config)
    config.write_text(json.dumps({"num_hidden_layers": 2}))
    assert "no hidden_size" in fails("fit", "--model", config)


def test_interrupt_is_130(fails, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxkv.doctor.listing.presets", interrupted)
    assert main(["presets"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("a\nb"), "[mlxkv] RuntimeError: a b; MLXKV_TRACEBACK=1 shows where"),
        (MemoryError(), "[memory] ran out (MemoryError); end other programs"),
        (
            RuntimeError("can't start new thread"),
            "[memory] ran out (can't start new thread); end other programs",
        ),
    ],
    ids=str,
)
def test_a_bug_is_one_line_too(monkeypatch, capsys, error, line):
    def broken(*args):
        raise error

    monkeypatch.setattr("mlxkv.doctor.listing.presets", broken)
    assert main(["presets"]) == 1
    assert capsys.readouterr().err == line + "\n"


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
            assert "no file can have this name" in fails("calibrate", "--out", name)
            for option in ("--out", "--text"):
                assert fails("eval", option, name).startswith(f"[{option}] no")


def test_names_of_no_session(chat, loaded):
    session = Session(loaded, max_tokens=2)
    list(session.ask("hello"))
    assert chat("--prompt", "hi", "--load", "..").startswith("[load] ")
    for name in (".", "/", "..", "a" * 250):
        for act in (session.save, session.load):
            with pytest.raises(UserError, match=r"^\[(/save|load)\] (not a name|the name is too )"):
                act(name)
