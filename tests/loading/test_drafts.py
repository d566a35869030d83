"""mlx-lm's speculative decoding on compressed caches: what is refused leaves no trace, and replies are those
without a draft."""

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from small_models import TINY, story_tokens

from mlxkv.loading.load import load


class Poor:
    """A draft model that is wrong in every fourth step."""

    def __init__(self, model):
        self.model, self.layers, self.calls = model, model.layers, 0

    def __call__(self, tokens, cache=None):
        self.calls += 1
        logits = self.model(tokens, cache=cache)
        return logits if self.calls % 4 else mx.roll(logits, 1, axis=-1)


def test_replies_of_mlx_lm_are_those_without_a_draft():
    """Behind pages that were quantized, with the caches of both models compressed."""
    loaded = load(TINY, "int4")
    text, draft = story_tokens(loaded, 260), Poor(loaded.model)

    def said(caches: list, **more) -> list:
        asked = {"max_tokens": 24, "prompt_cache": caches} | more
        return list(stream_generate(loaded.model, loaded.tokenizer, text, **asked))

    plain, ours = make_prompt_cache(loaded.model), make_prompt_cache(loaded.model)
    caches = [*ours, *make_prompt_cache(draft)]
    alone, drafted = said(plain), said(caches, draft_model=draft, num_draft_tokens=3)
    assert [one.token for one in drafted] == [one.token for one in alone]
    assert ours[1]._count_pages == plain[1]._count_pages > 0
    assert 0 < sum(one.from_draft for one in drafted) < len(drafted)
