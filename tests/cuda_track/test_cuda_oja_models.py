"""The trained model TINY with balanced maps, low rank and token selection: transformers beside MLX."""

from importlib.metadata import version

import mlx.core as mx
import numpy as np
import pytest
import torch
from methods import config_named
from small_models import TINY
from tensors import to_torch

import mlxkv
from cuda_track.models import attach_model, prompt_cache
from cuda_track.models.layers import CompressedLayer
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import handed
from mlxkv.catalog.reports import summarise
from mlxkv.corpora import corpus
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.generate import generation as mlx_generate
from mlxkv.generate import prompt_cache as mlx_prompt_cache

torch.set_num_threads(1)
DECODED = 36  # an update of a basis by what was decoded is among them


@pytest.fixture(scope="module")
def sides():
    return load(TINY, "fp16", "float32"), mlxkv.load(TINY, "fp16", dtype="float32")


@pytest.fixture(scope="module")
def tokens(sides):
    text = "\n\n".join(corpus.interleaved("evaluation"))[:2000]
    return sides[0].tokenizer(text)["input_ids"][:330]


@torch.no_grad()
def ours_reads(loaded, cache, tokens: list[int]) -> np.ndarray:
    return loaded.model(torch.tensor([tokens]), **handed(cache)).logits[0, -1].numpy()


def theirs_reads(loaded, cache, tokens: list[int]) -> np.ndarray:
    return np.array(loaded.model(mx.array([tokens]), cache=cache)[0, -1])


def text(reads, loaded, cache, tokens: list[int]) -> list[int]:
    """Greedy, behind a prompt that is read at once."""
    out, logits = [], reads(loaded, cache, tokens)
    while len(out) < DECODED:
        out.append(int(logits.argmax()))
        logits = reads(loaded, cache, out[-1:])
    return out


@pytest.mark.parametrize("kv", ("balanced-int3", "oja-0.75+int4", "int4+keep0.5"))
def test_the_same_text_codes_and_files(kv, sides, tokens, tmp_path):
    ours, theirs = sides
    assert sum(report.compressed for report in attach_model.attach(ours.model, kv)) == 4
    mlxkv.attach(theirs.model, kv)
    cache, other = attach_model.new_cache(ours.model), mlx_generate.new_cache(theirs)
    assert text(ours_reads, ours, cache, tokens) == text(theirs_reads, theirs, other, tokens)
    total = differ = 0
    for layer, right in zip(cache.layers, other, strict=True):
        if not isinstance(layer, CompressedLayer):
            continue
        assert getattr(layer.cache, "dropped", 0) == getattr(right, "dropped", 0)
        mine, right = leaves(layer.cache.state["pages"]), leaves(to_torch(right.state["pages"]))
        assert set(mine) == set(right)
        for name in (n for n in mine if n.endswith("codes")):
            pair = (x[name].contiguous().view(torch.uint8) for x in (mine, right))
            same = torch.eq(*pair)  # bytes
            total, differ = total + same.numel(), differ + int((~same).sum())
    assert differ <= 1e-3 * total
    assert total > 20_000
    if version("mlx-lm") >= "0.32":
        crosses(kv, sides, tokens, (cache, other), tmp_path)


def leaves(tree: dict, name: str = "") -> dict:
    out = {}
    for key, x in tree.items():
        out |= leaves(x, f"{name}{key}.") if isinstance(x, dict) else {name + key: x}
    return out


def crosses(kv, sides, tokens, caches, tmp_path):
    """Prompt caches of each side go on alike on the other."""
    (ours, theirs), (cache, other) = sides, caches
    ours.kv_name, theirs.kv_name, theirs.kv = kv, kv, parse_kv(kv)
    path, tokens = tmp_path / "torch.safetensors", [*tokens, *[1] * DECODED]  # as many as are held
    prompt_cache.save(path, prompt_cache.Saved(cache, tokens), ours)
    back = mlx_prompt_cache.load(str(path), theirs).cache
    mine = prompt_cache.load(path, ours).cache
    saved = mlx_prompt_cache.Saved(other, tokens, [], "")
    read = prompt_cache.load(mlx_prompt_cache.save(str(tmp_path / "mlx"), saved, theirs), ours)
    right = ours_reads(ours, cache, [5])
    assert np.abs(ours_reads(ours, mine, [5]) - right).max() < 1e-4
    assert np.abs(theirs_reads(theirs, back, [5]) - right).max() < 5e-3
    assert np.abs(ours_reads(ours, read.cache, [5]) - theirs_reads(theirs, other, [5])).max() < 5e-3


def test_selection_and_padding_do_not_go_together(sides, tokens):
    ours, _ = sides
    attach_model.attach(ours.model, "int4+keep0.5")
    ids = torch.tensor([[0] * 10 + tokens[:290], tokens[:300]])
    mask = (ids != 0).long()
    with pytest.raises(UserError, match="prompts without padding"):
        ours.model.generate(ids, attention_mask=mask, max_new_tokens=2)
    # Rows of one length do, and beams, whose rows change places.
    out = ours.model.generate(ids[1:], max_new_tokens=4, num_beams=2, do_sample=False)
    assert out.shape[1] <= 304


def test_ranks_by_energy_are_those_of_the_calibration(sides):
    reports = attach_model.attach(sides[0].model, config_named("oja-e0.95+int4"))
    right = mlxkv.attach(sides[1].model, config_named("oja-e0.95+int4"))
    found = [
        [(r.bits_per_value, r.bases) for r in side if r.compressed] for side in (reports, right)
    ]
    assert found[0] == found[1] and len(set(found[0])) > 1
    assert "on top bases of" in summarise(reports)[1]
