"""Latents (MLA) on torch: the cache, its attention, and whole models."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from cuda_track.cache.latent import Heads, LatentKVCache, attend
from cuda_track.models import attach_model, latent, transformers_compat
from experiments.families.building import NOT_BUILT, build, families
from experiments.families.found import EXACT
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.spec import affine as spec

torch.set_num_threads(1)
H, D, V, R, N = 5, 24, 20, 64, 16


def rms(x, y) -> float:
    x, y = (np.asarray(z, np.float64) for z in (x, y))
    return float(np.sqrt(((x - y) ** 2).mean() / (y**2).mean()))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(h=H, d=D, v=V, r=R) -> Heads:
    keys, values = random(h, d, r, seed=1) / r**0.5, random(h, v, r, seed=2) / r**0.5

    def expand(latents, rotary):
        plain = torch.einsum("bgtr,hdr->bhtd", latents, keys.to(latents.dtype))
        rotary_queries = rotary.expand(-1, h, -1, -1)
        seen = torch.einsum("bgtr,hvr->bhtv", latents, values.to(latents.dtype))
        return torch.cat([plain, rotary_queries], -1), seen

    return Heads(keys, values, expand)


def filled(config, tokens, batch=1, r=R, n=N, dtype=torch.float32, seed=3):
    cache = LatentKVCache(config.of_latents)
    given = (
        random(batch, 1, tokens, r, seed=seed, dtype=dtype),
        random(batch, 1, tokens, n, seed=seed + 1, dtype=dtype),
    )
    cache.update_and_fetch(*given)
    return cache, given


SMALL = {"sink": 4, "recent": 16, "page": 32}


def config_of(code: Affine, transform: str = "none", **more) -> CacheConfig:
    return CacheConfig(Side(code, transform), Side(code), **(SMALL | more))


def expected(view, of: Heads, queries, scale, mask=None):
    """The spec over what is stored: expanded keys and values in float64."""
    latents, rotary = (x.double().numpy() for x in view.whole(torch.float32))
    d = of.keys.shape[1]
    q, q_pe = (x.double().numpy() for x in (queries[..., :d], queries[..., d:]))
    bias = spec.rotary_scores(q_pe, rotary, scale)
    if mask is not None:
        bias = np.where(mask, bias, -1e30)
    return spec.absorbed(
        q, latents, of.keys.double().numpy(), of.values.double().numpy(), scale, bias
    )


CODES = [
    (Affine(4, 16, axis="channel"), "none"),
    (Affine(4, 32, True), "srft"),
    (Affine(3, 64), "hadamard"),
]


def test_attention_is_the_spec_s_over_what_is_stored(subtests):
    for i, (code, transform) in enumerate(CODES):
        rotary = (16, 8)[i % 2]
        with subtests.test(rotary=rotary, code=code, transform=transform):
            config = replace(config_of(code, transform), rotary=rotary)
            cache, _ = filled(config, 90, batch=2)
            of, scale = heads(), (D + N) ** -0.5
            view = replace(cache.view(), heads=of)
            for new in (1, 3):
                q = random(2, H, new, D + N, seed=9)
                mask = "causal" if new > 1 else None
                right = expected(
                    view, of, q, scale, spec.causal_mask(new, view.tokens) if new > 1 else None
                )
                assert rms(attend(q, view, scale, mask), right) < 1e-5
            many = random(2, H, 20, D + N, seed=10)
            right = expected(view, of, many, scale, spec.causal_mask(20, view.tokens))
            assert rms(attend(many, view, scale, "causal"), right) < 1e-5


# -- the cache


def test_a_state_goes_on_and_trims(subtests):
    for rotary in (16, 8):
        with subtests.test(rotary=rotary):
            config = replace(config_of(Affine(4, 32)), rotary=rotary)
            cache, _ = filled(config, 90)
            other = LatentKVCache.from_state(cache.state)
            more = random(1, 1, 40, R, seed=20), random(1, 1, 40, N, seed=21)
            for one in (cache, other):
                one.update_and_fetch(*more)
            for a, b in zip(
                cache.view().whole(torch.float32), other.view().whole(torch.float32), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            held, copied = cache.view().whole(torch.float32), copy.deepcopy(cache)
            assert copied.trim(5) == 5 and copied.offset == 125 and cache.offset == 130
            for a, b in zip(held, copied.view().whole(torch.float32), strict=True):
                torch.testing.assert_close(a[:, :, :125], b, rtol=0, atol=0)


# -- models of transformers

FAMILIES = ("deepseek_v3", "longcat_flash", "kimi_linear")
PROMPT, NEW = 45, 20


def written(model, ids=None, **more):
    ids = IDS if ids is None else ids
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, **({"attention_mask": torch.ones_like(ids)} | options | more))


IDS = torch.randint(3, 100, (1, PROMPT), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_lossless_pages_give_the_plain_logits(family):
    if reason := NOT_BUILT.get(family):
        pytest.skip(f"{family}: {reason}")
    if family not in families():
        pytest.skip(f"{family}: this version of transformers has none")
    model = build(family)
    right = written(model)
    reports = attach_model.attach(model, EXACT)
    ours = [r for r in reports if r.compressed]
    assert ours and {r.kind for r in ours} == {"latent attention"}
    assert {r.kv_heads for r in ours} == {1}
    got = written(model)
    for a, b in zip(right.logits, got.logits, strict=True):
        assert (a - b).norm() < 1e-4 * a.norm()
    with torch.no_grad():  # and without any cache
        assert model(IDS, use_cache=False).logits.isfinite().all()
    attach_model.detach(model)
    assert all(latent.EXPAND not in vars(m) for m in latent.modules_of(model))
    assert torch.equal(written(model).sequences, right.sequences)


def test_batches_beams_drafts_and_copies():
    model = build("deepseek_v3")
    two, mask = IDS.repeat(2, 1), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :7] = 0  # padded on the left
    padded = {"ids": two, "attention_mask": mask}
    right = [written(model, **padded), written(model, num_beams=3)]
    attach_model.attach(model, EXACT)
    got = [written(model, **padded), written(model, num_beams=3)]
    for a, b in zip(right, got, strict=True):
        assert torch.equal(a.sequences, b.sequences)
    one = written(model).sequences
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        modules = latent.modules_of(other)
        assert all(vars(m)[latent.EXPAND].module is m for m in modules)
        assert torch.equal(written(other).sequences, one)
        attach_model.detach(other)
    cache = attach_model.new_cache(model)
    with torch.no_grad():
        whole = model(IDS, **transformers_compat.handed(cache)).logits
        cache.crop(-5)
        again = model(IDS[:, -5:], **transformers_compat.handed(cache)).logits
        weights = model(
            IDS[:, :1], output_attentions=True, **transformers_compat.handed(cache)
        ).attentions
    torch.testing.assert_close(again, whole[:, -5:], rtol=0, atol=1e-4)
    assert weights is None or weights[0].shape[-1] == PROMPT + 1


def test_what_cannot_be_done_is_said_in_one_line():
    model = build("deepseek_v3")
    for kv, line in (("int4+keep0.5", "are not selected"),):
        with pytest.warns(UserWarning, match="NOTHING IS COMPRESSED"):
            reports = attach_model.attach(model, kv)
        assert all(line in r.reason for r in reports)
    made = model.model.layers[0].self_attn
    made.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(made.kv_b_proj.out_features))
    with pytest.warns(UserWarning, match="NOTHING IS COMPRESSED|cannot be absorbed"):
        reports = attach_model.attach(model, "int4")
    assert any("cannot be absorbed" in r.reason for r in reports)
    attach_model.detach(model)
    assert all(latent.EXPAND not in vars(m) for m in latent.modules_of(model))
