"""The ablations of OSCAR: arms differ only in their rotation; tables; bits."""

import json
from itertools import combinations

import numpy as np
import pytest
from random_model import write_model
from small_models import TINY

from experiments import collect
from experiments.ablation import bits, deal, domains, parts, search, windows
from experiments.ablation import collect as pages
from experiments.ablation.__main__ import main
from experiments.ablation.asked import Asked
from experiments.ablation.recipes import RECIPES, spread
from mlxkv.codec import transform
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.store import Store
from mlxkv.eval.tasks.part import Part
from mlxkv.formats import matrices
from mlxkv.formats.config import BALANCED
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.models import load
from mlxkv.models.generate import new_cache
from mlxkv.texts import sources

DIMS = 64  # head dim of the random model
SMALL = {"context": 512, "decode": 3, "questions": 0, "tokens": 512}
OPTIONS = ["--context", "512", "--decode", "3", "--questions", "0", "--tokens", "512"]


@pytest.fixture(scope="module")
def rotations(tmp_path_factory):
    """{recipe: [(keys, values) of each layer]} of the caches of a model with two kv heads. Each is
    [G, D, D], or [D, D] if heads share it."""
    folder = write_model(tmp_path_factory.mktemp("models") / "two", num_key_value_heads=2)
    turns = tuple(name for name, one in RECIPES.items() if BALANCED not in one.kinds)
    asked = Asked(str(folder), only=turns, **SMALL)
    names = parts.names(asked)
    arms = parts.arms_of(asked, names)
    out = {}
    with arms.caches(names) as made:
        for name, caches in made.items():
            if name != BASELINE:
                found = [(c.layer_maps.keys.down, c.layer_maps.values.down) for c in caches]
                out[name.split(", ")[0]] = [tuple(np.array(x) for x in pair) for pair in found]
    assert len({arms.configs[name] for name in names if name != BASELINE}) == 1
    return out


def test_arms_differ_in_their_rotation(rotations):
    assert list(rotations) == [name for name in RECIPES if not name.startswith("balanced")]
    for (name, one), (other, two) in combinations(rotations.items(), 2):
        sides = [zip(x, y, strict=True) for x, y in zip(one, two, strict=True)]
        apart = [np.abs(a - b).max() for side in sides for a, b in side]
        same = {name, other} == {"full", "surrogate values"}  # these share the keys
        assert all(gap > 0.01 for gap in (apart[1::2] if same else apart)), (name, other)
        assert not same or max(apart[::2]) < 1e-3


def test_every_rotation_is_orthonormal(rotations):
    for layers in rotations.values():
        for pair in layers:
            for x in pair:
                np.testing.assert_allclose(
                    x.swapaxes(-1, -2) @ x, np.broadcast_to(np.eye(DIMS), x.shape), atol=1e-4
                )


def test_each_arm_lacks_what_its_name_says(rotations):
    h, hp, eye = matrices.hadamard(DIMS), matrices.ordered(DIMS), np.eye(DIMS)

    def close(x, wanted):
        np.testing.assert_allclose(x, np.broadcast_to(wanted, x.shape), atol=1e-4)

    for layer, (full, _) in enumerate(rotations["full"]):
        keys = {name: layers[layer][0] for name, layers in rotations.items()}
        u = keys["U alone"]
        close(full, u @ hp)
        close(keys["without P"], u @ h)
        close(keys["without H"], u @ h.T @ hp)
        close(keys["without U"], hp)
        close(keys["none"], eye)
        close(keys["hadamard"], np.array(transform.hadamard(DIMS, 0).down))
        assert full.ndim == 3 and keys["per layer"].shape == (DIMS, DIMS)


def test_balanced_arms_differ_in_one_thing(tmp_path):
    folder = write_model(tmp_path / "two", num_key_value_heads=2)
    names = tuple(name for name in RECIPES if name.startswith("balanced"))
    arms = parts.arms_of(asked := Asked(str(folder), only=names, **SMALL), parts.names(asked))
    turns = {}
    for name in arms.names[1:]:
        with arms.attached(name) as it:
            first = new_cache(it)[0]
        assert first.layer_maps.kinds == first.config.fitted
        turns[name.split(", ")[0]] = [
            [np.array(y) for y in (x.down, x.up)]
            for x in (first.layer_maps.keys, first.layer_maps.values)
        ]
    for sides in turns.values():
        for down, up in sides:
            np.testing.assert_allclose(
                down @ up, np.broadcast_to(np.eye(DIMS), down.shape), atol=1e-3
            )
    keys, values = ({name: x[i][0] for name, x in turns.items()} for i in (0, 1))
    plain, hp = keys["balanced without H"], matrices.ordered(DIMS)
    np.testing.assert_allclose(keys["balanced"], plain @ hp, atol=1e-3)
    np.testing.assert_allclose(
        keys["balanced without P"], plain @ matrices.hadamard(DIMS), atol=1e-3
    )
    assert (keys["balanced keys"] == keys["balanced"]).all()
    assert (values["balanced values"] == values["balanced"]).all()
    for x in (values["balanced keys"], keys["balanced values"]):  # those are rotations
        np.testing.assert_allclose(
            x.swapaxes(-1, -2) @ x, np.broadcast_to(np.eye(DIMS), x.shape), atol=1e-4
        )
    assert (keys["balanced values alike"] == keys["balanced"]).all()
    assert np.abs(values["balanced values alike"] - values["balanced"]).max() > 1e-3
    channels = keys["balanced channels"] @ hp.T  # one entry in each row and column
    assert ((np.abs(channels) > 1e-4).sum(-1) == 1).all()


def test_spread_only_moves_columns():
    moved = spread(np.eye(DIMS)[None])[0]
    assert sorted(moved.argmax(0)) == list(range(DIMS)) and np.count_nonzero(moved) == DIMS
    assert not np.array_equal(moved, np.eye(DIMS))
    odd = matrices.random_basis(1, 96, 0)
    assert spread(odd) is odd


def test_a_table_on_a_random_model(model_folder, capsys):
    only = ["--only", "full,none", "--group", "64,32", "--clip", ".96,.92", "--clip", ".92,.92"]
    main(["parts", "--model", str(model_folder), *OPTIONS, *only])
    out = capsys.readouterr().out
    data = json.loads(out.splitlines()[-1])
    assert len(data["rows"]) == 1 + 2 * 2 * 2
    assert "full, group 32, clip .92/.92" in data["rows"]
    for name, row in data["rows"].items():
        assert row["kl_mean"] == 0 if name == BASELINE else row["kl_mean"] > 0, name
    assert "group 64, clip .96/.92" in out and "±" in out and "four keys" not in out


@pytest.mark.slow
def test_retrieval_on_the_embedded_model(tmp_path, capsys):
    file = tmp_path / "out.json"
    options = ["--context", "512", "--decode", "2", "--questions", "1", "--tokens", "512"]
    main(["parts", "--model", TINY, *options, "--only", "full", "--out", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert rows[BASELINE]["single_right"] == rows[BASELINE]["four_right"] == 1
    assert all(row["four_log_p"] <= 1e-6 for row in rows.values())
    out = capsys.readouterr().out
    assert "four keys" in out and not out.rstrip().endswith("}")


def test_documents_of_two_models_make_one_page(model_folder, tmp_path):
    files = []
    for what, options in (
        ("parts", ["--only", "full,none", "--group", "64,32"]),
        ("windows", ["--sink", "0", "--recent", "64"]),
        ("domains", ["--only", "stories"]),
        ("search", ["--only", "int2 balanced g64,int2 srft g64"]),
    ):
        files.append(tmp_path / f"{what}.json")
        main([what, "--model", str(model_folder), *OPTIONS, *options, "--out", str(files[-1])])
    documents = [pages.read(file) for file in files]
    other = {**documents[0], "model": "other", "rows": dict(list(documents[0]["rows"].items())[:3])}
    text = pages.markdown([*documents, other])
    tables = [part.splitlines() for part in text.split("###")[1:]]
    assert [lines[0].strip() for lines in tables][:2] == [str(model_folder), "other"]
    for lines in tables:
        rows = [line for line in lines if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1 and len(rows) > 2
    full = next(line for line in tables[0] if line.startswith("| full"))
    row = documents[0]["rows"]["full, group 32, clip .96/.92"]
    assert pages.kl(row) in full and f"{row['ppl']:.3f}" in full
    assert "fp16" not in "".join(tables[0]) and "one key" in tables[0][2]
    searched = [line for line in tables[-1] if line.startswith("| int2")]
    assert ["int2 srft g64 (2.50)" in searched[0], "int2 balanced g64" in searched[1]] == [True] * 2
    assert text.count("tokens decoded after") == 4  # each kind of table says how it was made


@pytest.mark.parametrize("content", ("", "[]", '{"what": "parts"}'))
def test_what_is_no_document_is_refused(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(UserError, match="not a document of an ablation"):
        pages.read(file)
    with pytest.raises(UserError, match="cannot read"):
        pages.read(tmp_path / "missing.json")


@pytest.mark.slow
def test_processes_find_the_same(model_folder):
    asked = Asked(str(model_folder), only=("full", "none"), **SMALL)
    one, two = (deal.compute("parts", asked, jobs) for jobs in (1, 2))
    assert list(one) == list(two)
    assert one == two


def test_a_run_goes_on_where_it_was_stopped(model_folder, tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    common = ["parts", "--model", str(model_folder), *OPTIONS, "--out", str(file), "--group", "64"]
    main([*common, "--only", "full"])
    first = json.loads(file.read_text())["rows"]
    asked = []
    usual = parts.measure
    monkeypatch.setattr(parts, "measure", lambda *a: asked.append(a[1]) or usual(*a))
    main([*common, "--only", "full,none"])
    rows = json.loads(file.read_text())["rows"]
    assert asked == [[name for name in rows if name.startswith("none")]]
    assert {name: rows[name] for name in first} == first
    main([*common, "--only", "full", "--clip", ".9,.9"])  # asks something else: from the start
    assert asked[1] == list(json.loads(file.read_text())["rows"])


def test_what_is_ready_is_kept_when_a_later_share_fails(model_folder, monkeypatch):
    asked, kept = Asked(str(model_folder), **SMALL), []

    def measure(asked, names, progress):
        if kept:
            raise RuntimeError
        return dict.fromkeys(names, {})

    monkeypatch.setattr(parts, "measure", measure)
    with pytest.raises(RuntimeError):
        deal.compute("parts", asked, keep=kept.append)
    assert len(kept) == 1 and 0 < len(kept[0]) <= deal.TOGETHER


def test_candidates_store_what_their_names_say(tmp_path):
    folder = write_model(tmp_path / "three", num_hidden_layers=3)
    wide, first = "int2 balanced g64", "int2 balanced first layer at 3"
    asked = Asked(str(folder), only=(wide, first), **SMALL)
    rows = search.measure(asked, names := search.names(asked), lambda n: None)
    assert names == [BASELINE, wide, first]
    assert rows[wide]["bits_per_value"] == 2.5  # heads of 64 dims: groups of 128 are of 64 here
    assert rows[first]["bits_per_value"] == pytest.approx((3.5 + 2.5 + 2.5) / 3)
    assert rows[first]["kv_bytes"] > rows[wide]["kv_bytes"]
    assert 0 < rows[first]["kl_mean"] != rows[wide]["kl_mean"]
    for name, arm in search.candidates().items():
        config = arm.config
        assert (config.sink, config.recent) == (64, 64), name
        assert not config.why_not(128, 128), name
        bits = config.keys.quantizer.bits if name.startswith("int") else int(name[8])
        assert f"int{bits}" in name and config.keys.quantizer.bits == bits


def test_domains_are_a_matrix(model_folder, capsys):
    only = ["--only", "stories,random tokens,corpus code"]
    main(["domains", "--model", str(model_folder), *OPTIONS, "--group", "64", *only])
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [name.split(", ")[0] for name in rows] == [
        *("stories", "corpus code", "random tokens", "hadamard")
    ]
    assert all(row[on]["kl_mean"] > 0 for row in rows.values() for on in domains.JUDGED)
    found = {name.split(", ")[0]: row["tokens"] for name, row in rows.items()}
    assert found["stories"] == found["random tokens"] == 512 and found["hadamard"] == 0
    assert "1.00 x" in out and "to hadamard" in out
    assert "stories: mean KL of other calibrations is" in out
    assert "corpus: no calibration of its own kind" in out


def test_nothing_is_judged_that_was_calibrated_on(loaded):
    judged = {d: domains.judged_on(loaded, d, 2000) for d in domains.JUDGED}
    for domain in domains.DOMAINS:
        tokens = domains.calibration(loaded, domain, 600).tokens
        assert 512 <= len(tokens) <= 600
        pieces = {tuple(tokens[i : i + 60]) for i in range(0, 540, 60)}
        for text in judged.values():
            assert not pieces & {tuple(text[i : i + 60]) for i in range(len(text) - 60)}
    with pytest.raises(UserError, match="--context"):
        domains.judged_on(loaded, "corpus", 10**6)


def test_windows_are_swept(model_folder, capsys):
    options = ["--sink", "0,64", "--recent", "64,256"]
    main(["windows", "--model", str(model_folder), *OPTIONS, *options])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["config"] for name, row in rows.items() if name != BASELINE] == [
        *([0, 64], [0, 256], [64, 64], [64, 256])
    ]
    inside = windows.configs(Asked())["sink 0, recent 64"].bits_per_value(DIMS, DIMS)
    wanted = (inside * 448 + 16 * 64) / 512
    assert rows["sink 0, recent 64"]["bits_per_value"] == pytest.approx(wanted)


@pytest.mark.parametrize("preset", ("oscar-int2", "oscar-int2+g32", "hadamard-int2+clip"))
def test_bits_are_those_of_the_formula(preset):
    """Bits in use are exact, at whole pages and at other contexts."""
    config = parse_kv(preset)
    inside = config.bits_per_value(128, 128)
    for context, row in bits.measured(config, [700, 1280, 3000], heads=2).items():
        exact = row["exact"]
        least = config.sink + config.recent
        assert least <= exact <= least + config.page
        wanted = inside + (16 - inside) * exact / context
        assert row["in_use"] == pytest.approx(wanted, rel=1e-9)
        assert row["in_use"] <= row["allocated"] <= row["in_use"] * 1.4  # the last page, twice
        assert row["allocated"] <= row["decoding"] * 1.05 <= row["in_use"] * 1.45
        assert bits.formula(config, context) <= row["in_use"]


def test_the_formula_is_that_of_the_paper():
    """2.25 bits in pages of group 128 and 2.28 at 128K with 64 + 256 tokens in 16 bits."""
    config = PRESETS["oscar-int2"]
    assert config.bits_per_value(128, 128) == 2.25
    assert bits.formula(config, 131072) == pytest.approx(2.28, abs=0.005)
    assert bits.formula(config, 100) == 16


def test_the_table_of_bits(capsys):
    main(["bits", "--kv", "naive-int2", "--context", "1k,512"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert list(rows["naive-int2"]) == ["512", "1024"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nope", r"\[ablation\] unknown; got 'nope'; choose from parts, domains"),
        ("", r"\[ablation\] .* what"),
        ("parts --bogus", r"\[ablation\] .*--bogus"),
        ("parts --group 3", "group must be 0 or at least 16; got 3"),
        ("parts --group x", r"\[--group\] .* got 'x'; write"),
        ("parts --clip .9", r"\[--clip\] .* got '.9'; write"),
        ("parts --clip 2,1", "clip must be above 0 and at most 1; got 2"),
        ("parts --only full,foo", r"\[--only\] unknown; got 'foo'; choose from full, without U"),
        ("domains --only foo", r"\[--only\] unknown; got 'foo'; choose from stories"),
        ("windows --sink -1", r"\[(--sink|ablation)\]"),
        ("parts --context 10", r"\[--context\] must be at least 512; got 10"),
        ("parts --decode 0", r"\[--decode\] must be at least 2; got 0"),
        ("parts --tokens 5", r"\[--tokens\] must be at least 512; got 5"),
        ("parts --jobs 0", r"\[--jobs\] must be at least 1; got 0"),
        ("bits --kv zap", r"\[--kv\] unknown preset; got 'zap'"),
        ("bits --context 512,520", r"\[--context\] too close .* got 512; choose"),
        ("parts --out /no/such/folder/x.json", r"\[--out\] no such folder"),
    ],
)
def test_a_bad_option_is_one_clear_line(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        main(arguments.split())
    assert "\n" not in str(caught.value)


def test_a_result_belongs_to_its_calibration(model_folder, tmp_path):
    """The store of evaluations does not use a result of other rotations."""
    loaded = load(str(model_folder), "fp16")
    kitchen = parts.Kitchen(loaded, sources.Text("none", []))
    config = {"arm": PRESETS["oscar-int2"]}
    one, two = (
        Arms(loaded, config, calibrations={"arm": kitchen.make(RECIPES[name])})
        for name in ("random", "hadamard")
    )
    part, store = Part("divergence", "512", lambda *_: {}, 1), Store(tmp_path)
    store.write(one, part, "arm", {"kl": 1})
    assert store.read(one, part, "arm") == {"kl": 1}
    assert store.read(two, part, "arm") is None


def test_pictures_of_a_report_as_files(tmp_path):
    pytest.importorskip("matplotlib")
    layer = dict.fromkeys(("keys", "values", "scores_kl", "attention", "hidden"), 0.1) | {
        "index": 0
    }
    stages = {name: {"layers": [layer]} for name in ("naive-int2", "oscar-int2")}
    data = {
        "model": TINY,
        "contexts": [512],
        "rows": {"512": {}},
        "parts": {"stages-512": stages},
    }
    (file,) = collect.pictures([data], tmp_path / "made")
    assert file.name == "tiny-stages-by-layer-512-tokens.svg"
    text = file.read_text()
    assert text.startswith("<svg") and "oscar-int2" in text and "xmlns=" in text
