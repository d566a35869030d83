"""Keys without their calibrated mean: softmax does not see it, codes gain by it; kept, refused, read by both tracks."""

import copy
import dataclasses
import pickle

import mlx.core as mx
import numpy as np
import pytest
import torch
from batches import alone, together
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from random_models import random_model
from safetensors import safe_open
from safetensors.numpy import save
from turning import means_over, moments_over, seen_by, stored

from cuda_track.cache import attention as torch_attention
from cuda_track.cache.compressed import CompressedKVCache as TorchCache
from cuda_track.codec import maps as torch_maps
from mlxkv.cache import attention
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.codec import maps
from mlxkv.errors import UserError
from mlxkv.formats.affine import Affine
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.config import CENTRED, CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.models import attach, detach
from mlxkv.models.calibration import measure, moments
from mlxkv.spec import affine as ref
from mlxkv.spec import balanced as spec

NAMES = ("centred-int2", "centred-int3", "oscar-int2+centred")
KINDS = ("balanced-centred", "balanced")
WINDOWS = {"sink": 16, "recent": 16, "page": 16}
INT2 = dataclasses.replace(PRESETS["centred-int2"], **WINDOWS)
TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rms(x, exact):
    return np.sqrt(np.mean((np.array(x) - exact) ** 2) / np.mean(np.array(exact) ** 2))


@pytest.fixture(scope="module")
def model():
    """Its keys have an offset of several standard deviations, which RoPE turns where it is fast."""
    model = random_model("llama", attention_bias=True)
    for layer in model.layers:
        projection = layer.self_attn.k_proj
        projection.bias = 3 * mx.abs(projection.bias) + 0.75
    return model


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT, positions=len(TEXT))


@pytest.fixture(autouse=True)
def detached(model):
    yield
    detach(model)


def logits(model, cache=None, prompt=90, end=100):
    cache = cache or make_prompt_cache(model)
    text = mx.array(TEXT[:end])[None]
    parts = [model(text[:, :prompt], cache=cache)]
    parts += [model(text[:, i : i + 1], cache=cache) for i in range(prompt, end)]
    return np.array(mx.concatenate(parts, axis=1)[0])


def keys_of(model, window):
    """Per layer the keys [G, T, D] of every token behind the first 64 of a window, from plain caches."""
    out = [[] for _ in model.layers]
    for start in range(0, len(TEXT), window):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array(TEXT[start : start + window])[None], cache=cache))
        for one, parts in zip(cache, out, strict=True):
            parts.append(np.array(one.state[0][0, :, moments.SINK : one.offset], np.float64))
    return [np.concatenate(parts, 1) for parts in out]


# -- calibration


def test_the_mean_is_of_keys_that_caches_would_store_over_all_positions(model, monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 50)
    found = measure.calibrate(model, TEXT, window=350)
    whole = measure.calibrate(model, TEXT, window=350, per_layer=True)
    for index, windows in enumerate(seen_by(model, TEXT, 350)):
        exact = means_over(stored(windows)[1])
        for made in (found, whole):  # of each kv head, even where they share a map
            mean = made.layers[str(index)].keys.mean
            assert mean.dtype == np.float32
            np.testing.assert_allclose(mean, exact, rtol=1e-4, atol=1e-5)
        assert found.layers[str(index)].values.mean is None


def test_maps_are_made_for_what_is_left_without_the_mean(model, made):
    """From the moments in the file, as good as from the keys themselves; the maps of raw moments are not."""
    for index, windows in enumerate(seen_by(model, TEXT, len(TEXT))):
        layer = made.layers[str(index)]
        down = layers.pairs(made, KINDS, str(index))[0][0]
        reads = layers.subspace.read_moment(layer.keys.values, layer.keys.vectors)
        raw = layer.keys.balance.pair("uhp")[0]
        noise, means = stored(windows)
        noise, means = moments_over(noise, len(TEXT)), means_over(means, len(TEXT))
        for g, mean in enumerate(means):
            left = spec.about_mean(noise[g], mean)
            best = spec.balanced(spec.regular(left), spec.regular(reads[g]))[0]
            least = spec.cost(best, left, reads[g])
            assert spec.cost(down[g], left, reads[g]) < 1.01 * least
            assert spec.cost(raw[g].astype(np.float64), left, reads[g]) > 1.05 * least


def test_both_tracks_have_the_same_maps_and_means(made):
    for kinds in (KINDS, ("oscar-centred", "oscar")):
        ours, theirs = maps.of(made, kinds)["1"], torch_maps.of(made, kinds)["1"]
        mean = made.layers["1"].keys.mean
        np.testing.assert_array_equal(np.array(ours.centre.mean)[:, 0], mean)
        np.testing.assert_array_equal(theirs.mean.numpy()[:, 0], mean)
        for side in artifact.SIDES:
            for part in ("down", "up"):
                mine, other = (getattr(getattr(x, side), part) for x in (ours, theirs))
                np.testing.assert_array_equal(np.array(mine), other.numpy())
        for rank in range(2):
            mine, other = maps.cut(ours, rank, 2), torch_maps.cut(theirs, rank, 2)
            np.testing.assert_array_equal(np.array(mine.centre.mean)[:, 0], mean[rank : rank + 1])
            np.testing.assert_array_equal(other.mean.numpy()[:, 0], mean[rank : rank + 1])
    plain = maps.of(made, ("oscar", "oscar"))["1"]
    assert plain.centre is None and maps.of(made, KINDS)["1"].centre is not None
    np.testing.assert_array_equal(np.array(plain.keys.down), np.array(ours.keys.down))
    again = pickle.loads(pickle.dumps(maps.of(made, KINDS)["1"]))
    assert again is maps.of(made, KINDS)["1"]


# -- files


def without_means(made):
    out = {}
    for name, layer in made.layers.items():
        out[name] = dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, mean=None))
    return dataclasses.replace(made, layers=out)


def test_files_hold_it_and_older_ones_serve_other_presets(model, made, tmp_path):
    path, older = tmp_path / "a.safetensors", tmp_path / "old.safetensors"
    artifact.write(path, made)
    back, old = artifact.read(path), without_means(made)
    assert back.centred and back.digest == made.digest
    for name, layer in made.layers.items():
        np.testing.assert_array_equal(back.layers[name].keys.mean, layer.keys.mean)
    artifact.write(older, old)
    assert not old.centred and artifact.read(older).digest == old.digest != made.digest
    assert not old.serves(INT2) and made.serves(INT2) and old.serves(PRESETS["balanced-int2"])
    attach(model, "balanced-int2", calibration=older)
    with pytest.raises(UserError, match=r"\[calibration\] .*old.*no means of keys.*mlxkv calib"):
        attach(model, "centred-int2", calibration=older)
    assert make_prompt_cache(model)[0].config.keys.transform == "balanced"


def test_every_fault_of_a_file_is_one_line(made, tmp_path):
    path = tmp_path / "a.safetensors"
    artifact.write(path, made)
    with safe_open(path, "numpy") as file:
        text = file.metadata()["mlxkv"]
        found = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    sound = found["1.keys.mean"]
    nan, other = sound.copy(), sound + np.float32(0.1)
    nan[0, 3] = np.nan
    for changed, reason in (
        (nan, "NaN, infinity .* in layer 1, keys"),
        (sound[:1].copy(), "parts missing"),
        (sound.astype(np.float64), "NaN, infinity or no float32"),
        (other, "its digest differs"),
        (None, "its digest differs"),
    ):
        tensors = {n: x for n, x in (found | {"1.keys.mean": changed}).items() if x is not None}
        path.write_bytes(save(tensors, {"mlxkv": text}))
        with pytest.raises(UserError, match=reason) as caught:
            artifact.read(path)
        assert "\n" not in str(caught.value)


def test_a_clip_belongs_to_its_mean(made):
    form = INT2.keys.format(64, 16)
    assert form.startswith("balanced-centred int2")
    basis = made.layers["0"].keys
    other = dataclasses.replace(basis, mean=basis.mean + 1)
    assert basis.is_like(basis, form) and not basis.is_like(other, form)
    assert basis.is_like(other, form.replace("-centred", ""))
    assert not basis.is_like(dataclasses.replace(basis, mean=None), form)


# -- configurations


def test_presets_and_pairs():
    for name in NAMES:
        config = PRESETS[name]
        assert config.centred and CacheConfig.from_dict(config.as_dict()) == config
        plain = dataclasses.replace(
            config, keys=dataclasses.replace(config.keys, transform=CENTRED[config.keys.transform])
        )
        assert plain.bits_per_value(128, 128) == config.bits_per_value(128, 128)
    assert dataclasses.replace(PRESETS["balanced-int2"], keys=INT2.keys).keys == INT2.keys
    assert parse_kv("centred-int2/int4").centred and not parse_kv("int4/centred-int2").centred


def test_caches_that_observe_queries_are_refused(subtests):
    for name in ["centred-int2+keep0.5", "oscar-int2+centred+pages0.5"]:
        with subtests.test(name=name):
            with pytest.raises(
                UserError,
                match=r"^\[CacheConfig\] keys without their mean cannot be sel.*preset such as int2",
            ):
                parse_kv(name)


def test_values_keep_their_mean():
    side = Side(Affine(2, 64), "balanced-centred")
    with pytest.raises(UserError, match="only keys .* choose balanced"):
        CacheConfig(side, side)


def test_every_step_of_the_dial_compresses_models_whose_keys_need_their_mean(subtests):
    for dialled, preset, family in (
        ("fill-2.25", "int2", "gpt_oss"),
        ("fill-3", "int3", "gemma2"),
        ("fill-3", "int3", "deepseek_v3"),
    ):
        with subtests.test(dialled=dialled, family=family):
            model = random_model(family)
            made = measure.calibrate(model, TEXT)
            wanted = attach(model, preset, calibration=made)
            reports = attach(model, dialled, calibration=made, strict=True)
            for report, want in zip(reports, wanted, strict=True):
                assert report.compressed == want.compressed
                assert report.bits_per_value == want.bits_per_value
                assert f"{preset} in place of {dialled}" in report.reason or not report.compressed
            assert any(report.compressed for report in reports)
            detach(model)


def test_models_with_sink_logits_are_left_out(subtests):
    model = random_model("gpt_oss")
    made = measure.calibrate(model, TEXT)
    for name in NAMES:
        with subtests.test(name=name):
            with pytest.warns(
                UserWarning, match="NOTHING IS COMPRESSED: a sink logit beside its scores"
            ):
                reports = attach(model, name, calibration=made)
            assert not any(r.compressed for r in reports)
            detach(model)
            with pytest.raises(UserError, match=r"\[--kv-strict\] layers .* a sink logit"):
                attach(model, name, calibration=made, strict=True)
            reports = attach(model, "balanced-int2", calibration=made)
            assert any(r.compressed for r in reports)
            detach(model)


# -- caches


def test_softmax_does_not_see_the_mean(subtests):
    """Nothing is sealed: attention is that of full precision, in decoding and prefill, to rounding."""
    for dtype in [mx.float32, mx.float16, mx.bfloat16]:
        with subtests.test(dtype=dtype):
            turns = maps.sample(2, (64, 64), KINDS)
            keys, values, q = (
                data(1, 2, 90, 64) + 2,
                data(1, 2, 90, 64, seed=1),
                data(1, 6, 90, 64, seed=2),
            )
            inputs = [mx.array(x, dtype) for x in (q, keys, values)]
            exact = ref.attention(
                *(np.array(x.astype(mx.float32), np.float64) for x in inputs),
                0.125,
                ref.causal_mask(90, 90),
            )
            cache = CompressedKVCache(PRESETS["centred-int2"], turns)
            view, _ = cache.update_and_fetch(*inputs[1:])
            assert view.pages is None and float(mx.abs(view.live[0] - inputs[1]).max()) > 0.5
            out = attention.attend(inputs[0], view, 0.125, "causal")
            step = {mx.float32: 2**-22, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
            assert rms(out.astype(mx.float32), exact) < 4 * step
            last = attention.attend(inputs[0][:, :, -1:], view, 0.125)
            assert rms(last.astype(mx.float32), exact[:, :, -1:]) < 4 * step


def test_a_cache_holds_what_the_law_says(subtests, model, made):
    """Keys of an attached model, page by page, from a plain cache's by the spec."""
    for name in NAMES:
        detach(model)
        with subtests.test(name=name):
            config = dataclasses.replace(PRESETS[name], **WINDOWS)
            keys = keys_of(model, 700)[
                0
            ]  # behind the first 64, of layer 0: they depend on no cache
            attach(model, config, calibration=made)
            cache = make_prompt_cache(model)
            mx.eval(model(mx.array(TEXT[:400])[None], cache=cache))
            own, side = cache[0], config.keys.quantizer
            down, up = layers.pairs(made, config.fitted, "0")[0]
            mean = made.layers["0"].keys.mean.astype(np.float64)
            left = keys - mean[:, None]
            first = 64 - config.sink  # of the pages' tokens, the first that `keys` has
            tokens = own.store.count * config.page - first
            stored = left[:, :tokens] @ down.astype(np.float64)
            group = side.group_size(64, config.page)
            codes = ref.affine_encode(stored, side.bits, group, clip=side.clip)
            law = ref.affine_decode(*codes, group) @ up.astype(np.float64)
            found = np.array(own.store.read(0, own.store.count).decode(0, mx.float32))[0, :, first:]
            assert rms(found, law) < 2e-2  # a code at a rounding boundary moves its whole token
            assert (
                rms(
                    np.array(own.keys_and_values()[0].live[0])[0],
                    left[:, tokens : tokens + own.count],
                )
                < 1e-4
            )


def test_saved_prompt_caches_come_back(model, made, tmp_path, monkeypatch):
    attach(model, INT2, calibration=made)
    caches = make_prompt_cache(model)
    logits(model, caches)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    want = logits(model, [copy.copy(c) for c in caches])
    monkeypatch.setattr(maps, "_at_hand", {})  # another process
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    artifact.write(artifact.kept_path("some"), without_means(made))
    with pytest.raises(UserError, match="none with digest"):
        load_prompt_cache(file)
    artifact.write(artifact.kept_path("other"), made)
    back = load_prompt_cache(file)
    assert back[0].centre is not None
    np.testing.assert_array_equal(logits(model, back), want)
    assert rms(want, logits(model)) > 0.01  # they read on behind other tokens


def test_the_other_track_reads_on_from_a_state(model, made):
    attach(model, INT2, calibration=made)
    caches = make_prompt_cache(model)
    logits(model, caches)
    own = caches[0]
    turns = torch_maps.of(made, INT2.fitted)["0"]

    def as_torch(tree):
        if isinstance(tree, dict):
            return {k: as_torch(x) for k, x in tree.items()}
        x = np.array(tree)
        return torch.from_numpy(x.view(np.int32) if x.dtype == np.uint32 else x)

    theirs = TorchCache.from_state(as_torch(own.state), lambda *_: turns)
    keys, values, q = data(1, 2, 1, 64), data(1, 2, 1, 64, seed=1), data(1, 4, 1, 64, seed=2)
    ours = attention.attend(
        mx.array(q), own.update_and_fetch(mx.array(keys), mx.array(values))[0], 0.125
    )
    view = theirs.update_and_fetch(torch.from_numpy(keys), torch.from_numpy(values))
    assert rms(torch_attention.attend(torch.from_numpy(q), view, 0.125).numpy(), ours) < 1e-5
    left = torch.from_numpy(keys) - turns.mean
    assert torch.equal(view.live[0][:, :, -1:], left)


def test_a_batch_says_what_each_prompt_says_alone(model, made):
    prompts = [TEXT[i : i + n] for i, n in ((0, 90), (100, 70), (200, 110))]
    attach(model, INT2, calibration=made)
    want = [alone(model, prompt, 24) for prompt in prompts]
    assert together(model, prompts, [24] * 3, late=1) == want


def test_traced_steps_say_the_same_tokens(model, made, monkeypatch):
    monkeypatch.setenv("MLXKV_COMPILE", "1")
    attach(model, INT2, calibration=made)
    steps = vars(model)["_mlxkv_attachment"].steps
    assert steps.off is None
    traced = alone(model, TEXT[:90], 40)
    assert steps.replayed > 20 and not steps.refused
    steps.off = "a test"
    assert alone(model, TEXT[:90], 40) == traced
