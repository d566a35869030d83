"""`make evidence` from end to end on a small random model: KL, questions, resuming, short texts."""

import json

import mlx.core as mx
import numpy as np
import pytest

from experiments.evidence import pretrained, questions
from experiments.evidence.cells import ANSWERS, FORM, KL, read
from mlxkv import load
from mlxkv.calibration.measure import calibrate
from mlxkv.corpora.corpus import passages
from mlxkv.errors import UserError
from mlxkv.eval.arms import Arms
from mlxkv.generate import reading

GIVEN = ["--kv", "int4,naive-int4", "--contexts", "384", "--decode", "16"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder as `Texts` makes it, of which one text is too short."""
    folder = tmp_path_factory.mktemp("texts")
    prose = passages("evaluation")["prose"]
    written = {"prose": prose[-2000:], "licence": "Too short.", "records": '{"a": 1}\n' * 100}
    written["document-1"] = "\n".join(passages("evaluation").values())
    for name, text in written.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def run(model, out, texts, *more):
    pretrained.main([str(model), "--out", str(out), "--texts", str(texts), *GIVEN, *more])
    (file,) = out.glob("*.jsonl")
    return file, [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("together", [1, 2])
def test_texts_are_measured_once(model_folder, texts, tmp_path, capsys, together):
    """Where a run was stopped, texts that are read together are measured again together."""
    more = ["--documents", "0", "--together", str(together)]
    file, found = run(model_folder, tmp_path, texts, *more)
    assert "licence is too short for 384 tokens, left out" in capsys.readouterr().err
    kl = [row for row in found if row["task"] == KL]
    assert {(row["preset"], row["windows"]) for row in kl} == {
        ("fp16", "64,64"), ("int4", "64,64"), ("naive-int4", "64,64"), ("naive-int4", "paper"),
    }  # fmt: skip
    assert {row["text"] for row in kl} == {"prose", "records"}
    assert len(kl) == 8 and all(row["length"] == 384 and row["tokens"] == 16 for row in kl)
    assert all((row["kl"] == 0) == (row["preset"] == "fp16") for row in kl)
    (cells,) = read(tmp_path).values()
    assert len(cells.values("int4", 384)) == 2
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:40])  # ended while it wrote
    pretrained.main(
        [str(model_folder), "--out", str(tmp_path), "--texts", str(texts), *GIVEN, *more]
    )
    after = file.read_text().splitlines(keepends=True)
    assert after[: len(lines) - 1] == lines[:-1] and len(after) == len(lines) + together
    last = json.loads(after[-1])
    assert [last[x] for x in ("preset", "windows", "text")] == [
        kl[-1][x] for x in ("preset", "windows", "text")
    ]


def test_questions_are_of_the_forms_that_full_precision_answers(
    model_folder, texts, tmp_path, monkeypatch
):
    monkeypatch.setattr(questions, "SHORT_TIMES", 1)
    options = ["--contexts", "1200", "--documents", "1", "--texts-at-most", "1", "--kv", "int4"]
    _, found = run(model_folder, tmp_path, texts, *options)
    (form,) = [row["right"] for row in found if row["task"] == FORM]
    assert tuple(form) == questions.NAMES
    assert not [row for row in found if row["task"] == ANSWERS]
    (cells,) = read(tmp_path).values()
    assert max(cells.forms[1200].values()) < 0.8 and cells.counted(1200) == []

    monkeypatch.setattr(questions, "LEAST", 0.0)
    _, more = run(model_folder, tmp_path, texts, *options)
    assert more[: len(found)] == found, "nothing is measured twice"
    answers = more[len(found) :]
    assert {(r["task"], r["preset"], r["text"]) for r in answers} == {
        (ANSWERS, preset, "document-1") for preset in ("fp16", "int4")
    }
    assert all(set(r["right"]) == set(questions.NAMES) for r in answers)
    assert all(len(one) == questions.FEW for r in answers for one in r["right"].values())


def test_documents_of_one_text_differ(model_folder):
    """Short documents are taken from other parts of a text, with other facts."""
    assert questions.places(1200, 1) == [0, 8, 16, 24] and questions.places(4096, 1) == [0]
    loaded = load(str(model_folder), "fp16")
    text = loaded.tokenizer.encode("\n".join(passages("evaluation").values()))
    first, second = (
        questions.document(loaded, text[: len(text) - at], i, 1200, 1200, ("number",)).tokens
        for i, at in ((0, 0), (8, 1200))
    )
    assert first[:1200] != second[:1200] and first[1200:] != second[1200:]


def test_arms_go_on_from_what_full_precision_has_read(model_folder):
    """Full precision's own numbers are those of its logits; fewer bits diverge more, and take less."""
    loaded = load(str(model_folder), "fp16")
    tokens = np.random.default_rng(0).integers(5, 200, 401).tolist()
    seen, names = [], ["fp16", "int8", "srft-int2+g32"]
    arms = Arms(loaded, names[1:])
    found = {
        name: one for name, (one,) in pretrained.stored(arms, names, [tokens], 360, seen.append)
    }
    assert list(found) == names and sum(seen) == len(names) * 400
    with arms.attached("fp16"):
        logits = np.array(loaded.model(mx.array([tokens[:-1]]))[0].astype(mx.float32))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    exact = -logs[np.arange(400), tokens[1:]]
    assert found["fp16"]["kl"] == 0 and found["fp16"]["top1"] == 1
    for one in found.values():
        assert one["tokens"] == 40
        assert one["nll_base"] == pytest.approx(exact[360:].mean(), abs=2e-3)
    assert 0 < found["int8"]["kl"] < found["srft-int2+g32"]["kl"]
    sizes = [one["kv_bytes"] for one in found.values()]
    assert sizes[0] > sizes[1] > sizes[2]
    with arms.attached("fp16"):
        read_once = reading.prefill(loaded, tokens[:360])
    with arms.attached("int8"):
        cache = reading.stored(loaded, tokens[:360], read_once)
    assert [layer.offset for layer in cache] == [360] * len(read_once)


EVERY = [*pretrained.FIRST, *pretrained.SECOND]


def test_texts_together_are_texts_one_by_one(subtests, model_folder):
    """Also of presets that learn from a text, and documents whose questions are of unequal length."""
    loaded = load(str(model_folder), "fp16")
    rng = np.random.default_rng(1)
    texts = rng.integers(5, 200, (3, 401)).tolist()
    texts[1][:200] = [7] * 200
    spans = [
        {"number": [(363, 365), (370, 375)]},
        {"number": [(364, 366)]},
        {"number": [(390, 399)]},
    ]
    documents = [
        questions.Asked(x[:n], 360, of)
        for x, n, of in zip(texts, (380, 370, 401), spans, strict=True)
    ]
    arms = Arms(loaded, EVERY)
    needy = [name for name, config in arms.configs.items() if config.calibrated]
    arms.calibrations = dict.fromkeys(needy, calibrate(loaded.model, texts[0] * 2))
    together = dict(pretrained.stored(arms, EVERY, texts, 360, lambda n: None))
    asked = dict(pretrained.answered(arms, EVERY, documents, lambda n: None))
    for i in range(3):
        alone = dict(pretrained.stored(arms, EVERY, texts[i : i + 1], 360, lambda n: None))
        own = dict(pretrained.answered(arms, EVERY, documents[i : i + 1], lambda n: None))
        for name in EVERY:
            with subtests.test(name=name, text=i):
                assert together[name][i] == pytest.approx(alone[name][0], rel=1e-3, abs=1e-6)
                assert asked[name][i]["right"] == own[name][0]["right"]
                nll = asked[name][i]["answer_nll"]
                assert nll == pytest.approx(own[name][0]["answer_nll"], rel=1e-3)


def test_one_text_that_is_no_number_spoils_no_other(model_folder, monkeypatch):
    loaded, known = load(str(model_folder), "fp16"), pretrained.compare

    def broken(base, logits, true):
        scored = known(base, logits, true)
        half = len(scored) // 2
        scored.kl[half:] = np.nan
        return scored

    monkeypatch.setattr(pretrained, "compare", broken)
    texts = np.random.default_rng(1).integers(5, 200, (2, 401)).tolist()
    ((_, (first, second)),) = pretrained.stored(
        Arms(loaded, ["int4"]), ["int4"], texts, 360, lambda n: None
    )
    assert first["kl"] > 0 and second["error"] == "NaN or infinity in the KL"


def test_answers_are_scored_at_their_own_tokens(model_folder):
    loaded = load(str(model_folder), "fp16")
    tokens = np.random.default_rng(0).integers(5, 200, 40).tolist()
    asked = questions.Asked(tokens, 30, {"number": [(33, 35), (37, 40)]})
    arms, seen = Arms(loaded, ["int8"]), []
    ((name, (found,)),) = pretrained.answered(arms, ["fp16"], [asked], seen.append)
    logits = np.array(loaded.model(mx.array([tokens]))[0].astype(mx.float32))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = np.array([-logs[i - 1, token] for i, token in enumerate(tokens)])
    exact = np.mean([nll[33:35].mean(), nll[37:40].mean()])
    assert name == "fp16" and found["right"] == {"number": [False, False]} and seen == [39]
    assert found["answer_nll"]["number"] == pytest.approx(exact, abs=5e-3)


def test_slips_are_one_line(subtests, tmp_path):
    for options, message in [
        (["--kv", "int5"], r"\[--kv\] unknown preset; got 'int5'"),
        (["--documents", "99"], r"\[--documents\] there are 8; got 99"),
        (["--contexts", "x"], r"\[--contexts\] not a number of tokens"),
    ]:
        with subtests.test(options=options, message=message):
            with pytest.raises(UserError, match=message):
                pretrained.main(["m", "--out", str(tmp_path), *options])


def test_public_names_of_models(subtests, tmp_path, monkeypatch):
    (tmp_path / "private" / "model-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, public in [
        ("private/model-1", "model-1"),
        ("smollm2", "smollm2"),
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("/Users/ada/models/gone", "gone"),
        ("~/models/gone", "gone"),
        ("../gone", "gone"),
    ]:
        with subtests.test(name=name, public=public):
            assert pretrained.public_name(name) == public
