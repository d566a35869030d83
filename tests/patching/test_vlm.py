"""mlx-vlm as a host: its own loops over small random vision models, on compressed caches."""

import copy
from importlib import import_module
from types import SimpleNamespace

import pytest

pytest.importorskip("mlx_vlm")

import mlx.core as mx  # noqa: E402
from mlx_vlm.generate.ar import BatchGenerator, generate_step  # noqa: E402
from mlx_vlm.models import cache as vlm_cache  # noqa: E402
from random_models import CONFIGS, with_noise  # noqa: E402

from mlxkv.cache.batch import BatchedKVCache  # noqa: E402
from mlxkv.cache.compressed import CompressedKVCache  # noqa: E402
from mlxkv.errors import UserError  # noqa: E402
from mlxkv.loading.attach import attach, detach  # noqa: E402
from mlxkv.patching.mark import steps_of  # noqa: E402

VISION = ["qwen2_vl", "gemma3", "llava"]
KL = 0.05  # nats, mean

STEP = 64  # tokens of a prompt at once
Prompt = tuple[mx.array, dict]  # token ids [1, T], and what an image processor gives


def vision_model(family: str, seed: int = 0):
    """A small vision model with random float32 weights."""
    file, config = (
        import_module(f"mlx_vlm.models.{family}"),
        copy.deepcopy(CONFIGS["vision"][family]),
    )
    whole = file.ModelConfig.from_dict(config)
    for part in ("text", "vision"):
        made = getattr(file, f"{part.title()}Config").from_dict(
            config.get(f"{part}_config", config)
        )
        setattr(whole, f"{part}_config", made)
    mx.random.seed(seed)
    return with_noise(file.Model(whole))


def prompt_with_image(family: str, length: int, seed: int = 1) -> tuple[mx.array, dict]:
    """Token ids [1, length] with four places for an image in front, and what the image's processor gives."""
    key = mx.random.key(seed)
    text = mx.random.randint(0, 256, (length - 6,), key=key).tolist()
    ids = mx.array([[258, *[260] * 4, 259, *text]])
    pixels = mx.random.normal((16, 3 * 2 * 14 * 14), key=key)
    if family == "qwen2_vl":
        return ids, {"pixel_values": pixels, "image_grid_thw": mx.array([[1, 4, 4]])}
    return ids, {"pixel_values": mx.random.normal((1, 3, 28, 28), key=key)}


class _Never:
    """No token ends a reply."""

    def add_eos_token_ids(self, ids) -> None: ...

    def __call__(self, token: int) -> bool:
        return False


def alone(model, prompt: Prompt, count: int) -> tuple[list[int], mx.array]:
    """Tokens, and their log probabilities [count, vocabulary]."""
    ids, more = prompt
    more = dict(more)
    pixels, options = more.pop("pixel_values", None), {"max_tokens": count, "temperature": 0}
    found = list(
        generate_step(
            ids, model, pixels, mx.ones_like(ids), prefill_step_size=STEP, **options, **more
        )
    )
    return [token for token, _ in found], mx.stack([row.astype(mx.float32) for _, row in found])


def together(model, prompts: list[Prompt], counts: list[int], manager=None) -> list[list[int]]:
    """manager: of mlx-vlm's prefix cache."""
    processor = SimpleNamespace(tokenizer=SimpleNamespace(stopping_criteria=_Never()))
    options = {"prefill_batch_size": 3, "prefill_step_size": STEP, "compute_logprobs": False}
    batch = BatchGenerator(model.language_model, processor, apc_manager=manager, **options)
    ids = [prompt[0][0].tolist() for prompt in prompts]
    uids = batch.insert(ids, counts, prompt_kwargs=[_embedded(model, one) for one in prompts])
    replies = {uid: [] for uid in uids}
    while batch.has_work:
        for response in batch.next()[1]:
            replies[response.uid].append(response.token)
    batch.close()
    return [replies[uid] for uid in uids]


def _embedded(model, prompt: Prompt) -> dict:
    ids, more = prompt
    more = dict(more)
    found = model.get_input_embeddings(
        ids, more.pop("pixel_values", None), mask=mx.ones_like(ids), **more
    )
    given = {name: one for name, one in found.to_dict().items() if one is not None}
    # Else the prefix cache would tell prompts apart by all of their embeddings.
    return given | more | {"_apc_semantic_hash": 7}


def logits(model, prompt, text: list[int]) -> mx.array:
    """Log probabilities [T, vocabulary] at the tokens of `text`, read one by one behind the prompt."""
    ids, more = prompt
    more = dict(more)
    found = model.get_input_embeddings(
        ids, more.pop("pixel_values"), mask=mx.ones_like(ids), **more
    )
    given = {name: one for name, one in found.to_dict().items() if one is not None} | more
    lm, out = model.language_model, []
    caches = lm.make_cache() if hasattr(lm, "make_cache") else vlm_cache.make_prompt_cache(lm)
    now = lm(ids, cache=caches, **given).logits
    for token in text:
        out.append(now[0, -1].astype(mx.float32))
        now = lm(mx.array([[token]]), cache=caches).logits
    rows = mx.stack(out)
    return rows - mx.logsumexp(rows, axis=-1, keepdims=True)


@pytest.mark.parametrize("family", VISION)
def test_an_image_in_the_prompt(family):
    """The text is that of plain caches while nothing is quantized; behind it the divergence is small, and that of
    8 bits far smaller."""
    model, short = vision_model(family), prompt_with_image(family, 60)
    long = prompt_with_image(family, 400)
    text, before = alone(model, short, 20)
    more, _ = alone(model, long, 20)
    assert len(set(more)) > 5  # a text, not one token
    plain = logits(model, long, more)
    reports = attach(model, "int4")
    assert any(report.compressed for report in reports)
    again, ours = alone(model, short, 20)
    assert again == text and mx.allclose(ours, before, atol=1e-5)
    off = {}
    for kv in ("int4", "int8"):
        attach(model, kv)
        quantized = logits(model, long, more)
        off[kv] = (mx.exp(plain) * (plain - quantized)).sum(-1).mean().item()
    assert 0 < off["int4"] < KL and off["int8"] < off["int4"] / 10
    detach(model)
    assert alone(model, short, 20)[0] == text


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_each_of_a_batch_gets_what_it_gets_alone(family):
    """Prompts of unequal lengths are padded on the left, read in chunks; replies end at different times. (With
    gemma3 mlx-vlm itself cannot: its masks are of unequal sizes.)"""
    model = vision_model(family)
    prompts = [prompt_with_image(family, n, seed=n) for n in (150, 40, 290, 7)]
    counts = [12, 30, 5, 20]
    attach(model, "int4")
    expected = [alone(model, *each)[0] for each in zip(prompts, counts, strict=True)]
    assert together(model, prompts, counts) == expected


def test_its_prefix_cache_keeps_codes():
    from mlx_vlm.apc import APCManager

    model, manager = vision_model("llava"), APCManager()
    attach(model, "int4")
    first, other = (
        prompt_with_image("llava", n, seed=n)[0][:, 6:]  # text alone
        for n in (306, 106)
    )
    (reply,) = together(model, [(first, {})], [5], manager)
    longer = mx.concatenate([first, mx.array([reply]), other[:, :40]], axis=1)
    stored = [one for entry in manager._exact_cache.values() for one in entry.prompt_cache]
    assert stored and all(type(one) is CompressedKVCache for one in stored)
    assert max(one.offset for one in stored) > 250
    for one in stored:  # most is in the window, in full precision
        assert one.offset < 250 or one.nbytes < 0.9 * (one.offset * 2 * 64 * 4)
    replies = together(model, [(longer, {}), (other, {})], [6, 6], manager)
    assert manager.stats.exact_hits == 1 and manager.stats.matched_tokens > 250
    assert replies == [alone(model, (ids, {}), 6)[0] for ids in (longer, other)]


@pytest.mark.parametrize(("kv", "shared"), [("int8", 180), ("int4", 90)])
def test_a_second_turn_goes_back_as_far_as_it_likes(kv, shared):
    """As `prompt_cache_state` does: how much its rule drops, and then `trim` of each cache."""
    from mlx_vlm.generate.common import PromptCacheState
    from mlx_vlm.generate.dispatch import _prefix_cache_trim_amount

    model = vision_model("llava")
    lm, ids = model.language_model, prompt_with_image("llava", 306, seed=1)[0][:, 6:]
    attach(model, kv)
    caches, fresh = (vlm_cache.make_prompt_cache(lm) for _ in "ab")
    lm(ids, cache=caches)
    state = PromptCacheState()
    state.update(ids[0].tolist(), caches)
    again = mx.concatenate([ids[:, :shared], 1 + ids[:, shared:]], axis=1)
    assert state.find_prefix_length(again[0].tolist()) == shared
    dropped = _prefix_cache_trim_amount(state.cache, shared)
    assert dropped == 300 - shared
    assert all(one.trim(dropped) == dropped for one in state.cache)
    lm(again[:, :shared], cache=fresh)
    ours, right = (lm(again[:, shared:], cache=one).logits for one in (caches, fresh))
    assert mx.abs(ours - right).max() < 0.1 * mx.abs(right).max()


def test_its_decode_steps_are_replayed(monkeypatch):
    monkeypatch.setenv("MLXKV_COMPILE", "1")
    model, prompt = vision_model("llava"), prompt_with_image("llava", 250)
    monkeypatch.delenv("MLXKV_COMPILE")
    attach(model, "int4")
    expected = alone(model, prompt, 12)[0]
    monkeypatch.setenv("MLXKV_COMPILE", "1")
    attach(model, "int4")
    assert alone(model, prompt, 12)[0] == expected
    assert steps_of(model.language_model).replayed >= 11


def test_a_vision_model_is_attached_at_its_language_model():
    model = vision_model("llava")
    attach(model, "int4")
    assert "make_cache" in vars(model.language_model) and "make_cache" not in vars(model)
    made = vlm_cache.make_prompt_cache(model.language_model)
    assert {type(one) for one in made} == {CompressedKVCache}
    other = copy.deepcopy(model)
    detach(model)
    made = vlm_cache.make_prompt_cache(model.language_model)
    assert {type(one) for one in made} == {vlm_cache.KVCache}
    assert type(other.language_model.make_cache()[0]) is CompressedKVCache
    with pytest.raises(UserError, match="takes a model of mlx-lm.* mlx_vlm.load"):
        attach(model.vision_tower, "int4")


def test_layers_in_full_precision_keep_its_own_caches():
    """Its batches take no caches of another library."""
    from mlx_vlm.generate.ar import _make_cache

    model = vision_model("gemma3")
    attach(model, "int4")
    batch = _make_cache(model.language_model, [0, 3])
    assert [type(one) for one in batch[:2]] == [vlm_cache.BatchRotatingKVCache, BatchedKVCache]
    with pytest.raises(NotImplementedError, match="CompressedKVCache"):
        _make_cache(model.language_model, [0, 3], kv_bits=4)
