"""What the commands print when all is well."""

from __future__ import annotations

import io
import json

import pytest
from random_model import write_model

from mlxkv import __version__
from mlxkv.cli import app, main
from mlxkv.console import plain
from mlxkv.formats.presets import COMPARED, PRESETS
from mlxkv.models.catalog.aliases import EMBEDDED

CHAT_KEYS = [
    *("model", "kv", "backend", "prompt_tokens", "generated_tokens", "finish_reason"),
    *("prefill_seconds", "decode_seconds", "tokens_per_second", "kv_bytes", "kv_bytes_fp16"),
    *("kv_bytes_allocated", "bits_per_value", "kv_note", "peak_bytes", "text", "steps", "layers"),
]


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command that must succeed; returns stdout and stderr."""

    def run(*args, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main([str(arg) for arg in args])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out, said.err

    return run


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_help_names_every_command_and_option(run):
    for args in (["--help"], ["-h"], []):
        text = run(*args)[0]
        names = [command.name or command.callback.__name__ for command in app.registered_commands]
        assert all(name in text for name in names)
    text = run("chat", "--help")[0]
    assert all(
        option in text for option in ("--model", "--kv", "--prompt", "--json", "--kv-strict")
    )


def test_version(run):
    assert run("-V") == run("--version")
    assert run("--version")[0] == f"mlxkv {__version__}\n"


def test_chat_prints_the_reply_alone_on_stdout(run, model_folder):
    options = ("chat", "--model", model_folder, "--max-tokens", "9")
    out, err = run(*options, "--prompt", "hello")
    data = last_json(run(*options, "--prompt", "hello", "--json")[0])
    assert out == plain(data["text"], lines=True) + "\n"
    assert str(model_folder) in err and "int4" in err and "tokens/s" in err
    assert run(*options, stdin="hello")[0] == out


def test_a_short_chat_says_that_nothing_is_compressed_yet(run, model_folder):
    options = ("chat", "--model", model_folder, "--max-tokens", "5", "--prompt")
    yet = "nothing compressed yet (exact up to 192 tokens)"
    assert yet in run(*options, "hello")[1]
    assert "16 bits would be" in run(*options, "hello" * 200)[1]
    assert "nothing compressed (full precision)" in run(*options, "hello", "--kv", "fp16")[1]
    short, long = (last_json(run(*options, p, "--json")[0]) for p in ("hello", "hello" * 200))
    assert (short["bits_per_value"], short["kv_note"]) == (None, yet)
    assert 4.5 < long["bits_per_value"] < 16 and long["kv_note"] is None
    assert (
        long["kv_bytes"] < long["kv_bytes_fp16"] and long["kv_bytes"] < long["kv_bytes_allocated"]
    )


def test_chat_json(run, model_folder):
    options = ("chat", "--model", model_folder, "--kv", "fp16", "--max-tokens", "9")
    out = run(*options, "--prompt", "hello", "--json")[0]
    assert len(out.splitlines()) == 1
    data = json.loads(out)
    assert list(data) == CHAT_KEYS
    assert (data["model"], data["kv"]) == (str(model_folder), "fp16")
    assert data["backend"] in ("cpu", "metal", "cuda")
    assert 1 <= data["generated_tokens"] <= 9
    held = data["prompt_tokens"] + data["generated_tokens"]
    assert data["kv_bytes_fp16"] == held * 2 * 2 * 64 * 2
    assert data["kv_bytes"] == 2 * data["kv_bytes_fp16"]  # it runs in 32 bits here
    assert data["bits_per_value"] is None and "full precision" in data["kv_note"]
    assert data["peak_bytes"] > data["kv_bytes"] > 0
    assert len(data["layers"]) == 2
    fields = {"index", "kind", "compressed", "reason", "bits_per_value", "kernel"}
    assert set(data["layers"][0]) >= fields


def test_chat_of_one_seed_repeats_itself(run, model_folder):
    options = ("chat", "--model", model_folder, "--prompt", "hello", "--temp", "1")
    options += ("--max-tokens", "20")
    first, again, other = (run(*options, "--seed", seed)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_chat_takes_what_is_not_text(run, model_folder):
    options = ("chat", "--model", model_folder, "--max-tokens", "2", "--json")
    assert last_json(run(*options, "--prompt", "a\udcffb")[0])["prompt_tokens"] > 3


def test_chat_raw(run, tmp_path):
    folder = write_model(tmp_path / "plain", template=None)
    data = last_json(
        run("chat", "--model", folder, "--raw", "--prompt", "abc", "--max-tokens", "2", "--json")[0]
    )
    assert data["prompt_tokens"] == 3


def test_presets(run):
    out = run("presets")[0]
    assert all(name in out for name in PRESETS)
    assert f"slower than full precision on a GPU: {', '.join(COMPARED)}" in out
    rows = last_json(run("presets", "--json")[0])["presets"]
    assert [row["name"] for row in rows] == list(PRESETS)
    assert rows[0]["bits_per_value"] == 16.0


def test_models(run):
    out = run("models")[0]
    assert "gemma-3-1b" in out and "any hub name" in out
    for name, source in EMBEDDED.items():
        row = next(line for line in out.splitlines() if line.split()[:1] == [name])
        assert row.split()[-1] == ("yes" if source.folder.is_dir() else "no")
    data = last_json(run("models", "--json")[0])
    assert set(data) == {"embedded", "aliases", "cached"}
    assert all(row["model"].count("/") == 1 for row in data["aliases"])


def test_doctor(run):
    out = run("doctor")[0]
    assert "cpu" in out and "mlx-lm" in out
    data = last_json(run("doctor", "--json")[0])
    assert data["versions"]["mlxkv"] == __version__
    assert sum(row["used"] for row in data["backends"]) == 1
    assert data["out_of_range"] == []
    assert data["golden"] and all(row["ok"] for row in data["golden"])
    if any(row["used"] and row["name"] == "cpu" for row in data["backends"]):
        assert {row["reason"] for row in data["kernels"]} == {"no GPU here"}
    else:
        assert data["kernels"][0]["state"] == "right"


def test_a_wrong_golden_row_fails_the_doctor(monkeypatch, capsys):
    row = {"table": "encode", "values": 9, "differ": 0, "wrong": 0, "rms": 0.0, "bound": 1e-6}
    rows = [row | {"case": "a", "ok": True}, row | {"case": "b", "wrong": 3, "ok": False}]
    monkeypatch.setattr("mlxkv.doctor.command.golden_rows", lambda step, every=False: rows)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: encode b: 3 values" in out and "1 of 2 cases right" in out


def test_a_version_outside_the_range_fails_the_doctor(monkeypatch, capsys):
    monkeypatch.setattr("mlxkv.versions.requires", lambda name: ["mlx>=99", "rich>=1"])
    monkeypatch.setattr("mlxkv.doctor.command.golden_rows", lambda step, every=False: [])
    assert main(["doctor"]) == 1
    assert "outside the tested range: mlx " in capsys.readouterr().out


def test_the_chat_in_a_terminal(model_folder, monkeypatch, capsys, tmp_path):
    """The loop with input() replaced: commands, replies, mistakes, the end of the input."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin", Terminal())
    talk = tmp_path / "talk.safetensors"
    lines = [
        *("/help", "hello", "/stats", "/nothing", "/save", f"/save {talk}", "/reset", "/stats"),
        *(f"/load {talk}", "/load", "/load missing", "", "x" * 3000, "and now?"),
    ]
    script = iter(lines)

    def type_in(prompt: str) -> str:
        line = next(script, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", type_in)
    assert main(["chat", "--model", str(model_folder), "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    for text in (
        "/save FILE",
        "nothing compressed yet (exact up to 192 tokens)",
        "cache allocated",
        "no such command; got /nothing; choose from /help",
        "[/save] no file name",
        "saved ",
        "the conversation is forgotten",
        "goes on from",
        "[/load] no file name",
        "no such file",
        "longer than the model's context",
    ):
        assert text in " ".join(out.split()), text
    assert talk.is_file() and list(script) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
