"""Figures of README.md are those of the pages, rows and computations that they come from."""

from __future__ import annotations

import re

import pytest
import repo_pages

from experiments.pages import memory
from mlxkv.doctor.planning import plan_of
from mlxkv.formats.names import parse_preset
from mlxkv.models.catalog.known import CONFIGS, QUANTIZATION
from mlxkv.models.catalog.sizes import layer_bytes

ROOT = repo_pages.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = ("natural-gemma", "natural-qwen")
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+")


def rows(text: str, start: str) -> dict[str, list[str]]:
    """The first table behind `start`, by the preset in a row's first cell."""
    table = re.search(r"(?:^\|.*\n)+", text[text.index(start) :], re.M)[0]
    found = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[re.search(r"`([\w+./-]+)`", cells[0])[1] if "`" in cells[0] else cells[0]] = cells
    return found


def numbers(cell: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(cell)]


SAVED = rows(README, "## What you save")


def measured(model: str) -> dict[str, list[str]]:
    """The rows of one model in natural.md, by preset."""
    text = (ROOT / "docs/results/natural.md").read_text(encoding="utf-8")
    part = re.split(r"^## natural-", text, flags=re.M)
    own = next(section for section in part if section.startswith(model.removeprefix("natural-")))
    own = own.partition("Questions with every value right")[0]
    lines = re.findall(r"^\| `([\w+.-]+)` \|(.*\[.*)$", own, re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def close(shown: str, exact: list[float]) -> None:
    """Each number that is shown is the exact one, rounded to the places shown."""
    texts = NUMBER.findall(shown)
    assert len(texts) == len(exact), (shown, exact)
    for text, number in zip(texts, exact, strict=True):
        half = 0.5 * 10 ** -len(text.partition(".")[2])
        assert abs(float(text) - number) <= half * 1.01, (shown, exact)


@pytest.mark.parametrize("preset", [name for name in SAVED if name != "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_quality_is_that_of_the_page_of_natural_models(preset, model):
    cell = SAVED[preset][3 + MODELS.index(model)]
    found = measured(model).get(preset)
    if cell == "–":
        assert found is None, f"{preset} has been measured on {model}"
        return
    close(cell, numbers(found[2]))
    shares = re.findall(r"[\d.]+", SAVED[preset][5])
    close(shares[min(MODELS.index(model), len(shares) - 1)], numbers(found[6]))


def test_the_answer_of_the_results_is_the_same():
    answer = rows((ROOT / "docs/results/README.md").read_text(encoding="utf-8"), "| preset |")
    both = set(answer) & set(SAVED)
    assert {"int4", "fill-3", "fill-2.25", "int2", "kivi-int2", "oscar-int2"} <= both
    for name in both:
        for column in (3, 4, 5):
            assert numbers(SAVED[name][column]) == numbers(answer[name][column]), (name, column)


@pytest.mark.parametrize("preset", SAVED)
def test_bytes_are_those_of_fit(preset):
    layers = plan_of(CONFIGS["llama-3.1-8b"]).layers
    kv = parse_preset(preset)
    stored = sum(layer_bytes(layer, kv, 131072) for layer in layers)
    close(SAVED[preset][2], [stored / 2**30])
    if preset != "fp16":
        close(SAVED[preset][1], [kv.bits_per_value(128, 128)])


def test_speed_is_that_of_the_decode_step():
    text = (ROOT / "docs/internals/decode_step.md").read_text(encoding="utf-8")
    cells = re.search(r"^\| qwen3-4b, 4 bits \| 131072 \|.*", text, re.M)[0].split("|")
    for preset, column in (("int4", 6), ("int2", 7)):
        assert numbers(SAVED[preset][6])[0] == numbers(cells[column])[0]
    at_32k = re.search(r"^\| qwen3-4b, 4 bits \| 32768 \|.*", text, re.M)[0].split("|")
    assert numbers(at_32k[8])[0] < 1, "compression gains something at 32K: README says it does not"


def test_the_table_against_mlx_lm():
    table = rows(README, "## Against")
    kernels = (ROOT / "docs/internals/kernels.md").read_text(encoding="utf-8")
    name = next(key for key in table if key.startswith("attention of one token"))
    low, high = re.search(r"full precision (\d+) to (\d+) us", name).groups()
    assert f"SDPA ({low} to {high} us" in " ".join(kernels.split())
    sdpa = re.search(r"\| \| 32768 \|.*\| (\d+) / \d+ us \|", kernels)[1]
    assert numbers(table[name][1]) == [float(sdpa)]
    assert numbers(table[name][2]) == [float(re.search(r"\| int4 \| 4.50 \| ([\d.]+)", kernels)[1])]
    gemma, qwen = measured("natural-gemma"), measured("natural-qwen")
    quality = table["quality at 4 bits, gemma and qwen"]
    for cell, preset in ((quality[1], "naive-int4"), (quality[2].partition(",")[0], "int4")):
        close(cell, [numbers(found[preset][2])[0] for found in (gemma, qwen)])
    two = table["quality at 2 bits, natural-gemma"]
    for cell, preset in ((two[1], "naive-int2"), (two[2].partition("(")[0], "fill-2.25")):
        shown, _, bits = cell.partition(" at ")
        close(shown, numbers(gemma[preset][2]))
        close(bits.split()[0], numbers(gemma[preset][0]))


def test_the_picture_is_drawn_by_the_code():
    for name, colours in (("memory", memory.LIGHT), ("memory-dark", memory.DARK)):
        kept = (memory.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == memory.svg(colours), "make pictures"


def test_the_words_of_the_picture_are_its_figures():
    alt = re.search(r'alt="(Computed [^"]*)"', README)[1]
    for model in ("Llama 3.1 8B", "Llama 3.3 70B"):
        shown = re.search(
            rf"{re.escape(model)}: fp16 ([\d.]+) GiB, int4 ([\d.]+), fill-2.25 ([\d.]+)", alt
        )
        bars = {bar.cache: bar for bar in memory.bars(memory.MODELS[model])}
        for text, name in zip(shown.groups(), ("fp16", "int4", "fill-2.25"), strict=True):
            close(text, [bars[name].total])


def test_the_picture_counts_as_fit_does():
    """4-bit weights, and three quarters of a Mac's memory."""
    assert QUANTIZATION["bits"] == 4
    bars = {bar.cache: bar for bar in memory.bars(CONFIGS["llama-3.1-8b"])}
    shown = README[README.index("```text") :]
    for name in ("fp16", "int4", "fill-2.25"):
        line = re.search(rf"^ {name} .*", shown, re.M)[0]
        close(line.split("GiB")[1].strip(), [bars[name].total])
        assert ("yes" in line) == (memory.mac(bars[name].total) == "a 16 GB Mac")


def test_readme_is_short_and_honest_first():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert lines[3].startswith("**No Mac has run it yet**")
    quality = README.index("natural-gemma: mean KL")
    assert "No pretrained model has been run." in README[README.index("## What you save") : quality]
    assert "make evidence MODEL=" in README[quality : README.index("## Against")]
