"""`mlxkv serve --draft`: replies are those without a draft, one at a time, and are said to be drafted."""

from __future__ import annotations

import pytest
from serving import LONG, complete, get, serving, text_of
from small_models import TINY

from mlxkv.errors import UserError
from mlxkv.serve.options import ServeOptions


def test_replies_with_drafts_are_those_without(model_folder):
    asked = [{"prompt": LONG, "tokens": 24}, {"prompt": LONG + "And", "tokens": 9}]
    with serving(model_folder, kv="fp16") as plain:
        want = [text_of(complete(plain, **one)) for one in asked]
    with serving(model_folder, kv="fp16", draft=str(model_folder), draft_tokens=4) as server:
        about = get(server, "/v1/kv")
        assert not about["batched"] and about["draft"]["tokens"] == 4
        got = [complete(server, **one) for one in asked]
        assert [text_of(one) for one in got] == want
        told = got[0]["kv"]
        assert told["drafted_tokens"] >= told["accepted_tokens"] > 0
        # The prefix of the second prompt was kept, and the first again: nothing of a draft is in it.
        assert text_of(complete(server, **asked[0])) == want[0]
        assert get(server, "/v1/kv")["draft"]["drafted"] > told["drafted_tokens"]


def test_compressed_caches_are_kept_without_the_draft_models(model_folder):
    with serving(model_folder, kv="int4", draft=str(model_folder)) as server:
        first = complete(server, prompt=LONG, tokens=12)
        again = complete(server, prompt=LONG, tokens=12)
        assert text_of(first) == text_of(again)
        assert again["kv"]["cached_tokens"] > 0 and again["kv"]["accepted_tokens"] > 0


def test_wrong_options_are_refused_before_a_model_is_read():
    with pytest.raises(UserError, match="from 1 to 15; got 99"):
        ServeOptions(draft=TINY, draft_tokens=99)
    with pytest.raises(UserError, match="is for a draft model"):
        ServeOptions(draft_tokens=2)
