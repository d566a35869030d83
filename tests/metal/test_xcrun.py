"""The commands for a Mac: texts as files, and Apple's compiler over all of them, played here by a script."""

import json
import os
import re
import sys

import pytest
from metal import mlx_preamble, xcrun

FEW = ["--presets", "int4", "--dims", "64", "--dtypes", "bfloat16"]
# Refuses the levels and the words that it is told to.
FAKE = """\
#!{python}
import sys
args = sys.argv[1:]
assert args[:3] == ["-sdk", "macosx", "metal"]
level = next(x for x in args if x.startswith("-std=")).removeprefix("-std=")
if level in {unknown!r}:
    sys.exit(f"error: invalid value '{{level}}' in '-std='")
place, line, wrong = "", 0, 0
for text in open(next(x for x in args if x.endswith(".metal"))).read().split("\\n"):
    line += 1
    if text.startswith('#line 1 "'):
        place, line = text[9:-1], 0
    if {word!r} and {word!r} in text:
        print(f"{{place}}:{{line}}:1: error: no such word", file=sys.stderr)
        wrong = 1
sys.exit(wrong)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts an `xcrun` on the path."""

    def put(unknown=(), word=""):
        tool = tmp_path / "bin" / "xcrun"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(FAKE.format(python=sys.executable, unknown=list(unknown), word=word))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    return put


def test_texts_are_written_with_an_index(tmp_path, capsys):
    assert xcrun.main([*FEW, "--write", str(tmp_path / "out")]) == 0
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert capsys.readouterr().out.startswith(f"{len(index)} texts in ")
    assert {x["body"] for x in index.values()} >= {"quantize_channel", "dequantize", "attend_tile"}
    for name, row in index.items():
        text = (tmp_path / "out" / f"{name}.metal").read_text()
        assert f"[[kernel]] void {row['function']}(\n" in text
        assert row["level"] == (320 if row["body"] == "attend_tile" else 310)
        assert row["uses"][0]["preset"] == "int4" and row["uses"][0]["dims"] == 64
    assert (tmp_path / "out" / "mlx_utils.h").read_text() == mlx_preamble.preamble()


def test_apple_compiles_every_text_at_every_level_it_knows(fake, capsys):
    fake(unknown=["metal4.0"])
    assert xcrun.main(FEW) == 0
    output = capsys.readouterr().out
    old, new = map(int, re.findall(r"(\d+) texts, 0 errors", output))
    assert old < new  # tiles from 3.2 on
    assert output.endswith("metal4.0: the compiler here does not know it\n")
    fake(word="coherent")
    assert xcrun.main(FEW) == 1
    output = capsys.readouterr().out
    assert re.search(r"metal3.1: \d+ texts, 0 errors\nmetal3.2: \d+ texts, [1-9]", output)
    assert re.search(r"\n  attend_tile-\w{12}:\d+:1: error: no such word", output)
