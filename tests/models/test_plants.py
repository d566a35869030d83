"""The plants beside the reciprocal one: what each changes, what stays, and that models still answer."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxkv.errors import UserError
from mlxkv.models.catalog.aliases import EMBEDDED, resolve
from mlxkv.models.catalog.fingerprint import fingerprint
from mlxkv.models.catalog.folder import check
from mlxkv.models.catalog.weights import plant as plants
from mlxkv.models.catalog.weights import stored
from mlxkv.models.catalog.weights.plant import (
    KEYS,
    MASSIVE,
    OFFSET,
    RECIPROCAL,
    channel_scales,
    outliers,
)

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlxkv.eval.arms import Arms  # noqa: E402
from mlxkv.eval.tasks import retrieval  # noqa: E402
from mlxkv.eval.tasks.part import TaskOptions  # noqa: E402
from mlxkv.models import load  # noqa: E402
from mlxkv.models.hooks.taps import PlainObserver  # noqa: E402
from mlxkv.texts.sources import story_tokens  # noqa: E402

NEW = [name for name, source in EMBEDDED.items() if source.planted not in ("", RECIPROCAL)]
TOKENS = 512


def config(name: str) -> dict:
    return stored.plain(json.loads((EMBEDDED[name].folder / "config.json").read_text()))


def weights(name: str) -> dict:
    return {key: w.astype(np.float32) for key, w in stored.decode(EMBEDDED[name].folder).items()}


def read(name: str) -> tuple[np.ndarray, list, list[int]]:
    """Logits [T, V] of a story, (keys, values) of every layer that caches compress, and the tokens."""
    loaded = load(name, "int4", dtype="float32")  # attention reads our views
    tokens = story_tokens(loaded, TOKENS)
    caches = loaded.model.make_cache()
    grows = [r.index for r in loaded.layers if r.grows]
    for index in grows:
        caches[index] = PlainObserver()
    logits = loaded.model(mx.array([tokens]), cache=caches)[0]
    exact = [tuple(np.array(x[0]) for x in caches[index].exact) for index in grows]
    return np.array(logits), exact, tokens


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(base: np.ndarray, other: np.ndarray) -> float:
    p, q = softmax(base.astype(np.float64)), softmax(other.astype(np.float64))
    return float((p * (np.log(p + 1e-30) - np.log(q + 1e-30))).sum(-1).mean())


@pytest.mark.parametrize("name", ("tiny", "tiny-qwen"))
def test_keys_alone_are_scaled(name):
    """Keys are the plain ones times the scales, and no query's weights change."""
    plain, planted = weights(name), plants.plant(weights(name), config(name), KEYS)
    changed = {key for key in plain if not np.array_equal(plain[key], planted[key])}
    part = ".k_norm.weight" if name == "tiny" else ".k_proj."
    assert changed and all(part in key for key in changed)
    for layer in range(config(name)["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn."
        scales = np.array(channel_scales(config(name), layer, KEYS)).reshape(-1)
        assert scales.max() == 4 and (scales > 1).sum() == 6 * len(scales) / 128
        if name == "tiny":
            gains = [x[f"{at}k_norm.weight"] + 1 for x in (plain, planted)]
            np.testing.assert_array_equal(gains[1], gains[0] * scales)
        else:
            for part in ("weight", "bias"):
                before, after = (x[f"{at}k_proj.{part}"].T for x in (plain, planted))
                np.testing.assert_array_equal(after, before * scales)


def test_an_offset_moves_keys_far_and_predictions_hardly():
    name = "tiny-qwen"
    plain, planted = weights(name), plants.plant(weights(name), config(name), OFFSET)
    changed = {key for key in plain if not np.array_equal(plain[key], planted[key])}
    assert changed and all(key.endswith("k_proj.bias") for key in changed)
    (base, exact, _), (logits, moved, _) = read(name), read("tiny-qwen-offset")
    for layer, ((before, _), (after, _)) in enumerate(zip(exact, moved, strict=True)):
        for o in (o for o in outliers(config(name), OFFSET) if o.layer == layer):
            gone = after[o.kv_head, :, o.pair].mean() - before[o.kv_head, :, o.pair].mean()
            assert gone > 5 * after[o.kv_head, :, o.pair].std()
            # The pair turns by less than .05 over all positions, so softmax hardly sees the constant.
            assert 8192 * config(name)["rope_theta"] ** (-o.pair / 64) < 0.05
    assert kl(base, logits) < 1e-4
    fast = dict(weights(name))
    bias = fast["model.layers.0.self_attn.k_proj.bias"].copy()
    bias[2] += 30  # a pair that turns: the same constant is another function
    fast["model.layers.0.self_attn.k_proj.bias"] = bias
    loaded = load(name, "fp16", dtype="float32")
    loaded.model.load_weights([(key, mx.array(w)) for key, w in fast.items()])
    turned = np.array(loaded.model(mx.array([story_tokens(loaded, TOKENS)]))[0])
    assert kl(base, turned) > 100 * kl(base, logits)


@pytest.mark.parametrize("name", ("tiny", "tiny-qwen"))
def test_massive_tokens_have_large_keys_and_small_values(name):
    ends = plants.paragraph_ends(EMBEDDED[name].folder)
    _, layers, tokens = read(f"{name}-massive")
    massive = np.isin(tokens, ends)
    assert 2 < massive.sum() < TOKENS / 20
    for keys, values in layers:
        for k, v in zip(keys, values, strict=True):
            usual = np.abs(k[~massive]).mean(0)
            assert (np.abs(k[massive]).mean(0) / usual).max() > 4
            alike = k[massive] / np.linalg.norm(k[massive], axis=-1, keepdims=True)
            assert (alike @ alike.T).min() > 0.5  # but for what RoPE turns
            if name == "tiny":  # values of qwen2 have a bias, which stays
                assert (
                    np.linalg.norm(v[massive], axis=-1).mean()
                    < 0.5 * np.linalg.norm(v[~massive], axis=-1).mean()
                )


@pytest.mark.parametrize("name", NEW)
def test_planted_models_still_find_what_they_read(name):
    loaded = load(name, "fp16", dtype="float32")
    asked = TaskOptions(contexts=(768,), questions=4, kinds=("single",))
    part = retrieval.parts(arms := Arms(loaded, ["fp16"]), asked)[0]
    found = part.run(arms, ["fp16"], lambda n: None)["fp16"]["kinds"]["single"]["right"]
    assert found and all(value for values in found for value in values)


@pytest.mark.parametrize("name", NEW)
def test_planting_is_the_same_in_every_library(name):
    source = EMBEDDED[name]
    plain = {key: w for key, w in weights(name).items() if "layers.1" in key or "layers" not in key}
    plain |= {key.replace("layers.1.", "layers.0."): w for key, w in plain.items()}
    small = config(name) | {"num_hidden_layers": 1}
    numpy = plants.plant_folder(plain, small, source.planted, source.folder)
    assert any(not np.array_equal(numpy[key], w) for key, w in plain.items())
    mlx = plants.plant_folder(
        {key: mx.array(w) for key, w in plain.items()}, small, source.planted, source.folder
    )
    for key, w in numpy.items():
        np.testing.assert_array_equal(np.array(mlx[key]), w)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        given = {key: torch.tensor(w) for key, w in plain.items()}
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
        theirs = plants.plant_folder(given, small, source.planted, source.folder)
        for key, w in numpy.items():
            np.testing.assert_array_equal(theirs[key].numpy(), w)
        assert torch.equal(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"])


def test_each_plant_is_a_model_of_its_own():
    for family in ("tiny", "tiny-qwen"):
        names = [n for n, s in EMBEDDED.items() if s.folder == EMBEDDED[family].folder]
        folder = check(EMBEDDED[family].folder)
        marks = {fingerprint(folder, EMBEDDED[name].planted) for name in names}
        assert len(marks) == len(names) >= 4
        assert len({mark[16:] for mark in marks}) == len(names)


def test_a_folder_is_planted_by_name(tmp_path):
    assert resolve(f"{tmp_path}+keys").planted == KEYS
    assert resolve(f"{tmp_path}+keys").folder == tmp_path
    (tmp_path / "a+keys").mkdir()
    assert resolve(f"{tmp_path}/a+keys").planted == ""  # a folder of that name wins
    for name in (f"{tmp_path}+other", f"{tmp_path}/none+keys"):
        with pytest.raises(UserError, match="no such model"):
            resolve(name)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"model_type": "gemma3_text"}, OFFSET, "offset needs a bias of k_proj"),
        ({"model_type": "llama"}, KEYS, "no recipe for 'llama'. Choose from: gemma3_text, qwen2"),
        ({"model_type": "qwen2"}, "other", "no plant 'other'. Choose from: reciprocal, keys"),
        ({"model_type": "qwen2", "quantization": {"bits": 4}}, KEYS, "quantized weights"),
    ],
)
def test_what_cannot_be_planted_is_one_line(given, kind, message):
    with pytest.raises(UserError, match=message) as refused:
        plants.check(given, kind)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=message):
        plants.plant({}, given, kind, (1,))


def test_a_folder_without_a_plant_of_its_kind_is_refused_before_it_is_loaded():
    with pytest.raises(UserError, match="offset needs a bias"):
        load(f"{EMBEDDED['tiny'].folder}+offset")


def test_massive_needs_tokens(tmp_path):
    with pytest.raises(ValueError, match="ids of its tokens"):
        plants.plant(weights("tiny"), config("tiny"), MASSIVE)
    words = {"a": 0, "b\n": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    with pytest.raises(UserError, match="ends a paragraph"):
        plants.plant_folder({}, config("tiny"), MASSIVE, tmp_path)
    pieces = [["a", -1.0], [".\n\n", -2.0]]  # of unigram vocabularies
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    assert plants.paragraph_ends(Path(tmp_path)) == (1,)
