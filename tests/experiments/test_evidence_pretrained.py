"""The evidence on a user's model: bundled texts, one small file without names, the page of such files."""

import json
from types import SimpleNamespace

import pytest
from small_models import TINY

from experiments.evidence import corpus, measure, pretrained, rows, shared, table
from experiments.evidence.pretrained import Bundled
from mlxkv.errors import UserError
from mlxkv.texts import sources
from mlxkv.texts.corpus import KINDS, passages

MADE = {
    "machine": {
        "python": "3.12.1",
        "system": "Darwin 25.0.0-mine arm64",
        "chip": "Apple M4",
        "memory_bytes": 16 * 2**30,
        "backend": "metal",
        "device": "Apple M4",
    },
    "versions": {"mlxkv": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2", "torch": "2"},
}


class Characters:
    """A tokenizer with a token a character, and a BOS."""

    bos_token_id = 7

    def encode(self, text, add_special_tokens=True):
        return [ord(one) for one in text]


@pytest.fixture
def topics(monkeypatch):
    """Python's documentation, in place of which a few topics of one letter are read."""
    made = [chr(ord("a") + i % 20) * 2000 + str(i) for i in range(200)]
    monkeypatch.setattr(pretrained, "_topics", lambda: made)
    return made


@pytest.fixture
def loaded():
    return SimpleNamespace(tokenizer=Characters())


def test_a_text_ends_with_the_passages_of_its_kind(topics, loaded):
    held = Bundled()
    names = held.names(corpus.TEST)
    assert len(names) == 12 and len({corpus.kind(name) for name in names}) == 7
    found = {name: held.tokens(loaded, corpus.TEST, name, 9000) for name in names}
    assert all(len(tokens) == 9000 and tokens[0] == 7 for tokens in found.values())
    for kind in KINDS:
        text = "".join(map(chr, found[f"{kind}-1"]))
        assert text.endswith(passages("evaluation")[kind][:9000]) and text[1:500].isalnum()
    short = held.tokens(loaded, corpus.TEST, "prose-1", 100)
    assert "".join(map(chr, short[1:])) == passages("evaluation")["prose"][:99]
    with pytest.raises(UserError, match=r"\[--context\] the text prose-1 has"):
        held.tokens(loaded, corpus.TEST, "prose-1", 10**6)


def test_no_topic_is_in_two_texts(topics, loaded):
    held = Bundled()
    seen: dict[str, str] = {}
    for name in held.names(corpus.TEST):
        for topic in pretrained._stretch(held.names(corpus.TEST).index(name)):
            assert seen.setdefault(topic, name) == name
    for index in range(8):
        for topic in held.haystack(index).split(sources.BETWEEN):
            assert seen.setdefault(topic, f"haystack {index}") == f"haystack {index}"
    assert len(seen) == len(topics)
    assert held.document_name(9) == "python-2+1"
    document = held.document(loaded, 0, 9000, 2)
    assert 7000 < len(document.text) <= 9000
    assert any(question.values[0] in document.text for question in document.questions)


def test_calibration_reads_what_no_evaluation_reads():
    used = set(sources.documentation("calibration"))
    assert not used & set(sources.documentation("evaluation"))
    loaded = SimpleNamespace(tokenizer=Characters())
    assert Bundled().calibrates and not corpus.Held(None).calibrates
    found = "".join(map(chr, Bundled().calibration(loaded, 2000).tokens))
    assert found[:500] in "\n\n".join(passages("calibration").values())


def row(preset, text, scale=1.0, **more):
    hard = {"prose": 1.0, "code": 9.0, "manual": 2.0}[corpus.kind(text)] + int(text[-1])
    return (
        dict.fromkeys(rows.IDENTITY, "")
        | {"task": "kl", "split": "test", "model": "m", "preset": preset, "text": text}
        | {"windows": "64,64", "context": 2048, "fingerprint": "f" * 32, "dtype": "float16"}
        | {"bits_per_value": 2.25, "bits_with_windows": 2.5}
        | {"kl": scale * hard * 1e-4, "top1": 0.9, "nll": 1.0}
        | more
    )


def answers(preset, index, right):
    return (
        dict.fromkeys(rows.IDENTITY, "")
        | {"task": "retrieval", "split": "haystack", "model": "m", "preset": preset}
        | {"text": f"python-{index}", "windows": "64,64", "context": 4096}
        | {"fingerprint": "f" * 32, "dtype": "float16"}
        | {"bits_per_value": 2.25, "bits_with_windows": 2.5}
        | {"right": {"single": [[True], [right]], "multi-query": [[right] * 4]}}
    )


@pytest.fixture
def ran():
    texts = [f"{kind}-{i}" for kind in ("prose", "code", "manual") for i in range(3)]
    found = [
        row(name, text, s)
        for name, s in (("fp16", 0), ("int2", 1), ("kivi-int2", 2))
        for text in texts
    ]
    found += [row("turbo-int2", text, error="OSError: /home/ada/x") for text in texts]
    for one in found:
        if "error" in one:
            del one["kl"]
    return found + [
        answers(name, i, name != "kivi-int2") for name in ("int2", "kivi-int2") for i in range(8)
    ]


def test_what_is_shared_has_numbers_and_no_paths(ran, tmp_path):
    (block,) = table.blocks(ran, corpus.TEST)
    data = shared.document(block, ran, "/home/ada/models/Qwen3-4B", MADE, 256, 4096)
    text = json.dumps(data)
    assert "ada" not in text and "/home" not in text and "-mine" not in text and len(text) < 4000
    assert data["model"] == "Qwen3-4B" and data["texts"] == {"prose": 3, "code": 3, "manual": 3}
    by_name = {one["preset"]: one for one in data["presets"]}
    assert by_name["turbo-int2"] == {"preset": "turbo-int2", "failed": True}
    assert by_name["kivi-int2"]["ratio"] == [2.0, 2.0, 2.0]
    assert by_name["int2"]["right"][:2] == [24, 24] and by_name["kivi-int2"]["right"][:2] == [8, 24]
    value, low, high = by_name["int2"]["kl"]
    assert low < value < high
    file = tmp_path / "shared" / "one.json"
    file.parent.mkdir()
    file.write_text(text)
    shared.main(["--folder", str(file.parent)])
    page = (tmp_path / "pretrained.md").read_text()
    assert "1 run of 1 models" in page and "## Qwen3-4B" in page and "No pretrained" not in page
    assert (
        "| kivi-int2 | 2.25 | 2.50 | 0.001 [" in page and "**2.00 [2.00, 2.00]** | 8/24 [" in page
    )
    assert "| turbo-int2 | failed |" in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    "change, what",
    [
        ({"version": 2}, "version 2 of the format"),
        ({"presets": []}, "no preset"),
        ({"presets": [{"preset": "../x"}]}, "unknown preset"),
        ({"model": "x" * 300}, "no short text"),
        ({"context": "2048"}, "no whole number"),
        ({"texts": None}, "parts missing"),
        (
            {"presets": [{"preset": "int2", "bits": -1, "in_all": 2, "kl": [0, 0, 0]}]},
            "out of range",
        ),
        ({"presets": [{"preset": "int2", "bits": 2, "in_all": 2, "kl": [0]}]}, "limits of int2"),
    ],
)
def test_a_file_that_is_wrong_is_refused(ran, tmp_path, capsys, change, what):
    (block,) = table.blocks(ran, corpus.TEST)
    data = shared.document(block, ran, "m", MADE, 256, 4096) | change
    (tmp_path / "one.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"\[evidence.shared\] 1 files cannot be used"):
        shared.main(["--folder", str(tmp_path), "--out", str(tmp_path / "page.md")])
    assert what in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_the_page_of_pretrained_models_is_that_of_its_files():
    found = [shared.read(file) for file in sorted(shared.FOLDER.glob("*.json"))]
    page = shared.FOLDER.parent / "pretrained.md"
    assert page.read_text(encoding="utf-8") == shared.markdown(found)


def test_models_of_the_tests_are_not_shared(tmp_path):
    with pytest.raises(UserError, match=r"\[--share\] is for pretrained models; got .*tiny"):
        pretrained.main([TINY, "--share", "--out", str(tmp_path)])


def test_a_batch_of_texts_fits_into_memory(monkeypatch):
    monkeypatch.setattr(measure, "backend", lambda: "metal")
    for size, decode, together in ((16384, 512, 16), (151936, 256, 3), (262144, 1024, 1)):
        subject = SimpleNamespace(
            asked=SimpleNamespace(decode=decode),
            loaded=SimpleNamespace(config={"text_config": {"vocab_size": size}}),
        )
        assert measure.Subject.together.fget(subject) == together


@pytest.mark.slow
def test_a_model_in_a_folder_is_measured_and_shared(model_folder, tmp_path):
    out = tmp_path / "out"
    given = [str(model_folder), "--out", str(out), "--kv", "int4,int2", "--context", "256"]
    given += ["--decode", "16", "--documents", "0", "--share", str(tmp_path / "one.json")]
    pretrained.main(given)
    first = (out / "rows.jsonl").read_text()
    assert len(first.splitlines()) == 3 * 12
    pretrained.main(given)
    assert (out / "rows.jsonl").read_text() == first
    data = shared.read(tmp_path / "one.json")
    assert data["texts"] == dict.fromkeys(KINDS, 1) | {"manual": 6}
    assert str(tmp_path) not in (tmp_path / "one.json").read_text()
    (page,) = out.glob("*.md")
    assert "## " in page.read_text() and page.with_suffix(".svg").exists()
    assert not (out / measure.SCRATCH).exists()
