"""Figures of docs/results and of experiments/README.md are those of the rows that they come from
(tests/support/page_figures.py says which; README.md has test_figures.py, pretrained.md tests/experiments)."""

import json
import re

import page_figures as figures
import pytest

from cuda_track.golden import parity
from experiments.evidence import pretrained, stages

RESULTS = figures.RESULTS
NAMED = re.compile(r"`[^`]*`|\]\([^)]*\)")  # names of presets and files, links
CELLS = {"docs/results/papers.md": figures.PAPERS, "docs/results/history.md": figures.HISTORY}


def tables(text: str) -> list[list[str]]:
    """The cells of all rows of all tables, without heads."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if set(row[0]) != {"-"}]


def checked(name: str, text: str):
    """Each template of a page, the text that it has to fit, and whether it is all of it."""
    for start, template in CELLS.get(name, {}).items():
        yield template, figures.cells_of(text, start)[2], True
    for template in figures.SENTENCES.get(name, ()):
        yield template, text, False


PAGES = sorted({*CELLS, *figures.SENTENCES})


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_those_of_the_rows(name, subtests):
    for template, text, is_whole in checked(name, figures.page(name).read_text(encoding="utf-8")):
        with subtests.test(template=template):
            assert not figures.misfit(text, template, is_whole)


@pytest.mark.parametrize("name", PAGES)
def test_one_changed_digit_is_found(name):
    """Every digit of every figure that is computed."""
    changed = 0
    for template, text, is_whole in checked(name, figures.page(name).read_text(encoding="utf-8")):
        for place in figures.places(text, template, is_whole):
            if text[place].isdigit():
                other = str((int(text[place]) + 1) % 10)
                assert figures.misfit(text[:place] + other + text[place + 1 :], template, is_whole)
                changed += 1
    assert changed > 30


def test_all_that_rests_on_real_models_is_computed():
    """Rows that name another source have no rows in this repository."""
    for row in tables(figures.page("docs/results/papers.md").read_text(encoding="utf-8")):
        if len(row) == 4 and re.search(r"\breal\b", row[3]):
            assert sum(row[0].startswith(start) for start in figures.PAPERS) == 1, row[0]
    history = figures.page("docs/results/history.md").read_text(encoding="utf-8")
    for row in tables(history[history.index("## What real models") :]):
        if len(row) > 2 and re.search(r"\d", NAMED.sub("", row[2])):
            assert sum(row[0].startswith(start) for start in figures.HISTORY) == 1, row[0]


def test_what_is_not_computed_names_its_source(subtests):
    assert {path.name for path in RESULTS.glob("*.md")} == set(figures.ELSEWHERE)
    for name, sources in figures.ELSEWHERE.items():
        text = (RESULTS / name).read_text(encoding="utf-8")
        for source in sources:
            with subtests.test(name=name, source=source):
                assert all(part in text for part in source)


def test_the_table_of_stages_is_that_of_its_rows():
    text = stages.PAGE.read_text(encoding="utf-8")
    assert stages.table() in text and text == stages.page(text)


def test_counts_of_presets():
    measured = set.intersection(
        *({p for p, windows, _ in c.texts if windows == figures.OURS} for c in figures.by_model())
    )
    published = len(measured - {"fp16"})
    on_gpu, on_cpu = (len(presets) for presets in pretrained.DEFAULTS["kv"])
    texts = pretrained.DEFAULTS["texts_at_most"][1]
    for name, said in {
        "README.md": f"[{published} presets, up to 32K tokens, with intervals]",
        "docs/README.md": f"| {published} presets in three pretrained models",
        "docs/reproduce.md": f"On a GPU that measures {on_gpu} presets",
        "experiments/README.md": f"KL and answers of {on_gpu} presets ({on_cpu} without a GPU)",
    }.items():
        text = figures.page(name).read_text(encoding="utf-8")
        assert said in text and len(re.findall(r"\b\d+ presets\b", text)) <= 2, name
    assert texts == 4
    assert (
        f"without one, {on_cpu} presets on four texts"
        in figures.page("docs/reproduce.md").read_text()
    )


def test_counts_of_families_add_up():
    """Each sum of families.md is that of its parts, and each part that has a list is as long as the list."""
    text = (RESULTS / "families.md").read_text(encoding="utf-8")
    whole = [*map(int, re.findall(r"^(\d+) (?:files|families):", text, re.M))]
    built = [*map(int, re.findall(r": (\d+) built and compared", text))]
    layered = [*map(int, re.findall(r", (\d+) of them with compressed layers", text))]
    alone = [*map(int, re.findall(r"layers, (\d+) (?:without any|run as|refused)", text))]
    left = [*map(int, re.findall(r"(\d+) (?:do not run here|were not compared)", text))]
    assert [a + b for a, b in zip(built, left, strict=True)] == whole
    assert [a + b for a, b in zip(layered, alone, strict=True)] == built
    assert re.findall(r"(\d+) with a fault", text) == ["0"] * 3
    mlx, vlm, torch = text.split("\n## ")[1:]
    for section, count, plain in ((mlx, layered[0], alone[0]), (vlm, layered[1], alone[1])):
        lists = re.findall(r"^- (Compressed|Left)[^:]*: (.*)\.$", section, re.M)
        lengths = {"Compressed": 0, "Left": 0}
        for kind, names in lists:
            found = (
                re.findall(r"\(([^)]*)\)", names)
                if section is vlm and kind == "Left"
                else [re.sub(r"\([^)]*\)", "", names)]
            )
            lengths[kind] += sum(len(x.split(", ")) for x in found)
        assert lengths["Compressed"] == count and lengths["Left"] == plain, lengths
    assert f"- Left as they are, {alone[1]}:" in vlm and f"- Left as they are, {alone[2]}:" in torch
    parts = re.search(r"every layer, (\d+): .* grows, (\d+): ", torch)
    assert int(parts[1]) + int(parts[2]) == layered[2]
    last = re.search(
        r"(\d+) files of mlx-lm, (\d+) families of mlx-vlm .*, (\d+) of transformers", text
    )
    assert [*map(int, last.groups())] == left


def test_speeds_of_latents_are_those_of_the_kept_rows():
    """docs/internals/mla.md: microseconds, and speed over mlx-lm's bfloat16. The run's `int4` had exact rotary keys."""
    text = figures.page("docs/internals/mla.md").read_text(encoding="utf-8")
    rows = json.loads((RESULTS / "latents/speed-h200.json").read_text(encoding="utf-8"))["rows"]
    names = {
        "bf16": "bf16, mlx-lm",
        "int8": "naive-int8",
        "int4": "int4, `rotary=16`",
        "int4+rope8": "int4",
    }
    wanted = []
    for row in rows:
        name = names[row["cache"]] + ", plain operations" * row["by"].startswith("plain")
        (full,) = [r for r in rows if r["shape"] == row["shape"] and r["cache"] == "bf16"]
        cells = []
        for part in ("attention", "layer"):
            ratio = full[part] / row[part]
            cells.append(f"{1e6 * row[part]:.0f} us, " + ("1" if row is full else f"{ratio:.2f}"))
        wanted.append([name, *cells])
    table = text[text.index("| shape | cache |") :].split("\n\n")[0]
    assert sorted(row[1:] for row in tables(table)[1:]) == sorted(wanted)


def test_parity_is_that_of_its_rows():
    measured = parity.kept(RESULTS / "parity" / parity.ROWS)
    assert (RESULTS / "parity.md").read_text(encoding="utf-8") == parity.page_of(measured)
    counts = [sum(row["differ"] for row in measured["gpu"][name]) for name in parity.TORCH]
    rows = [row for name in parity.TORCH for row in measured["gpu"][name]]
    right = f"{len(rows)} rows right, {sum(not row['ok'] for row in rows)} wrong, {sum(counts)} codes at a boundary"
    assert right in (RESULTS / "cuda.md").read_text(encoding="utf-8")
    for name in ("docs/README.md", "cuda_track/README.md"):
        assert f"golden rows ({len(rows)} right" in figures.page(name).read_text(encoding="utf-8")
