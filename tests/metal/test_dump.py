"""The commands for a Mac: texts as files, and Apple's compiler over all of them, played here by a script."""

from __future__ import annotations

import json
import os
import re
import stat
import sys

import pytest
from metal import dump, mlx_preamble, texts, xcrun

FEW = ["--presets", "int4", "--dims", "64", "--dtypes", "bfloat16"]
# Refuses the levels and the words that it is told to, and writes down how it was called.
FAKE = """\
#!{python}
import os, re, sys
args = sys.argv[1:]
with open({log!r}, "a") as log:
    print(" ".join(args), file=log)
level = next(x for x in args if x.startswith("-std=")).removeprefix("-std=")
if level in {unknown!r}:
    sys.exit(f"error: invalid value '{{level}}' in '-std='")
text = open(next(x for x in args if x.endswith(".metal"))).read()
wrong = 0
place, line = "", 0
for one in text.split("\\n"):
    line += 1
    if match := re.match('#line 1 "(.*)"', one):
        place, line = match[1], 0
    if {word!r} and {word!r} in one:
        print(f"{{place}}:{{line}}:1: error: no such word", file=sys.stderr)
        wrong = 1
sys.exit(wrong)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put an `xcrun` on the path; returns where it notes its calls."""
    log = tmp_path / "log"

    def put(unknown=(), word=""):
        tool = tmp_path / "bin" / "xcrun"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            FAKE.format(python=sys.executable, log=str(log), unknown=list(unknown), word=word)
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        return log

    return put


def test_texts_are_written_with_an_index(tmp_path, capsys):
    dump.main([str(tmp_path / "out"), *FEW, "--mlx", "0.31.2"])
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert capsys.readouterr().out.startswith(f"{len(index)} texts in ")
    assert {x["body"] for x in index.values()} >= {
        "seal_channel",
        "unseal",
        "attend",
        "attend_tile",
    }
    for name, one in index.items():
        text = (tmp_path / "out" / f"{name}.metal").read_text()
        old = re.sub(r"_(?:float|bfloat16_t|u?int32_t).*", "", one["function"])
        assert f"[[kernel]] void {old}(\n" in text
        assert one["level"] == (320 if one["body"] == "attend_tile" else 310)
        assert one["uses"][0]["preset"] == "int4" and one["uses"][0]["dims"] == 64
    assert (tmp_path / "out" / "mlx_utils.h").read_text() == mlx_preamble.preamble()


def test_apple_compiles_every_text_at_every_level(fake, capsys):
    log = fake()
    assert xcrun.main(FEW) == 0
    said = capsys.readouterr().out
    counts = [int(x) for x in re.findall(r"(\d+) texts in \d+ files, 0 failures", said)]
    assert counts[0] < counts[1] == counts[2], said  # tiles from 3.2 on
    calls = log.read_text().splitlines()
    assert all(call.startswith("-sdk macosx metal -std=metal") for call in calls)
    assert all(" -c " in call and call.endswith(f"-o {os.devnull}") for call in calls)
    assert {re.search(r"-std=(\S+)", call)[1] for call in calls} == set(xcrun.LEVELS.values())


def test_parsing_alone_makes_no_code(fake):
    log = fake()
    assert xcrun.main([*FEW, "--parse"]) == 0
    calls = [call for call in log.read_text().splitlines() if "probe" not in call]
    assert calls and all("-fsyntax-only" in call and " -c " not in call for call in calls)


def test_a_level_that_the_compiler_does_not_know_is_left_out_and_said(fake, capsys):
    fake(unknown=["metal4.0"])
    assert xcrun.main(FEW) == 0
    said = capsys.readouterr().out
    assert (
        "metal4.0: not compiled, the compiler here does not know it: error: invalid value" in said
    )
    assert "metal3.2: " in said and "metal4.0: 1" not in said


def test_no_level_at_all_fails(fake, capsys, monkeypatch):
    fake(unknown=list(xcrun.LEVELS.values()))
    assert xcrun.main(FEW) == 1
    assert "no level was compiled" in capsys.readouterr().out
    monkeypatch.setattr(xcrun, "TOOL", ("no-such-xcrun",))
    assert xcrun.main(FEW) == 1


def test_a_text_that_fails_is_named(fake, capsys):
    fake(word="coherent")
    assert xcrun.main(FEW) == 1
    said = capsys.readouterr().out
    assert re.search(r"metal3.1: \d+ texts in \d+ files, 0 failures", said)
    assert re.search(r"\n  attend_tile-\w{12}: attend_tile-\w{12}:\d+: error: no such word\n", said)


def test_what_the_compiler_says_of_no_text_is_said_of_the_file():
    names = ["a-1", "b-2"]
    assert xcrun.blamed("/tmp/b-2:3:4: error: x\nb-2:5:6: error: y", names) == {
        "b-2": "b-2:3: error: x"
    }
    assert xcrun.blamed("header:3:4: error: x", names) == {"a-1 and 1 more": "header:3: error: x"}
    assert xcrun.blamed("crashed", names) == {"a-1 and 1 more": "crashed"}
    assert xcrun.blamed("", names) == {"a-1 and 1 more": "no message"}


def test_a_file_is_the_preamble_the_header_and_its_texts():
    found = texts.dump(["int8"], dims=(64,), dtypes=("bfloat16",), others=False)
    made = list(xcrun.files(found))
    assert sorted(name for _, names in made for name in names) == sorted(dump.names(found))
    for text, names in made:
        assert text.startswith(mlx_preamble.preamble())
        of = [x for name, x in dump.names(found).items() if name in names]
        header = of[0].kernel.header
        assert all(x.kernel.header == header for x in of)
        assert not header or text.count(header) == 1
        assert all(x.kernel.tail() in text for x in of)
