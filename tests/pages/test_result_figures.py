"""Figures of docs/results and of experiments/README.md are those of the rows that they come from (README.md has
test_figures.py, pretrained.md tests/experiments).

A template is a sentence or a table cell of a page with the exact number, <0.034213>, where the page shows one, rounded.
It has to be found on its page once, and every number that is shown has to be the exact one rounded to its places.
"""

import json
import re
from functools import cache
from pathlib import Path
from statistics import fmean, median, variance

import pytest
import repo_pages

from cuda_track.golden import parity
from experiments import engine
from experiments.evidence import agreement, pretrained, stages
from experiments.evidence.cells import OURS, PAPER, Cells, read
from experiments.papers import page as papers_page
from mlxkv.eval import intervals

RESULTS = repo_pages.ROOT / "docs/results"
SMOL, GEMMA, QWEN = ALL = ("smollm2", "gemma-3-270m", "qwen2.5-coder-0.5b")
LARGEST = "qwen2.5-coder-1.5b"
BEFORE, AVERAGED, LATER = (f"positions/{x}" for x in ("179f1097", "94ce4093", "21e94f24"))
KI = 1024
EXACT = re.compile(r"<([\d.e-]+)>")
SHOWN = r"(\d*\.?\d+)"

# Figures of a machine's time, or of rows that are not in this repository: the page, a line that it has (a command or
# a source), and the machine. Nothing here recomputes them.
ELSEWHERE = {
    "agreement.md": [("experiments.evidence.agreement MODEL.gguf", "One NVIDIA H200")],
    "cuda.md": [("python -m cuda_track.bench --formats int4,int2", "one NVIDIA H200")],
    "engine.md": [
        ("python -m experiments.engine speed CACHE", "One NVIDIA H200"),
        ("python -m experiments.engine quality CACHE", "on a CPU"),
        ("python -m experiments.engine load CACHE", "The same model on the same GPU"),
    ],
    "families.md": [
        ("python -m experiments.families.mlx --out", "AMD EPYC"),
        ("python -m experiments.families.vlm --out", "AMD EPYC"),
        ("python -m experiments.families --out", "AMD EPYC"),
    ],
    "history.md": [("git worktree add ../before-4023461 4023461", "commit 4023461")],
    "papers.md": [("Their pages are at commit 4023461", "commit 4023461")],
    "parity.md": [("python -m cuda_track.golden.parity", "NVIDIA H200")],
    "peer_tests.md": [("python -m experiments.peer_tests --tests FOLDER", "AMD EPYC")],
    "positions.md": [("the scripts were trials outside the repository", "two CPU cores")],
    "pretrained.md": [],
    "reports.md": [],
    "serve.md": [
        ("python -m experiments.serving load", "two x86-64 cores"),
        ("python -m experiments.serving reuse", "two x86-64 cores"),
    ],
}


@cache
def rows(folder: str = "pretrained") -> dict[str, Cells]:
    return read(RESULTS / folder)


def exact(number: float) -> str:
    return f"<{number:.8g}>"


def kl(preset, models=ALL, at=4, windows=OURS, folder="pretrained") -> str:
    """Mean KL over texts after `at` K tokens, of each model."""
    found = [rows(folder)[m].kl(preset, at * KI, windows).value for m in models]
    return ", ".join(map(exact, found))


def right(preset, model, at=4, folder="pretrained") -> str:
    return "{} of {}".format(*rows(folder)[model].answers(preset, at * KI))


def full(model, at=4) -> int:
    return rows()[model].answers("fp16", at * KI)[0]


def bits(preset, *models) -> str:
    return " and ".join(exact(rows()[model].bits[preset]) for model in models)


def by_model() -> list[Cells]:
    return [rows()[model] for model in ALL]


def grown(preset, at, models, folder) -> list[float]:
    found = [rows(folder)[model] for model in models]
    return [x.kl(preset, at * KI).value / x.kl(preset, KI).value for x in found]


def worst(preset, at, model=QWEN, folder=LATER) -> str:
    values = rows(folder)[model].values(preset, at * KI)
    return exact(max(values) / median(values))


def each(form: str, texts: str) -> str:
    """Put figures one after the other into a sentence's places, {}."""
    return form.format(*texts.split(", "))


# docs/results/history.md: what real models say, by what was said or asked.
HISTORY = {
    "`fill-2.25` is the two-bit cache": f"before, only up to 1K tokens: at 8K {kl('fill-2.25', at=8, folder=BEFORE)} "
    f"beside `int2`'s {kl('int2', at=8, folder=BEFORE)}; {right('fill-2.25', GEMMA, 8, BEFORE)} answers on Gemma (full "
    f"precision {full(GEMMA, 8)}), {right('fill-2.25', QWEN, 8, BEFORE)} on Qwen (68). Now "
    f"{kl('fill-2.25', at=8)} beside {kl('int2', at=8)}; {right('fill-2.25', GEMMA, 8)}, {right('fill-2.25', QWEN, 8)} "
    f"({full(QWEN, 8)})",
    "`fill-3` in place of `int3`": f"before, behind it but on Qwen: {kl('fill-3', at=8, folder=BEFORE)}, `int3` "
    f"{kl('int3', at=8, folder=BEFORE)}. Now {kl('fill-3', at=8)}, `int3` {kl('int3', at=8)}",
    "`int3` loses no answers": f"{right('int3', GEMMA, 8)} on Gemma ({full(GEMMA, 8)}), {right('int3', QWEN, 8)} on "
    f"Qwen ({full(QWEN, 8)}). Before, Qwen's KL was {kl('int3', [QWEN], 4, folder=BEFORE)} at 4K, "
    f"{kl('int3', [QWEN], 8, folder=BEFORE)} at 8K, {kl('int3', [QWEN], 32, folder=BEFORE)} at 32K",
    "`int4` beats mlx-lm's codes": "by half on SmolLM2, by far more on the others: "
    f"{kl('int4', at=8)} against {kl('naive-int4', at=8)}",
    "at four bits everything is good": f"rotations collapse on Qwen: Hadamard {kl('hadamard-int4', [QWEN], 8)}, SRFT "
    f"{kl('srft-int4', [QWEN], 8)}, TurboQuant {kl('turbo-int4', [QWEN], 8)}; on Gemma "
    f"{kl('hadamard-int4', [GEMMA], 8)} to {kl('turbo-int4', [GEMMA], 8)}",
    "OSCAR matches KIVI": f"{kl('oscar-int2', at=8)}; KIVI {kl('kivi-int2', at=8)} at {bits('kivi-int2', QWEN)} bits",
    "KVarN is near `int2`": f"before, as KVarN is no preset any more, {kl('kvarn-int2', at=8, folder=LATER)}: ahead of "
    f"`int2`'s {kl('int2', [SMOL], 8, folder=LATER)} on SmolLM2, collapsed on the others",
    "keys have constants": "Gemma's weights of the key norm reach 30 where the median is 2.5; Qwen's key biases 145 to "
    "211 ([positions](positions.md#where-oscar-and-kvarn-collapse))",
    "8 bits are free": f"not on Qwen with scales per token: {kl('naive-int8', [QWEN], 8)}, "
    f"{exact(rows()[QWEN].same('naive-int8', 8 * KI))} % of next tokens the same",
    "a polar tree of 3.9 bits": f"{kl('polar-tree', at=8)}; `fill-3` {kl('fill-3', at=8)}",
    "low rank and codes combine": f"at 1K {kl('oja-0.75+int4', at=1)}",
    "**Mixed bits**": f"yes: {kl('fill-2.25', at=8)}; before, only at 1K "
    f"({kl('fill-2.25', at=1, folder=BEFORE)})",
    "**Keys without their mean**": "ahead of `int2`: "
    + each(
        "{} and {}, {} and {}, {} and {}",
        ", ".join(kl(p, [m], 8) for m in ALL for p in ("centred-int2", "int2")),
    )
    + "; before, on SmolLM2 alone ("
    + each(
        "{} and {}; {} and {}; {} and {}",
        ", ".join(kl(p, [m], 8, folder=BEFORE) for m in ALL for p in ("centred-int2", "int2")),
    )
    + ")",
    "**4 first and 124 last": "SmolLM2: `fill-2.25` "
    + each(
        "{} instead of {}; Gemma {} and {}; Qwen {} and {}",
        ", ".join(kl("fill-2.25", [m], 8, w) for m in ALL for w in (PAPER, OURS)),
    ),
    "**Low rank that follows": f"`oja-0.75+int4` at {bits('oja-0.75+int4', GEMMA)} to {bits('oja-0.75+int4', SMOL)} "
    f"bits, at 1K: {kl('oja-0.75+int4', at=1)}, each far behind `int3`",
}


def averaging() -> str:
    """KL at the longest contexts, before and after calibrations averaged over positions."""
    longest = [([SMOL], 8), ([GEMMA], 32), ([QWEN], 32)]

    def pairs(preset, folder):
        return " {} to {}, {} to {} and {} to {}".format(
            *(
                kl(preset, model, at, folder=when)
                for model, at in longest
                for when in (BEFORE, folder)
            )
        )

    return (
        "Averaging alone took KL at the longest contexts (8K of SmolLM2, 32K of Gemma and Qwen) from"
        + pairs("fill-2.25", AVERAGED)
        + " with `fill-2.25`, from"
        + pairs("int3", LATER)
        + " with `int3`, from"
        + pairs("int2", LATER)
        + " with `int2`."
    )


# Sentences of other kinds, by page.
SENTENCES = {
    "docs/results/history.md": [
        f"PolarQuant (Wu) safe on every model ({kl('polar', at=8)} at {bits('polar', GEMMA)} to {bits('polar', SMOL)} "
        "bits)",
    ],
    "docs/results/positions.md": [
        "SmolLM2's KL at 8K is {} and {} times its KL at 1K.".format(
            *(exact(grown(p, 8, [SMOL], LATER)[0]) for p in ("fill-2.25", "fill-3"))
        )
        + f" Qwen's worst text has {worst('fill-2.25', 4)} and {worst('fill-3', 4)} times the median KL at 4K, "
        f"{worst('fill-2.25', 32)} and {worst('fill-3', 32)} times at 32K.",
        averaging(),
    ],
}


def _pattern(template: str) -> str:
    parts = EXACT.split(template)
    return "".join(re.escape(part) if i % 2 == 0 else SHOWN for i, part in enumerate(parts))


def misfit(text: str, template: str, whole: bool = False) -> str:
    """Return what is wrong with a template on a page, or in a cell if it is the `whole` of it; "" if nothing is."""
    pattern = _pattern(template)
    found = [re.fullmatch(pattern, text)] if whole else [*re.finditer(pattern, text)]
    if len(found) != 1 or not found[0]:
        return f"not there, or twice: {EXACT.sub(lambda m: f'{float(m[1]):.3g}', template)}"
    exact_numbers = map(float, EXACT.findall(template))
    for shown, number in zip(found[0].groups(), exact_numbers, strict=True):
        half = 0.5 * 10 ** -len(shown.partition(".")[2])
        if abs(float(shown) - number) > half * 1.0001:
            return f"{shown} is {number:.5g}"
    return ""


def cells_of(text: str, start: str) -> list[str]:
    """Return the cells of the one table row whose first cell starts with `start`."""
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def page(name: str) -> Path:
    return repo_pages.ROOT / name


def places(text: str, template: str, whole: bool = False) -> list[int]:
    """Return where on a page, or in a cell, the characters of the numbers are that a template computes."""
    pattern = _pattern(template)
    found = re.fullmatch(pattern, text) if whole else re.search(pattern, text)
    return [i for group in range(1, found.re.groups + 1) for i in range(*found.span(group))]


NAMED = re.compile(r"`[^`]*`|\]\([^)]*\)")  # names of presets and files, links
CELLS = {"docs/results/history.md": HISTORY}


def tables(text: str) -> list[list[str]]:
    """The cells of all rows of all tables, without heads."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if set(row[0]) != {"-"}]


def checked(name: str, text: str):
    """Each template of a page, the text that it has to fit, and whether it is all of it."""
    for start, template in CELLS.get(name, {}).items():
        yield template, cells_of(text, start)[2], True
    for template in SENTENCES.get(name, ()):
        yield template, text, False


PAGES = sorted({*CELLS, *SENTENCES})


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_those_of_the_rows(name, subtests):
    for template, text, is_whole in checked(name, page(name).read_text(encoding="utf-8")):
        with subtests.test(template=template):
            assert not misfit(text, template, is_whole)


@pytest.mark.parametrize("name", PAGES)
def test_one_changed_digit_is_found(name):
    """Every digit of every figure that is computed."""
    changed = 0
    for template, text, is_whole in checked(name, page(name).read_text(encoding="utf-8")):
        for place in places(text, template, is_whole):
            if text[place].isdigit():
                other = str((int(text[place]) + 1) % 10)
                assert misfit(text[:place] + other + text[place + 1 :], template, is_whole)
                changed += 1
    assert changed > 30


def test_all_that_rests_on_real_models_is_computed():
    history = page("docs/results/history.md").read_text(encoding="utf-8")
    for row in tables(history[history.index("## What real models") :]):
        if len(row) > 2 and re.search(r"\d", NAMED.sub("", row[2])):
            assert sum(row[0].startswith(start) for start in HISTORY) == 1, row[0]


def test_what_is_not_computed_names_its_source(subtests):
    assert {path.name for path in RESULTS.glob("*.md")} == set(ELSEWHERE)
    for name, sources in ELSEWHERE.items():
        text = (RESULTS / name).read_text(encoding="utf-8")
        for source in sources:
            with subtests.test(name=name, source=source):
                assert all(part in text for part in source)


@pytest.mark.parametrize("rows", ["h200", "h200x2", "quality", "load"])
def test_the_table_of_engines_is_that_of_its_rows(rows):
    made = engine.table(RESULTS / "engine" / f"{rows}.jsonl")
    assert made in (RESULTS / "engine.md").read_text(encoding="utf-8")
    assert {
        "h200": "| 64 x 8,192: over fp8 | 0.81 | 1.00 | 1.22 | 1.27 | 0.97 | not measured |",
        "load": "| int4 | 4,000 | 4 | 0 | 21 of 40 | 72.9 | 0.0022 | 1.375 | 0.0004, 0.125 | 0.0020, 0.75 |",
        "h200x2": "| 64 x 8,192: tokens a second (over bf16) | 5330 | 6589 (1.24) |",
        "quality": "| int4 | Qwen2.5-Coder-0.5B-Instruct | 98.1 [97.5, 98.7] |",
    }[rows] in made


def _alike(one: dict, other: dict) -> bool:
    """Return whether two rows are of one text, which differs by machine where it is of what is installed."""
    return abs(one["nll_base"] - other["nll_base"]) < 0.002


def test_what_papers_says_of_rows_from_before_is_computed():
    """Of calibrations before positions were averaged, of texts behind a BOS token, and of the other way to read."""
    said = page("docs/results/papers.md").read_text(encoding="utf-8")
    assert (
        "(before {:.1f}, {:.1f} and {:.1f} on".format(*grown("fill-2.25", 8, ALL, BEFORE)) in said
    )
    limits = []
    for model in (SMOL, QWEN):
        places = [(p, at * KI) for p in ("fill-2.25", "fill-3", "int3") for at in (1, 4, 8)]
        now, then = rows()[model], rows(LATER)[model]
        found = [now.kl(*x).value / then.kl(*x).value for x in places]
        limits += [f"{x:.2f}".removeprefix("0") for x in (min(found), max(found))]
    ranges = "{} to {} of the KL that they had on SmolLM2 after 1K, 4K and 8K, {} to {} on Qwen"
    assert ranges.format(*limits) in said
    kept, levels = papers_page.Figures(), []
    for model in papers_page.MODELS:
        for preset in rows()[SMOL].bits.keys() - {"fp16"}:
            one, other = (kept.texts(task, preset, model) for task in ("real 4k", "oscar"))
            same = [t for t in one.keys() & other.keys() if _alike(one[t], other[t])]
            if same:
                levels.append(
                    fmean(one[t]["kl"] for t in same) / fmean(other[t]["kl"] for t in same)
                )
    assert len(levels) > 20
    assert f"has {min(levels):.1f} to {max(levels):.1f} times its KL in *oscar*" in said


def test_where_fill_4_is_not_told_apart_from_int4():
    """And `fill-4.5` from `kivi-int4`; elsewhere they have less KL, as the page says."""

    def ratio(model, ours, theirs, at):
        values = (rows()[model].values(preset, at * KI) for preset in (ours, theirs))
        return intervals.ratio(*values)

    places = [(m, at) for m in (*ALL, LARGEST) for at in (1, 8, 32)]
    measured = [(m, at) for m, at in places if rows()[m].measured("fill-4", at * KI)]
    apart = {x for x in measured if ratio(x[0], "fill-4", "int4", x[1]).limits[1] < 1}
    known = {(SMOL, 8), (LARGEST, 8), (QWEN, 1), (GEMMA, 32), (QWEN, 32)}
    assert len(measured) == 10 and apart == {*measured} - known
    said = page("docs/results/pretrained.md").read_text(encoding="utf-8")
    assert (
        "(not told apart on SmolLM2 and Qwen 1.5B at 8K, on Qwen at 1K, on Gemma and Qwen at 32K)"
        in said
    )
    least = [ratio(m, "fill-4.5", "kivi-int4", 8).limits[1] < 1 for m in ALL]
    assert least == [False, True, True] and "(on SmolLM2 not told apart from `kivi-int4`)" in said


def below(preset: str, bound: float, at: int, model: str) -> int:
    """Texts of which the cache keeps fewer next tokens after `at` K tokens."""
    found = rows()[model].texts[preset, OURS, at * KI]
    assert len(found) == 12
    return sum(row["top1"] < bound for row in found)


LOADED = (
    *("SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"),
    *("gemma-3-270m", "Qwen2.5-Coder-1.5B-Instruct"),
)


def short_of(rows: list[dict]) -> list[tuple[str, str, float]]:
    """Return model and text of each reading of a chosen preset below what was asked, and by how much."""
    return [
        (x["model"], text, choice["bound"] - n / x["tokens"])
        for choice in rows
        if "bound" in choice
        for x in rows
        if "texts" in x and all(x[key] == choice[key] for key in ("model", "preset"))
        for text, n in x["texts"].items()
        if n < choice["bound"] * x["tokens"]
    ]


def test_the_page_of_shares_is_that_of_its_rows():
    text = " ".join((RESULTS / "agreement.md").read_text(encoding="utf-8").split())
    files = {x.stem: agreement.read(x) for x in (RESULTS / "agreement").glob("*.jsonl")}
    for file, found in files.items():
        made = agreement.table(found).split("\n\n")
        assert len(made) == 3 and all(" ".join(part.split()) in text for part in made), file
    counts = {}
    for file, found in files.items():
        whole, limits = agreement.summary(found).split(". Below")
        parts = whole.partition(": ")[2].split(", ")
        counts[file] = whole.partition(":")[0], dict(x.split(" ", 1) for x in parts), limits
    whole, by, limits = counts["h200"]
    lost, readings, interval = re.match(
        r"(\d+) of (\d+) readings are below, (.*) over", whole
    ).groups()
    assert (
        f"of {readings} readings on four models, behind 1K, 8K and 32K tokens, {lost} are below"
        in text
    )
    assert f"{lost} are below, {interval}: of 99 % {by['99%']}, of 97 % {by['97%']};" in text
    models = "SmolLM2 {}, Qwen 0.5B {}, Gemma {}, Qwen 1.5B {}."
    assert models.format(*(by[x] for x in LOADED)) in text
    assert (
        f"{limits.split(': ')[1].removesuffix('.')} readings of the chosen presets are below"
        in text
    )
    whole, by, limits = counts["h200-others"]
    assert f"{whole.split(' [')[0]} [" in text
    assert f"of the texts of other kinds {limits.split(': ')[1]}" in text and by["99%"].startswith(
        "0 of"
    )
    few, of_few = re.match(r"(\d+) of (\d+) readings", whole).groups()
    for name, said in {
        "README.md": f"kept: {few} of {of_few} readings of other kinds of text were below",
        "CHANGELOG.md": f"Of {of_few} readings of texts of kinds that no choice reads {few} are below",
        "docs/guide/presets.md": f"of {of_few} readings of texts of kinds that no choice reads {few} were below",
    }.items():
        assert said in repo_pages.ROOT.joinpath(name).read_text(encoding="utf-8")
    assert {text for _, text, _ in short_of(files["h200-others"])} == {"csv"}
    low = short_of(files["h200-whole-others"])
    assert {(model, text) for model, text, _ in low} == {(LOADED[1], "csv")}
    ends = (f"{100 * end(x for *_, x in low):.1f}".lstrip("0") for end in (min, max))
    assert f"Qwen's CSV, by {' to '.join(ends)}." in text
    again = [counts[name][0] for name in ("h200-whole", "h200-whole-others")]
    lost, of_readings = (sum(int(y.split()[i]) for y in again) for i in (0, 2))
    assert lost == len(low) == 3
    assert f"{lost} of {of_readings} readings are below, all three of Qwen's CSV" in text
    assert again[0].startswith("0 of 96 ") and "On the twelve texts none of 96 is (" in text
    assert f"it is {again[1].split(' readings')[0]} again" in text
    both = [x for y in ("h200-whole", "h200-whole-others") for x in files[y] if "texts" in x]
    said = [
        len(short_of([*both, {"model": LOADED[0], "preset": preset, "bound": bound}]))
        for preset, bound in (("fill-7", 0.99), ("fill-4.5", 0.97))
    ]
    assert said == [0, 1]
    assert "`fill-7` would have had none of 50 below, and `fill-4.5` one" in text
    before = [x for x in files["h200"] if x["model"] == LOADED[1] and x.get("context") != 32 * KI]
    assert f"`fill-5`, of which {len(short_of(before))} of 24 readings" in text
    _, by, _ = counts["cpu"]
    assert f"SmolLM2's two choices lose none of 24, Gemma's {by[LOADED[2]]}." in text
    assert by[LOADED[0]] == "0 of 24"
    six = [[t["tokens"] - n for n in t["same"]] for x in files["h200"] for t in x.get("tried", [])]
    apart = sum(variance(x) - fmean(x) for x in six) / sum(fmean(x) ** 2 for x in six)
    assert f"the six by {f'{apart**0.5:.2f}'.lstrip('0')} of their mean beyond chance" in text
    assert [below("fill-4.5", 0.97, at, SMOL) for at in (8, 4, 1)] == [6, 1, 0]
    assert "has six of twelve texts below 97 % at 8K" in text and "one of twelve at 4K" in text
    assert sorted(below("fill-6", 0.99, 8, model) for model in ALL) == [3, 4, 6]
    assert "`fill-6` has 3 to 6 of twelve texts below 99 % at 8K" in text
    places = [(model, at) for model in ALL for at in (1, 4, 8, 16, 32) if model != SMOL or at < 16]
    assert not any(below("int8", 0.99, at, model) for model, at in places)


def test_the_table_of_stages_is_that_of_its_rows():
    text = stages.PAGE.read_text(encoding="utf-8")
    assert stages.table() in text and text == stages.page(text)


def test_counts_of_presets():
    measured = set.intersection(
        *({p for p, windows, _ in c.texts if windows == OURS} for c in by_model())
    )
    published = len(measured - {"fp16"})
    on_gpu, on_cpu = (len(presets) for presets in pretrained.DEFAULTS["kv"])
    default = {*pretrained.DEFAULTS["kv"][0]}
    assert default < measured and measured - default == {"fp16", "fill-4.5", "fill-6"}
    of_page = f"{on_gpu} of the page's {published} presets"
    texts = pretrained.DEFAULTS["texts_at_most"][1]
    for name, said in {
        "README.md": f"[{published} presets, up to 32K tokens, with intervals]",
        "docs/README.md": f"| {published} presets in three pretrained models",
        "docs/reproduce.md": f"On a GPU that measures {of_page} (",
        "experiments/README.md": f"KL and answers of {of_page} ({on_cpu} without a GPU)",
    }.items():
        text = page(name).read_text(encoding="utf-8")
        assert said in text and len(re.findall(r"\b\d+ presets\b", text)) <= 2, name
    assert texts == 4
    assert f"without one, {on_cpu} presets on four texts" in page("docs/reproduce.md").read_text()


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
    text = page("docs/internals/mla.md").read_text(encoding="utf-8")
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


def test_speeds_of_triton_are_those_of_the_kept_rows():
    """cuda_track/README.md: of each method that has kernels, torch's time over ours."""
    lines = (RESULTS / "papers/codes.jsonl").read_text(encoding="utf-8").splitlines()
    times = {}
    for row in filter(lambda row: "kind" in row, map(json.loads, lines)):
        times.setdefault(row["kind"], []).append(f"{row['ratio']:.2f}".removeprefix("0"))
    said = {kind: ", ".join(ratios) for kind, ratios in times.items()}
    wanted = {
        "affine codes of 2, 3, 4, 8 bits": f"4 bits {said['int4']}; `kivi-int2` {said['kivi-int2']}",
        "mixed bits": f"2.25 bits {said['fill']}",
        "codebook of 2, 3, 4 bits": f"4 bits {said['turbo-int4']}; 3 bits {said['turbo-int3']}; "
        f"2 bits {said['turbo-int2']}",
        "polar keys": said["polar"],
    }
    text = page("cuda_track/README.md").read_text(encoding="utf-8")
    rows = tables(text[text.index("| method | presets |") :].split("\n\n")[0])[1:]
    assert {row[0]: row[4] for row in rows if row[4] != "-"} == wanted


def test_parity_is_that_of_its_rows():
    measured = parity.kept(RESULTS / "parity" / parity.ROWS)
    assert (RESULTS / "parity.md").read_text(encoding="utf-8") == parity.page_of(measured)
    counts = [sum(row["differ"] for row in measured["gpu"][name]) for name in parity.TORCH]
    rows = [row for name in parity.TORCH for row in measured["gpu"][name]]
    right = f"{len(rows)} rows right, {sum(not row['ok'] for row in rows)} wrong, {sum(counts)} codes at a boundary"
    assert right in (RESULTS / "cuda.md").read_text(encoding="utf-8")
    for name in ("docs/README.md", "cuda_track/README.md"):
        assert f"golden rows ({len(rows)} right" in page(name).read_text(encoding="utf-8")
