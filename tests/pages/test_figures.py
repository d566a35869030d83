"""Figures of README.md are those of the pages, rows and computations that they come from."""

import gzip
import json
import re

import repo_pages

from experiments.evidence import cells
from experiments.pages import memory
from mlxkv.catalog.aliases import CONFIGS, QUANTIZATION
from mlxkv.catalog.sizes import need
from mlxkv.formats.names import parse_kv
from mlxkv.loading.plans import plan_of

ROOT = repo_pages.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (
    "qwen2.5-coder-1.5b",
    "qwen2.5-coder-0.5b",
    "gemma-3-270m",
    "smollm2",
)  # as README's table has them
NAMES = ("Qwen2.5-Coder 1.5B", "Qwen2.5-Coder 0.5B", "Gemma 3 270M", "SmolLM2 135M")
CONTEXT = 8192
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


FOUND = cells.read(ROOT / "docs/results/pretrained")


def close(shown: str, exact: list[float]) -> None:
    """Each number that is shown is the exact one, rounded to the places shown."""
    texts = NUMBER.findall(shown)
    assert len(texts) == len(exact), (shown, exact)
    for text, number in zip(texts, exact, strict=True):
        half = 0.5 * 10 ** -len(text.partition(".")[2])
        assert abs(float(text) - number) <= half * 1.0001, (shown, exact)


def test_quality_is_that_of_the_rows_of_pretrained_models(subtests):
    for preset, shown in SAVED.items():
        with subtests.test(preset=preset):
            for place, model in enumerate(MODELS):
                close(shown[2 + place], [FOUND[model].same(preset, CONTEXT)])
            for place, model in enumerate(MODELS[:3]):
                assert shown[6 + place] == "{} of {}".format(*FOUND[model].answers(preset, CONTEXT))
    assert not FOUND["smollm2"].counted(CONTEXT), "SmolLM2 answers at 8K: README says it does not"


def test_headings_name_each_model_with_its_size():
    head = README[README.index("| `--kv` | bits per value |") :].splitlines()[0].split(" | ")
    assert [cell.rpartition(": ")[2].strip(" |") for cell in head[2:]] == [*NAMES, *NAMES[:3]]


def test_why_it_matters_follows_from_the_rows():
    found = re.search(
        r"change ([\d.]+) % of the next tokens of Qwen2.5-Coder 1.5B and answer nothing; `int4` changes ([\d.]+) % ",
        README,
    )
    model = FOUND[MODELS[0]]
    exact = [100 - model.same(preset, CONTEXT) for preset in ("naive-int4", "int4")]
    close(" ".join(found.groups()), exact)
    assert model.answers("naive-int4", CONTEXT)[0] == 0


def test_humaneval_is_that_of_its_rows():
    found = re.search(
        r"solved of 164: `fp16` (\d+), `int4` (\d+), `fill-3` (\d+), `fill-2.25` (\d+), mlx-lm's codes (\d+)\.",
        README,
    )
    file = ROOT / "docs/results/papers/humaneval-Qwen2.5-Coder-1.5B-Instruct.jsonl.gz"
    made = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    for preset, shown in zip(
        ("fp16", "int4", "fill-3", "fill-2.25", "naive-int4"),
        found.groups(),
        strict=True,
    ):
        passed = [x["passed"] for x in made if (x["preset"], x["context"]) == (preset, 4096)]
        assert (len(passed), sum(passed)) == (164, int(shown)), preset


def test_bytes_are_those_of_fit(subtests):
    plan = plan_of(CONFIGS["llama-3.1-8b"])
    shown = dict(re.findall(r"^ ([\w.-]+) +[\d.]+ +([\d.]+) GiB ", README, re.M))
    assert [*shown] == [preset for preset in SAVED if preset != "naive-int4"]
    for preset in SAVED:
        with subtests.test(preset=preset):
            kv = parse_kv(preset)
            if preset in shown:
                close(shown[preset], [need(plan, kv, 131072).cache / 2**30])
            if preset != "fp16":
                close(SAVED[preset][1], [kv.bits_per_value(128, 128)])


def test_how_much_smaller_follows_from_what_caches_allocate(subtests):
    plan = plan_of(CONFIGS["llama-3.1-8b"])

    def times(preset: str) -> float:
        full, smaller = (need(plan, parse_kv(kv), 131072).cache for kv in ("fp16", preset))
        return full / smaller

    for text, exact in [
        (r"mlx-lm\) (\d) to (\d) times smaller", [times("int8"), times("fill-2.25")]),
        (r"`--kv int4`, the default: ([\d.]+) times smaller", [times("int4")]),
        (r"`--kv int8`: ([\d.]+) times smaller", [times("int8")]),
    ]:
        with subtests.test(text=text):
            close(
                " ".join(
                    re.search(text, README.replace("https://github.com/ml-explore/", "")).groups()
                ),
                exact,
            )


def test_thirteen_times_sooner_follows_from_the_page_of_the_server():
    serve = (ROOT / "docs/results/serve.md").read_text(encoding="utf-8")
    new = rows(serve, "## Prompt reuse")["a text and a question, new"]
    again = rows(serve, "## Prompt reuse")["another question about it"]
    assert "the second question about 1,200 tokens starts [13 times sooner]" in README
    assert 13 <= numbers(new[2])[0] / numbers(again[2])[0] < 14 and new[3].startswith("1,216")


def test_the_table_against_mlx_lm():
    table = rows(README, "## Against")
    kernels = (ROOT / "docs/internals/kernels.md").read_text(encoding="utf-8")
    name = next(key for key in table if key.startswith("time of one token's attention"))
    run = re.search(r"\| \| 32768 \| ([\d.]+) \|.*\| (\d+) / \d+ us \|", kernels)
    (times,) = numbers(table[name][1].removesuffix("fp16's"))
    assert times == round(float(run[2]) / float(run[1]))
    low, high = re.search(r"SDPA \((\d+) to (\d+) us", " ".join(kernels.split())).groups()
    ours = float(re.search(r"\| int4 \| 4.50 \| ([\d.]+)", kernels)[1])
    close(table[name][2].replace("fp16", ""), [ours / float(high), ours / float(low)])


def test_the_picture_is_drawn_by_the_code():
    """Its words, not its curves: another matplotlib may draw them elsewhere."""
    texts = re.compile(r"<text[^>]*>([^<]*)</text>")
    for name, colours in (("memory", memory.LIGHT), ("memory-dark", memory.DARK)):
        kept = (memory.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert texts.findall(kept) == texts.findall(memory.svg(colours)), "make pictures"


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
