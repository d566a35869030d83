"""The layer over mlx-lm's loop: what is counted, when it stops, what it refuses."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from random_models import write_model

from mlxkv.errors import UserError
from mlxkv.generate.generation import Stats, stream

PROMPT = list(range(40, 90))


def offsets(cache) -> set[int]:
    return {layer.offset for layer in cache}


def test_counts_are_those_of_the_cache(loaded):
    cache, stats = make_prompt_cache(loaded.model), Stats()
    tokens = [piece.token for piece in stream(loaded, PROMPT, cache, max_tokens=7, stats=stats)]
    assert len(tokens) == stats.generated_tokens == 7
    assert stats.prompt_tokens == stats.read_tokens == 50
    assert stats.finish_reason == "length"
    assert offsets(cache) == {57} == {stats.held}
    assert stats.prefill_seconds > 0 and stats.tokens_per_second > 0


def test_the_first_token_belongs_to_the_prefill():
    assert Stats(generated_tokens=11, decode_seconds=2.0).tokens_per_second == 5.0
    assert Stats(generated_tokens=1, decode_seconds=2.0).tokens_per_second == 0.0


def test_the_same_tokens_as_mlx_lm(loaded):
    from mlx_lm.generate import generate_step

    ours = [p.token for p in stream(loaded, PROMPT, make_prompt_cache(loaded.model), max_tokens=12)]
    steps = generate_step(mx.array(PROMPT), loaded.model, max_tokens=12)
    assert ours == [int(token) for token, _ in steps]


def test_stop_between_tokens_leaves_the_cache_in_order(loaded):
    cache, stats, seen = make_prompt_cache(loaded.model), Stats(), []
    for piece in stream(
        loaded, PROMPT, cache, max_tokens=50, stop=lambda: len(seen) >= 3, stats=stats
    ):
        seen.append(piece)
    assert stats.finish_reason == "stopped"
    assert offsets(cache) == {len(PROMPT) + stats.generated_tokens} == {stats.held}


def test_stop_during_the_prefill(loaded, monkeypatch):
    monkeypatch.setattr("mlxkv.generate.generation.prefill_step", lambda: 16)
    cache, stats, done = make_prompt_cache(loaded.model), Stats(), []
    pieces = stream(
        loaded,
        PROMPT,
        cache,
        progress=lambda now, total: done.append(now),
        stop=lambda: done[-1] >= 32,
        stats=stats,
    )
    assert list(pieces) == []
    assert (stats.finish_reason, stats.generated_tokens) == ("stopped", 0)
    assert offsets(cache) == {32} == {stats.held}


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_nan_in_the_logits_is_one_line(tmp_path, temp):
    from mlxkv.loading.load import load

    broken = load(str(write_model(tmp_path / "nan", poison=True)), "fp16")
    cache = make_prompt_cache(broken.model)
    with pytest.raises(
        UserError, match=r"^\[load\] the weights hold NaN or infinity in model\..*; got /"
    ):
        list(stream(broken, PROMPT, cache, make_sampler(temp), max_tokens=5))


def test_what_is_refused(loaded):
    cache = make_prompt_cache(loaded.model)
    with pytest.raises(UserError, match="empty prompt"):
        next(stream(loaded, [], cache))
    with pytest.raises(UserError, match="at least 1; got 0"):
        next(stream(loaded, PROMPT, cache, max_tokens=0))
