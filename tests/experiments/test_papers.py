"""The runner of the papers' experiments: presets as their caches have them, windows, rows, tables."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from small_models import TINY, story_tokens

from cuda_track.models.attach_model import attach, compressed_from
from cuda_track.models.taps import observing
from cuda_track.models.transformers_compat import handed
from experiments.papers import oscar, rivals, runner
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval.rows import Rows, read
from mlxkv.formats.names import parse_kv
from mlxkv.spec import affine
from mlxkv.spec import kvarn as kvarn_spec
from mlxkv.spec import oscar as oscar_spec
from mlxkv.spec.bounds import BOUNDS, read_golden, rms, under

PAGE = 64  # of golden tensors
CONTEXT, DECODE = 64 + 64 + 3 * 64 + 10, 12  # as many pages are stored here as in a cache


@pytest.fixture(scope="module")
def tokens(subject):
    return story_tokens(subject.loaded, CONTEXT + DECODE + 1)


@pytest.mark.parametrize("name", ["int4", "turbo-int2", "fill-3", "oscar-int2+centred"])
def test_a_preset_is_what_its_cache_computes(subject, tokens, name):
    exact = subject.prefill(tokens[:CONTEXT])
    rest = tokens[CONTEXT:-1]
    stored = subject.reconstruct(exact, subject.preset(name))
    got = subject.go_on(exact, [stored], rest)
    whole = {i: (layer.keys[0], layer.values[0]) for i, layer in enumerate(exact.layers)}
    plain = subject.go_on(exact, [whole], rest)
    config = replace(parse_kv(name), sink=64, recent=64)
    attach(subject.model, config, subject.calibration)
    try:
        with torch.no_grad():
            cache = compressed_from(subject.model, exact)
            ids = torch.tensor([rest])
            expected = subject.model(ids, **handed(cache)).logits
    finally:
        attach(subject.model, "fp16")
    error = (got - expected).square().mean().sqrt()
    change = (plain - expected).square().mean().sqrt()
    assert error < 1e-3 * change, (error, change)


def test_exact_keys_cost_nothing_and_rows_go_on(subject, tokens, tmp_path):
    variants = {
        "exact": runner.Variant(runner.side_by_side(runner.exact, runner.exact), 16),
        "none": runner.Variant(lambda layer, k, v: (0 * k, 0 * v), 0),
    }
    found = {}
    subject.measure(variants, tokens, CONTEXT, 2, found.__setitem__)
    assert found["exact"]["kl"] < 1e-9 and found["exact"]["top1"] == 1
    assert found["none"]["kl"] > 1e-3 and found["none"]["bits"] == 0
    alone = {}
    subject.measure({"none": variants["none"]}, tokens, CONTEXT, 1, alone.__setitem__)
    assert alone["none"]["kl"] == pytest.approx(found["none"]["kl"], rel=1e-4)


def test_windows_stay_exact(subject, tokens):
    variant = runner.Variant(lambda layer, k, v: (k + 1, v + 1), 1, sink=32, recent=40, page=128)
    assert variant.stored(CONTEXT) == slice(32, 32 + 256)
    exact = subject.prefill(tokens[:CONTEXT])
    for i, pair in subject.reconstruct(exact, variant).items():
        for x, own in zip(pair, (exact.layers[i].keys, exact.layers[i].values), strict=True):
            moved = (x - own[0]).abs().amax((0, 2))
            assert (moved[32:288] > 0.9).all() and not moved[:32].any() and not moved[288:].any()


def test_moments_are_those_of_the_spec(subject, monkeypatch):
    """Rows of the calibration text, behind what the tokenizer puts there: the second moments of queries and of
    attention's outputs."""
    monkeypatch.setattr(sources, "start_of", lambda loaded: [5, 6])
    subject, calls = runner.Subject(subject.loaded, "started", subject.out, 600), {}
    ids = sources.calibration_tokens(subject.loaded, 600).tokens
    start = sources.start_of(subject.loaded)
    with observing(subject.model, lambda call: calls.setdefault(call.layer, call) and None):
        with torch.no_grad():
            subject.model(torch.tensor([[*start, *ids]]), use_cache=False)
    layer = subject.layers[1]
    asked = []
    monkeypatch.setattr(runner, "calibrate", lambda *x: asked.append(x) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _ = subject.calibration
    assert asked[0][-1] == [5, 6]
    call = calls[1]
    q, k, v = (x.double().numpy() for x in (call.queries, call.keys, call.values))
    mask = np.tril(np.ones((q.shape[2],) * 2, bool))
    np.testing.assert_allclose(
        layer.queries, oscar_spec.key_target(q, k.shape[1]), rtol=1e-4, atol=1e-4
    )
    target = oscar_spec.value_target(q, k, v, call.scale, mask)
    np.testing.assert_allclose(layer.outputs, target, rtol=1e-3, atol=1e-4 * target.max())
    np.testing.assert_allclose(layer.keys, call.keys[0], atol=1e-5)


def test_a_command_writes_rows_once(tmp_path, capsys):
    text = "--variants int4,exact --contexts 200 --decode 8 --tokens 600 --texts-at-most 1 --out"
    options = [TINY, *text.split(), str(tmp_path)]
    args = runner.parser("try", None).parse_args(options)
    made = {"exact": lambda: runner.Variant(runner.side_by_side(runner.exact, runner.exact), 16)}
    runner.run("try", args, lambda subject: made)
    first = (tmp_path / "tiny.jsonl").read_bytes()
    rows = {row["preset"]: row for row in read([tmp_path / "tiny.jsonl"])}
    assert rows["exact"]["kl"] < 1e-9 < rows["int4"]["kl"]
    assert rows["int4"]["bits"] == pytest.approx(4.5) and rows["int4"]["seed"] == 0
    runner.run("try", args, lambda subject: made)
    assert (tmp_path / "tiny.jsonl").read_bytes() == first
    assert "| 200 | int4 | 64,64 | 4.5 |" in capsys.readouterr().out


def test_presets_that_follow_queries_are_refused(subject):
    with pytest.raises(UserError, match="oja-0.75 follows the text"):
        subject.preset("oja-0.75")


def test_the_table_divides_means_on_the_same_texts():
    def row(preset, text, kl):
        return {
            "model": "m", "context": 512, "preset": preset, "windows": "64,64", "text": text, "kl": kl,
            "nll": 2.0, "nll_base": 1.0, "top1": 0.5, "bits": 2.0,
        }  # fmt: skip

    rows = [row("a", "x", 1.0), row("a", "y", 3.0), row("b", "x", 1.0), row("b", "z", 100.0)]
    lines = runner.table(rows, "m", "b").splitlines()
    assert lines[2].split(" | ")[-1] == "1 |" and lines[2].split(" | ")[4] == "2"


def test_torch_computes_the_laws(subtests, monkeypatch):
    """Codes of experiments against float64 specs. torch rounds float64 to float32 on its way to float16."""
    monkeypatch.setattr(kvarn_spec, "half", lambda x: affine.half(x.astype(np.float32)))
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 128, 32)) * 3).double()
    x = x * torch.logspace(-1, 1, 32).double()
    for side, bits in (("keys", 4), ("values", 2)):
        with subtests.test(side=side):
            expected = kvarn_spec.reconstructed(x.numpy(), bits, side)
            np.testing.assert_allclose(rivals.kvarn_tiles(x, bits, side), expected, atol=1e-9)
            plain = kvarn_spec.coded(x.numpy(), bits, kvarn_spec.AXES[side][1])
            assert np.square(expected - plain).mean() > 1e-4 * x.square().mean()


def released():
    """OSCAR's variants as golden tensors have them: (the tensors, a layer of their keys, values and queries)."""
    golden = under(read_golden("oscar_released")[0], "16")
    q = golden["q"].astype(np.float64)
    np.testing.assert_allclose(oscar_spec.key_target(q, 2), golden["k.sigma"], rtol=1e-6)
    keys, values, queries = (torch.from_numpy(golden[n]) for n in ("k.x", "v.x", "k.sigma"))
    return golden, runner.Layer(0, keys[0].float(), values[0].float(), queries, queries)


def test_oscars_variants_are_those_of_the_golden_rows(subtests):
    """The released value target, one rotation a layer, parts of it, the clip, four levels."""
    golden, layer = released()
    for letter, side in (("k", "keys"), ("v", "values")):
        spec = golden[f"{letter}.sigma"]
        with subtests.test("target", side=side):
            np.testing.assert_allclose(
                oscar.target(layer, side, "released"), spec, rtol=1e-6, atol=1e-7 * spec.max()
            )
        for name in ("none", "u", "h", "uh", "hp", "uhp"):
            with subtests.test(parts=name, side=side):
                own = oscar.rotations(layer, side, "released", name.replace("none", ""), False)
                own = own.expand(2, -1, -1).numpy()
                assert rms(own, golden[f"{letter}.{name}"]) < BOUNDS["transforms"]
        with subtests.test("one a layer", side=side):
            own = oscar.rotations(layer, side, "released", "uhp", True).numpy()
            assert rms(own, golden[f"{letter}.r"]) < BOUNDS["transforms"]
        x = torch.from_numpy(golden[f"{letter}.x"])[:, :, PAGE:].double()
        with subtests.test("clip", side=side):
            own = oscar.clipped(x, oscar.CLIPS[side])
            np.testing.assert_array_equal(own, golden[f"{letter}.clipped"])
        for name in ("lloyd", "centroids"):
            with subtests.test(levels=name, side=side):
                clipped = torch.from_numpy(golden[f"{letter}.clipped"]).double()
                own = oscar.four_levels(clipped, name == "centroids")
                np.testing.assert_allclose(own, golden[f"{letter}.{name}"], rtol=1e-6)


def test_oscar_as_released_stores_the_golden_codes(subtests):
    """A page rotated, clipped, coded and rotated back, but for codes at a boundary."""
    golden, layer = released()
    for letter, side in (("k", "keys"), ("v", "values")):
        with subtests.test(side=side):
            x = torch.from_numpy(golden[f"{letter}.x"])[0, :, :PAGE].float()
            kinds = ("attention", "released")
            stored = oscar.oscar_side(layer, side, x, kinds, shared=True, group=16)
            r = golden[f"{letter}.r"].astype(np.float64)
            codes, scale, bias = (golden[f"{letter}.{n}"] for n in ("codes", "scale", "bias"))
            scale, bias = (y.astype(np.float64) for y in (scale, bias))
            right = affine.affine_decode(codes, scale, bias, 16)[0]
            near = np.unpackbits(golden[f"{letter}.near"], count=codes.size).reshape(right.shape)
            off = np.abs(stored.numpy() @ r - right)
            assert near.mean() < 0.1 and (off[near == 0] < 1e-4 * scale.max()).all()


def test_kitty_codes_its_largest_channels_in_four_bits():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 256, 16)) * rng.uniform(0.2, 3, (2, 1, 16)) + 0.5
    x[:, 128:, 3] *= 40  # largest in one group alone
    x[1, :, 5] = 2.0  # no spread
    for share in (0, 0.25):
        got = rivals.kitty_keys(None, "keys", torch.from_numpy(x).float(), share).numpy()
        for head, start in product(range(2), (0, 128)):
            part = x[head, start : start + 128]
            four = set(np.argsort(-np.abs(part).mean(0))[: int(share * 16)])
            for channel in range(16):
                own, top = part[:, channel], 15 if channel in four else 3
                low = np.float64(np.float16(own.min()))
                scale = np.float64(np.float16((own.max() - low) / top)) or 1.0
                right = np.clip(np.rint((own - low) / scale), 0, top) * scale + low
                made = got[head, start : start + 128, channel]
                assert (
                    np.abs(made - right) > 1e-3 * scale
                ).mean() < 0.02  # but for ties of float32
    assert rivals.kitty(0.25).bits_of(64) == (2 + 0.5 + 33 / 128 + 2.5) / 2


def test_blocks_get_the_bits_that_gain_most():
    scores = np.array([9.0, 1.0, 0.1, 70.0])
    bits = rivals.block_bits(scores, 2)
    assert bits.sum() == 8 and bits.min() >= 1
    best = min(
        (scores @ 4.0 ** -np.array(own), own)
        for own in product(range(1, 9), repeat=4)
        if sum(own) == 8
    )
    assert scores @ 4.0**-bits == pytest.approx(best[0])
    energy = torch.logspace(3, -3, 8).repeat(2)  # widths of a pair or two
    keys = torch.randn(1, 500, 16, generator=torch.manual_seed(0)) * energy.sqrt()
    layer = runner.Layer(0, keys, keys, torch.diag(energy)[None], keys)
    got = rivals.block_gtq_keys(layer, "keys", keys, 3)
    widths = rivals.pair_bits(layer, 3)[0]
    assert len(set(widths)) > 2 and widths.mean() == 3
    for width in set(widths):  # TurboQuant, theorem 1: less than sqrt(3) pi / 2 4^-b of the energy
        of = torch.from_numpy(widths == width)
        share = float((got - keys)[..., of].square().sum() / keys[..., of].square().sum())
        assert 0 < share < 3**0.5 * np.pi / 2 * 4.0**-width, width


def test_every_variant_measures_and_even_keys_cost_less(subject, tokens):
    """On keys with one huge, seldom read channel and a mean, whatever follows the free transform gains."""
    made = {name: make() for name, make in oscar.variants_of(subject).items()}
    layer = subject.layers[1]
    keys, values = (x[:, :128] for x in (layer.keys, layer.values))
    for name, variant in made.items():
        out = variant.store(layer, keys, values)
        assert all(x.shape == keys.shape and x.isfinite().all() for x in out), name
        assert 0 < variant.bits_of(128) < 5, name
    big = torch.ones(128)
    big[5] = 50.0
    queries = layer.queries / big[:, None] / big
    odd = replace(layer, keys=(layer.keys + 0.5) * big, queries=queries, cache={})
    x = odd.keys[:, :128]
    for name in ("hadamard-int2", "turbo-int2", "kvarn-k2v2", "oscar"):
        noise = []
        for end in ("", "+even"):
            off = made[name + end].store(odd, x, values)[0] - x
            off = off - off.mean(1, keepdim=True)  # what all tokens share, softmax does not see
            noise.append(float(torch.einsum("gtd,gde,gte->", off, queries, off)))
        assert noise[1] < 0.5 * noise[0], (name, noise)


def test_rotations_of_the_authors_files(subject, tmp_path):
    """Files in the form of rotation/compute_kv_rotation.py; others are refused in one line."""
    files = []
    for side in ("k", "v"):
        entry = {
            "rotation": torch.linalg.qr(torch.randn(128, 128))[0],
            "eigenvalues": torch.ones(128),
        }
        layers = {i: {"layer_id": i} | entry for i in subject.growing}
        about = {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer"}
        files.append(tmp_path / f"{side}_rotation.pt")
        torch.save(about | {"layers": layers}, files[-1])
    given = oscar.zoo(*files)
    assert set(given) == {(i, side) for i in subject.growing for side in ("keys", "values")}
    layer = subject.layers[1]
    with_file = oscar.oscar(given=given).store(layer, layer.keys[:, :64], layer.values[:, :64])
    assert not torch.equal(
        with_file[0], oscar.oscar().store(layer, layer.keys[:, :64], layer.values[:, :64])[0]
    )
    torch.save({"layers": {0: {"rotation": torch.ones(4, 4)}}}, files[0])
    with pytest.raises(UserError, match="no rotation"):
        oscar.zoo(*files)
    files[0].write_bytes(b"no pickle")
    with pytest.raises(UserError, match="no rotations of OSCAR"):
        oscar.zoo(*files)


def test_errors_grow_stage_by_stage_rows(subject, tokens, tmp_path):
    made = {
        "exact": runner.Variant(runner.side_by_side(runner.exact, runner.exact), 16),
        "oscar": oscar.oscar(),
    }
    rows = Rows(tmp_path / "rows.jsonl")
    oscar.stages(subject, made, CONTEXT, "text", tokens, rows, "float32")
    found = {row["preset"]: row for row in read([rows.file])}
    for stage in ("keys", "values", "scores", "outputs"):
        assert found["exact"][stage] < 1e-9 < 1e-3 < found["oscar"][stage], stage
