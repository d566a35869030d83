"""The page of the papers is what its rows say."""

import gzip
import json
import re

import pytest

from experiments.papers import page
from experiments.papers.page import Figures
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.rows import read

SMOL, GEMMA = list(page.MODELS)[:2]


def row(preset, text, model=SMOL, task="oscar", **numbers):
    about = {"task": task, "split": "test", "model": model, "preset": preset, "windows": "64,64"}
    return about | {"text": text, "context": 4096} | numbers


@pytest.fixture
def figures(tmp_path):
    rows = [row("a", t, kl=kl, nll=2.0, nll_base=1.0, bits=2.5) for t, kl in enumerate((0.1, 0.3))]
    rows += [row("b", t, kl=0.1, bits=2.5) for t in range(3)]
    rows += [row("a", 0, GEMMA, kl=1234.56789, bits=2.25, state="x", versions={})]
    for model in (SMOL, GEMMA):
        file = tmp_path / "run" / "oscar" / f"{model}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(json.dumps(x) for x in rows if x["model"] == model))
    page.keep(tmp_path / "run", tmp_path / "kept")
    return Figures(tmp_path / "kept", least=1)


@pytest.mark.parametrize("paper", page.PICTURES)
@pytest.mark.parametrize("name", ["smollm2", "gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_models_read_the_texts_that_they_read_by_mlx(name, paper):
    """Of transformers' rows and of MLX's the likelihood in full precision is one: as it is not where a tokenizer splits
    words otherwise, or begins otherwise. Two texts are of what a machine has installed."""
    kept = read([page.ROWS.parent / "pretrained" / f"{name}.jsonl.gz"])
    by_mlx = {x["text"]: x["nll_base"] for x in kept if x["task"] == "kl" and x["context"] == 4096}
    model = next(x for x in page.MODELS if x.lower().startswith(name))
    kept = read([page.ROWS / f"{paper}-{model}.jsonl.gz"])
    ours = {x["text"]: x["nll_base"] for x in kept if x["task"] == paper and x["context"] == 4096}
    same = by_mlx.keys() & ours.keys() - {"readme", "licence"}
    assert len(same) == 10
    assert {x: ours[x] for x in same} == pytest.approx({x: by_mlx[x] for x in same}, abs=0.002)


def test_the_page_is_that_of_its_rows():
    assert page.page(Figures()) == page.PAGE.read_text(encoding="utf-8")
    for paper in page.PICTURES:
        assert f"](papers/{paper}.svg)" in page.PAGE.read_text(encoding="utf-8")
        assert (page.ROWS / f"{paper}.svg").exists()


ALL = ("SmolLM2", "Gemma", "Qwen", "Qwen 1.5B")
# Where a claim's row begins, what its verdict says, whose KL is over whose, and how that lies to 1, or to `than`: "<",
# ">" or "=" (not told apart) of each model.
VERDICTS = (
    ("keys need a scale per channel", "**holds**", "real 4k", "naive-int4", "int4", ">>>"),
    ("better than others", "**does not hold** on any", "real 4k", "oscar-int2", "kivi-int2", ">>>"),
    ("better than others", "on any", "oscar", "oscar-int2", "kvarn-k2v2", ">>>>"),
    ("better than others", "on any", "real 4k", "turbo-int2", "oscar-int2", "<<="),
    ("better than Hadamard", "on two of three", "real 4k", "oscar-int2", "hadamard-int2", "<<="),
    ("one rotation per kv head", "one a layer is ahead", "oscar", "oscar+layer", "oscar", "===<"),
    ("a Lloyd-Max code", "**holds** on all four", "oscar", "oscar+centroids", "oscar", "<<<<"),
    ("a Lloyd-Max code", "better on SmolLM2 alone", "oscar", "oscar+lloyd", "oscar", "<==>"),
    ("a Lloyd-Max code", "lose on Gemma", "oscar", "oscar+centroids+even", "oscar+even", "=>=>"),
    ("naive codes", "naive codes;", "oscar-stages", "oscar", "naive-int2", "<<<<", 1.0, "outputs"),
    ("SRFT and Hadamard", "not told apart", "real 4k", "srft-int4", "hadamard-int4", "==="),
    ("the same behind 4K", "on Gemma Hadamard is ahead", "srft", "hadamard", "srft", "=<=="),
    ("a scale per channel", "on Qwen and Gemma", "real 4k", "srft-scaled-int4", "srft-int4", "=<<"),
    ("the same at 3 bits", "on SmolLM2 and Gemma", "srft", "hadamard-int3", "srft-int3", "<<=>"),
    ("Wu: near lossless at", "cannot be told", "real 4k", "polar", "int4", ">>>"),
    ("Han: 3.875 bits", "**does not hold**", "real 4k", "polar-tree", "turbo-int4", ">><"),
    ("Han: preconditioning", "**holds** with", "polarquant", "han+plain", "han", ">>>>"),
    (
        "Han: preconditioning",
        "three of four",
        "polarquant",
        "han+plain+online",
        "han+online",
        "><<<",
    ),
    (
        "Han: preconditioning",
        "and the 1.5B",
        "polarquant",
        "han+plain+offline",
        "han+offline",
        ">==>",
    ),
    ("Han: online", "**holds** on Qwen 1.5B", "polarquant", "han+online", "han+offline", "===<"),
    ("Han: online", "on all four", "polarquant", "han+plain+online", "han+plain+offline", "<<<<"),
    ("KVarN: far ahead", "**holds**", "oscar", "kvarn-k2v2", "naive-int2", "<<<<"),
    ("KVarN as its authors", "on no model ahead", "oscar", "int3", "kvarn-k4v2", "<<<="),
    ("KVarN as its authors", "on all but SmolLM2", "oscar", "fill-3", "kvarn-k4v2", "=<<<"),
    ("4 bits for a few", "**holds**", "oscar", "kitty-0.125", "kitty-0", "<<<"),
    ("4 bits for a few", "not told apart on Qwen", "oscar", "kivi-int2", "kitty-0.125", ">>="),
    ("low rank is worth", "**does not hold**", "real 1k", "oja-0.75+int4", "int3", ">>>"),
    ("half of `int2`'s KL", "**holds**", "real 4k", "fill-2.25", "int2", "<<<", 0.5),
    ("half of `int2`'s KL", "**holds**", "real 8k", "fill-2.25", "int2", "<<<", 0.5),
    ("half of its errors", "on Gemma", "real 4k", "fill-2.25", "int2", "<=<", 0.5, "differ"),
    ("first at 2.5 bits", "**holds**", "real 4k", "fill-2.25", "centred-int2", "<<<"),
    ("first at 2.5 bits", "on two of three", "real 8k", "fill-2.25", "centred-int2", "=<<"),
    ("first at 2.5 bits", "**holds**", "real 8k", "fill-2.25", "turbo-int2", "<<<"),
)


def lies(shown: str, than: float) -> str:
    low, high = (float(x) for x in re.search(r"\[(\S+), (\S+)\]", shown).groups())
    return "<" if high < than else ">" if low > than else "="


def test_verdicts_follow_from_their_intervals(subtests):
    kept, rows = Figures(), page.PAGE.read_text(encoding="utf-8").splitlines()
    for start, said, task, ours, theirs, expected, *more in VERDICTS:
        than, column = (*more, *(1.0, "kl")[len(more) :])
        with subtests.test(start=start, task=task, ours=ours, theirs=theirs):
            (row,) = [x for x in rows if x.startswith(f"| {start}")]
            assert said in row.split(" | ")[1]
            models = ALL[: len(expected)]
            found = [kept.over(task, ours, theirs, only=x, column=column) for x in models]
            assert "".join(lies(x, than) for x in found) == expected, found
    learned = [f"srft+learned-{x}" for x in ("scale", "rotation", "rotation+scale", "householder")]
    shares = [kept.gained("srft.hook", "srft", *learned, only=model) for model in ALL]
    assert "".join(lies(x, 0.5) for x in shares) == "=>=<", shares
    both, only = (f"{x}+learned-rotation+scale" for x in ("srft", "none"))
    more = [kept.nats("srft.hook", only, both, model) for model in ALL]
    assert "".join(lies(x, 0) for x in more) == ">><<", more


def test_a_share_of_the_gain_is_of_the_best_ones(tmp_path):
    nll = {"base": 3.0, "a": 2.5, "b": 1.0, "c": 2.0}
    rows = [row(p, t, nll=x + 0.1 * int(t)) for p, x in nll.items() for t in "123456"]
    (tmp_path / "run" / "oscar").mkdir(parents=True)
    (tmp_path / "run" / "oscar" / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page.keep(tmp_path / "run", tmp_path)
    assert Figures(tmp_path).gained("oscar", "base", "a", "b", "c") == ".25 [.25, .25]"
    with pytest.raises(UserError, match="no rows"):
        Figures(tmp_path).gained("oscar", "base", "a", "d")


def test_figures_are_those_of_rows(figures):
    assert figures.kl("oscar", "a") == "SmolLM2 .20, Gemma 1,235"
    assert figures.kl("oscar", "a", "SmolLM2") == ".20"
    assert figures.kl("oscar", "b") == "SmolLM2 .10"
    assert figures.bits("oscar", "a") == "SmolLM2 2.5, Gemma 2.25"
    assert figures.bits("oscar", "b") == "2.5"
    assert figures.over("oscar", "a", "b", "SmolLM2") == "2.0"  # of the two texts that both read
    assert figures.counted("oscar", "a") == "SmolLM2 2, Gemma 1"
    assert figures.perplexity("oscar", "a", "SmolLM2") == "+4.7"  # e^2 - e


def test_rows_by_mlx_are_tasks_of_their_context_and_windows(tmp_path):
    def one(preset, kl, text, windows="64,64", context=4096):
        about = {"preset": preset, "windows": windows, "text": text, "context": context}
        numbers = {"kl": kl, "top1": 1 - kl, "nll": 1 + kl, "nll_base": 1.0, "length": context}
        return about | numbers | {"task": "kl", "model": "m", "bits_per_value": 4.375}

    def asked(preset, right):
        about = {"preset": preset, "windows": "64,64", "text": "document-1", "context": 4096}
        return about | {
            "task": "answers",
            "model": "m",
            "bits_per_value": 4.0,
            "right": {"a": right},
        }

    rows = [one(p, kl, t) for p, kl in (("x", 0.2), ("y", 0.4)) for t in "123456"]
    rows += [one("x", 0.1, t, "paper") for t in "123456"]
    rows += [one("x", 0.6, t, context=1024) for t in "123456"]
    rows += [asked("fp16", [True] * 4), asked("x", [True, False, True, True])]
    rows.append(asked("fp16", [True] * 4) | {"task": "form"})
    (tmp_path / "pretrained").mkdir()
    lines = "\n".join(json.dumps({"split": "test"} | row) for row in rows)
    (tmp_path / "pretrained" / "smollm2.jsonl").write_text(lines)
    figures = Figures(tmp_path / "papers")
    assert figures.kl("real 4k", "x") == ".20" and figures.kl("real paper 4k", "x") == ".10"
    assert figures.over("real 4k", "y", "x", column="differ").startswith("2.0")
    assert figures.over("real 1k", "x", "x", base="real 4k").startswith("3.0")
    assert figures.bits("real 4k", "x") == "4.38"
    assert figures.nats("real 4k", "y", "x").startswith(".20")
    assert figures.answers("x") == "3 of 4 (full precision 4)"
    with pytest.raises(UserError, match="no rows; got real 8k"):
        figures.answers("x", 8)


def test_few_or_unfinished_texts_are_left_out(tmp_path):
    rows = [row("a", t, kl=t + 1.0) for t in range(7)] + [row("b", t, kl=1.0) for t in range(6)]
    rows += [row("a", t, GEMMA, kl=1.0) for t in range(5)]
    rows += [row("a", "all", task="srft.error", held=0.5)]
    file = tmp_path / "run" / "oscar" / "all.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, rows)))
    page.keep(tmp_path / "run", tmp_path)
    figures = Figures(tmp_path)
    assert figures.counted("oscar", "a") == "SmolLM2 6"  # the seventh has no b
    assert figures.kl("oscar", "a") == "3.5"  # of a task of one model, without its name
    assert figures.mean("srft.error", "a", "held") == ".50"
    with pytest.raises(UserError, match="no rows; got oscar of Gemma"):
        figures.kl("oscar", "a", "Gemma")
    assert figures.table(figures.kl, "KL", ("of a", "oscar", "a"), ("b", "oscar", "x")) == (
        "| KL | SmolLM2 |\n| --- | --- |\n| of a | 3.5 |\n| b | - |"
    )


def test_a_ratio_is_over_the_task_that_it_names(tmp_path):
    rows = [
        row("a", t, task=task, kl=kl) for task, kl in (("x", 1.0), ("y", 4.0)) for t in "123456"
    ]
    (tmp_path / "run" / "oscar").mkdir(parents=True)
    (tmp_path / "run" / "oscar" / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page.keep(tmp_path / "run", tmp_path)
    figures = Figures(tmp_path)
    assert figures.over("y", "a", "a", base="x").startswith("4.0")
    assert figures.over("y", "a", "a").startswith("1.00")


def test_differences_have_their_interval(tmp_path):
    nll = [1.0, 1.2, 1.4, 1.1, 1.3, 1.5]
    rows = [row("a", t, nll=x + 0.01 * t) for t, x in enumerate(nll)]
    rows += [row("b", t, nll=x) for t, x in enumerate(nll)]
    file = tmp_path / "run" / "oscar" / f"{SMOL}.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, rows)))
    page.keep(tmp_path / "run", tmp_path)
    said = Figures(tmp_path).nats("oscar", "a", "b")
    low, high = map(float, re.fullmatch(r"\.025 \[(\.\d+), (\.\d+)\]", said).groups())
    assert 0 < low < 0.025 < high < 0.05


def test_an_interval_shows_whether_it_holds_1():
    interval = intervals.ratio([1.02, 1.1, 1.2, 1.03, 1.1], [1.0] * 5)
    assert interval.low > 1
    assert re.fullmatch(r"1\.09 \[1\.0[2-6], 1\.1\d\]", page.bracketed(interval))
    near = intervals.ratio([1.002, 1.003, 1.004, 1.002, 1.003], [1.0] * 5)
    assert re.fullmatch(r"1\.003 \[1\.002, 1\.00[34]\]", page.bracketed(near))
    near = intervals.ratio([0.998, 0.997, 0.996, 0.998, 0.997], [1.0] * 5)
    assert re.fullmatch(r"\.997 \[\.99[67], \.998\]", page.bracketed(near))


def test_times_are_those_of_their_rows(tmp_path):
    speeds = [
        {"golden": "a", "rms": 0.0, "bound": 0.0},
        *(
            {"case": case, "kind": kind, "microseconds": us, "ratio": 40 / us, "rms": 0.0}
            | {"gigabytes_per_second": gigabytes}
            for case in ("b1 32k", "b1 128k")
            for kind, us, gigabytes in (("torch", 40.0, 0.0), ("int4", 16.0, 2359.296))
        ),
    ]
    (tmp_path / "codes.jsonl").write_text("\n".join(map(json.dumps, speeds)))
    assert Figures(tmp_path).speeds().splitlines()[2:] == [
        "| torch | 16.00 | 40.0 (1.00) | 40.0 (1.00) |",
        "| int4 | 4.50 | 16.0 (2.50) | 16.0 (2.50) |",
    ]
    parts = {("srft", 4096): 8.0, ("srft", 1): 80.0, ("product", 4096): 2.0}
    rows = [
        {
            "track": "mlx cpu",
            "dims": dims,
            "vectors": vectors,
            "what": what,
            "nanoseconds": x * dims,
        }
        for (what, vectors), x in parts.items()
        for dims in (128, 64)
    ]
    (tmp_path / "encode.json").write_text(json.dumps({"rows": rows}))
    quick = [x | {"track": "triton", "nanoseconds": x["dims"] / x["vectors"]} for x in rows]
    (tmp_path / "encode-h200.json").write_text(json.dumps({"rows": [*rows, *quick]}))
    figures = Figures(tmp_path)
    assert figures.encode("product") == ".25, .25"
    assert figures.encode("product", vectors=4096, of=1, track="triton") == ".00024, .00024"
    assert figures.encode("srft", vectors=1, of=1, track="mlx cpu/triton") == "80, 80"
    assert Figures(tmp_path).encode("srft", vectors=1) == "10, 10"


def test_tables_of_humaneval_come_with_their_rows(tmp_path):
    pytest.importorskip("torch")
    assert Figures(tmp_path).humaneval() == "No rows yet."
    numbers = {"passed": True, "tokens": 10, "stopped": True, "bits_per_value": 16.0}
    made = [row("fp16", f"HumanEval/{i}", task="humaneval", **numbers) for i in range(3)]
    file = tmp_path / "run" / "humaneval" / f"{SMOL}.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(json.dumps(x | {"completion": "pass"}) for x in made))
    page.keep(tmp_path / "run", tmp_path)
    said = Figures(tmp_path).humaneval()
    assert said.startswith("SmolLM2:\n\n|") and "| 4096 | `fp16` | 16.00 | 3 | 100.0 [" in said
    assert b"completion" not in gzip.decompress(
        (tmp_path / f"humaneval-{SMOL}.jsonl.gz").read_bytes()
    )


def test_tasks_of_humaneval_are_counted_in_pairs(tmp_path):
    pytest.importorskip("torch")
    model = list(page.MODELS)[2]
    passed = {("fp16", 0): (1, 1, 1, 0), ("fp16", 4096): (1, 1, 0, 0), ("a", 4096): (0, 0, 0, 1)}
    made = [
        row(preset, t, model, "humaneval", passed=bool(x), stopped=preset == "a")
        | {"context": context}
        for (preset, context), values in passed.items()
        for t, x in enumerate(values)
    ]
    file = tmp_path / "run" / "humaneval" / f"{model}.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, made)))
    page.keep(tmp_path / "run", tmp_path)
    said = Figures(tmp_path)
    assert (said.solved("fp16", 0), said.solved("fp16"), said.solved("a")) == ("3", "2", "1")
    assert said.lost("a") == "2 against 1, p 1.0"
    assert said.lost("a", context=0) == "3 against 1, p .62"
    assert said.lost("a", "stopped") == "0 against 4, p .12"


def test_kept_rows_have_what_pages_need(figures):
    (kept,) = figures.texts("oscar", "a", GEMMA).values()
    assert kept == row("a", 0, GEMMA, kl=1234.6, bits=2.25)


def test_numbers_have_two_digits():
    said = {
        0.0: "0",
        0.0123: ".012",
        0.999: "1.00",
        -0.5: "-.50",
        9.96: "10.0",
        55.4: "55",
        1234.5: "1,234",
    }
    assert {x: page.number(x) for x in said} == said


def test_what_is_not_there_is_said(figures, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no rows; got oscar of Qwen"):
        figures.kl("oscar", "a", "Qwen")
    with pytest.raises(UserError, match=r"--keep.*no rows"):
        page.keep(tmp_path / "nowhere")
    monkeypatch.setattr(page, "TEMPLATE", tmp_path / "page.md")
    for text in ("{klx('oscar')}", "{kl(}", "{open('x')}", "{kl()}"):
        page.TEMPLATE.write_text(text)
        with pytest.raises(UserError, match=r"page\.md"):
            page.page(figures)
