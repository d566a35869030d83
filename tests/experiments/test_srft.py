"""SRFT's experiment: its codes and learned maps against the law, keys before RoPE, the hook, the tables."""

import numpy as np
import pytest
import torch
from small_models import TINY, story_tokens

from experiments.papers import encode, hook, learned, ratios, srft
from mlxkv.corpora.corpus import passages
from mlxkv.errors import UserError
from mlxkv.eval.rows import Rows, read
from mlxkv.formats.calibration.learned import Learned
from mlxkv.spec import affine as spec
from mlxkv.spec import learned as learned_spec

CONTEXT, DECODE = 200, 8


def rows_of(seed=0, dims=64):
    """Rows whose channels differ in size, and one that has an offset, as keys do."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((2, 96, dims)) * np.exp(draw.standard_normal(dims))
    x[..., 3] += 20
    return x.astype(np.float32)


def law(recipe, x, rows):
    """x [G, T, D] behind a recipe in float64."""
    down, up = spec.transform(recipe.transform, x.shape[-1], recipe.seed)
    if recipe.scale:
        of = {"own": x, "prefix": x[:, : srft.PREFIX], "calibration": rows}[recipe.scale]
        down, up = spec.scaled(down, up, spec.channel_scale(of @ down))
    stored = x @ down
    if recipe.group == srft.TENSOR:
        codes, scale = spec.tensor_encode(stored, recipe.bits)
        return (codes - 2.0 ** (recipe.bits - 1)) * scale @ up
    group = recipe.group or x.shape[-1]
    return spec.affine_decode(*spec.affine_encode(stored, recipe.bits, group, True), group) @ up


NAMES = [name for name, recipe in srft.RECIPES.items() if not (recipe.learned or recipe.before)]


def test_codes_are_those_of_the_spec(subtests, monkeypatch):
    monkeypatch.setattr(srft, "PREFIX", 40)
    x, rows = rows_of(1).astype(np.float64), rows_of(2).astype(np.float64)
    key = 0, "keys"
    site = srft.Site(lambda: {key: torch.from_numpy(rows).float()})
    for name in NAMES:
        with subtests.test(name=name):
            recipe = srft.RECIPES[name]
            got = site.code(recipe, key, torch.from_numpy(x).float()[None])[0].numpy()
            expected = law(recipe, x, rows)
            # A tie in float32 moves a code, and through the transform a whole row.
            off = np.abs(got - expected).max(-1) > 1e-3 * np.abs(expected).max(-1)
            assert off.mean() < 0.02, off.mean()
            assert np.abs(expected - x).max() > 1e-2 or recipe.bits == 8


def test_bits_count_scales():
    bits = {name: srft.RECIPES[name].bits_per_value(64) for name in NAMES}
    assert bits["srft"] == 4.25 and bits["srft+g32"] == 4.5 and bits["srft+g16"] == 5
    assert bits["srft+tensor"] == 4 and bits["hadamard-int8"] == 8.25


def test_maps_are_those_of_the_spec(subtests):
    dims, draw = 16, torch.Generator().manual_seed(1)
    shapes = {"rotation": (dims, dims), "householder": (6, dims), "scale": (dims,)}
    free = {name: torch.randn(2, *s, generator=draw) for name, s in shapes.items()}
    base = torch.from_numpy(spec.transform("srft", dims)[0]).float()
    for rotation, of in (
        ("rotation", learned_spec.exponential),
        ("householder", learned_spec.householder),
    ):
        with subtests.test(rotation=rotation):
            got = learned.maps({"scale": free["scale"], rotation: free[rotation]}, base)
            for i in range(2):
                turn = of(free[rotation][i].double().numpy())
                scales = learned_spec.scale(free["scale"][i].double().numpy())
                expected = learned_spec.pair("srft", turn, scales)
                for ours, theirs in zip(got, expected, strict=True):
                    np.testing.assert_allclose(ours[i], theirs, rtol=1e-4, atol=2e-5)


def test_the_loss_is_the_error_of_the_codes():
    x = rows_of().reshape(1, -1, 64)
    down, up = (torch.from_numpy(m)[None].float() for m in spec.transform("srft", 64))
    got = learned.loss(torch.from_numpy(x), down, up, 4)
    made = law(srft.RECIPES["srft"], x.astype(np.float64), None)
    assert float(got) == pytest.approx(((made - x) ** 2).sum() / (x**2).sum(), rel=2e-3)


def test_learning_lowers_the_error(subtests):
    x = torch.from_numpy(np.stack([rows_of(0).reshape(-1, 64), rows_of(1).reshape(-1, 64)]))
    for base in ("srft", "none"):
        down = torch.from_numpy(spec.transform(base, 64)[0]).float()
        first = learned.loss(x, down[None], down.mT[None], 4)
        for name in ("scale", "rotation", "householder+scale"):
            with subtests.test(base=base, name=name):
                made = learned.train(x, down, Learned(name, base, steps=30), 4)
                assert (learned.loss(x, *made, 4) < 0.97 * first).all()
                assert torch.allclose(made[0] @ made[1], torch.eye(64), atol=1e-4)


def test_keys_before_rope_are_those_that_the_model_turns(subject):
    seen = {}
    layers = subject.model.model.layers
    handles = [
        layers[i].self_attn.k_norm.register_forward_hook(
            lambda module, args, out, i=i: seen.__setitem__(i, out[0])
        )
        for i in subject.growing
    ]
    exact = subject.prefill(story_tokens(subject.loaded, CONTEXT))
    for handle in handles:
        handle.remove()
    positions = torch.arange(CONTEXT)
    for i in subject.growing:
        keys = exact.layers[i].keys[0]
        plain = seen[i].transpose(0, 1) if seen[i].shape[0] == CONTEXT else seen[i]
        assert (keys - plain).abs().max() > 0.1
        back = srft.turned(subject, keys, positions, -1)
        torch.testing.assert_close(back, plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            srft.turned(subject, back, positions, 1), keys, rtol=1e-4, atol=1e-4
        )


def test_variants_before_rope_turn_keys_back(subject):
    """Codes that lose nothing leave keys where they were; rows of the calibration are turned by their positions."""
    more = srft.More("float32")
    tokens = story_tokens(subject.loaded, CONTEXT)
    exact = subject.prefill(tokens)
    after, before, _ = more.of(subject)
    fine = srft.Recipe(bits=8, group=16, before=True)
    variant = srft.variant(subject, {False: after, True: before}, fine)
    for i, pair in subject.reconstruct(exact, variant).items():
        for x, own in zip(pair, (exact.layers[i].keys, exact.layers[i].values), strict=True):
            assert 0 < (x - own[0]).norm() < 0.02 * own.norm()
    start = srft.sources.start_of(subject.loaded)
    first = subject.prefill([*start, *srft.sources.calibration_tokens(subject.loaded, 600).tokens])
    i = subject.growing[0]
    keys = first.layers[i].keys[0]
    plain = srft.turned(subject, keys, torch.arange(keys.shape[1]), -1)
    torch.testing.assert_close(before.rows[i, "keys"], plain, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_the_hook_changes_what_the_model_reads(subject):
    ids = torch.tensor([story_tokens(subject.loaded, 41)])
    plain = subject.model(ids[:, :-1]).logits[0].log_softmax(-1)
    expected = -float(plain.gather(-1, ids[0, 1:, None]).mean())
    keys = []
    assert hook.likelihood(subject, ids, lambda key, x: keys.append(key)) == pytest.approx(expected)
    layers = subject.model.config.num_hidden_layers
    assert sorted(keys) == sorted((i, side) for i in range(layers) for side in ("keys", "values"))
    assert hook.likelihood(subject, ids, lambda key, x: x) == pytest.approx(expected, rel=1e-5)
    assert hook.likelihood(subject, ids, lambda key, x: 0 * x) > expected + 0.1
    assert hook.likelihood(subject, ids, lambda key, x: None) == pytest.approx(expected)


def test_probes_tell_an_outlier(subtests):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 512, 64))
    plain = hook.probe(torch.from_numpy(x))
    assert abs(plain["kurtosis"]) < 0.2 and plain["entropy"] > 5.9 and plain["largest"] < 0.04
    x[..., 7] += 30
    found = hook.probe(torch.from_numpy(x))
    assert found["kurtosis"] > 20 and found["entropy"] == 0 and found["largest"] == 1
    assert found["energy"] > 0.5 > plain["energy"]


def test_the_hook_begins_texts_as_the_tokenizer_does(subject, monkeypatch, tmp_path):
    assert hook.pieces([7, *range(10)], 4, 1) == [[7, 0, 1, 2, 3], [7, 3, 4, 5, 6]]
    assert hook.pieces(range(9), 4, 0) == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert hook.pieces(range(8), 4, 0) == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(srft.sources, "start_of", lambda loaded: [5, 6])
    monkeypatch.setattr(srft, "LENGTH", 20)
    begun = []

    def look(embed, args):
        begun.extend(args[0][:, :2].tolist())

    handle = subject.model.get_input_embeddings().register_forward_pre_hook(look)
    try:
        assert hook.calibration_rows(subject)[0, "keys"].shape[1] == 600 + 2
        assert begun == [[5, 6]]
        tokens = [5, 6, *story_tokens(subject.loaded, 60)]
        rows, more = Rows(tmp_path / "x.jsonl"), srft.More("float32")
        more(subject, ["none"], 40, "text", tokens, rows)
    finally:
        handle.remove()
    assert len(begun) > 4 and {tuple(x) for x in begun} == {(5, 6)}


def test_the_command_writes_rows_and_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(srft, "STEPS", 20)
    text = "--variants none,srft,srft+learned-scale --contexts 200 --decode 8 --tokens 600"
    for name in ("prose", "records"):
        (tmp_path / f"{name}.txt").write_text(passages("evaluation")["prose"])
    folders = ["--texts", str(tmp_path), "--out", str(tmp_path)]
    options = [TINY, *text.split(), "--texts-at-most", "1", *folders]
    srft.main(options)
    first = (tmp_path / "tiny.jsonl").read_bytes()
    out = capsys.readouterr().out
    rows = {(row["task"], row["preset"]): row for row in read([tmp_path / "tiny.jsonl"])}
    error = {name: rows["srft.error", name] for name in ("none", "srft", "srft+learned-scale")}
    assert error["srft+learned-scale"]["seen"] < error["srft"]["seen"] < error["none"]["seen"]
    hooked = rows["srft.hook", "none"]
    assert abs(hooked["nll"] - hooked["nll_base"]) > 1e-3
    assert f"| 200 | none | 4.12 | {error['none']['seen']:.3g} | " in out
    assert "| 200 | none / srft | 4.12 / 4.12 | " in out and "| keys | all | " in out
    srft.main(options)
    assert (tmp_path / "tiny.jsonl").read_bytes() == first


def test_ratios_divide_means_on_the_same_texts():
    def row(preset, text, kl, nll):
        return {
            "task": "t", "model": "m", "context": 512, "preset": preset, "text": text, "kl": kl,
            "nll": nll, "nll_base": 1.0, "bits": 2.0,
        }  # fmt: skip

    rows = [row("a", "x", 1.0, 1.5), row("a", "y", 9.0, 9.0), row("b", "x", 4.0, 1.25)]
    lines = ratios.ratios(rows, "t", "m", (("a", "b"), ("b", "c"))).splitlines()
    assert lines[2:] == ["| 512 | a / b | 2 / 2 | 0.25 | 0.25 | 1.76 / 0.772 |"]


def test_encode_is_timed_and_says_what_is_predicted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(encode, "ROUNDS", 2)
    monkeypatch.setattr(encode, "LEAST", 0.0)
    encode.main(["--dims", "64", "--vectors", "64", "--out", str(tmp_path / "e.json")])
    out = capsys.readouterr().out
    assert "| mlx cpu | 64 | 64 | " in out and '"lambda+g32"' in (tmp_path / "e.json").read_text()
    assert "prediction, not measured: a product of D 64 takes a Mac's core at least 5.55 ns" in out
    with pytest.raises(UserError, match="--dims. not numbers; got 64,x"):
        encode.main(["--dims", "64,x"])
