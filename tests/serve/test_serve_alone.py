"""Requests that mlx-lm serves alone: those with a seed join batches here, others stop in time."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler
from serving import ENDLESS, LONG, asking, complete, held, refused, serving, settled, text_of, until

from mlxkv.serve.apis.openai import CompletionReply
from mlxkv.serve.request import Job, Request
from mlxkv.serve.sampling import Seeded

SHARES = (0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01)
ROW = mx.log(mx.array([SHARES]))


def seeded(seed: int, temperature: float = 1.0, **settings) -> Seeded:
    return Seeded(
        Request(chat=False, max_tokens=1, temperature=temperature, seed=seed, **settings), []
    )


@pytest.mark.parametrize(
    "how",
    [{}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}]
    + [{"xtc_probability": 0.5, "xtc_threshold": 0.05}, {"top_p": 0.9, "top_k": 4, "min_p": 0.1}],
)
def test_a_seed_draws_what_mlx_lms_own_server_draws(how):
    mx.random.seed(11)
    theirs = make_sampler(0.8, **how)
    want = [theirs(ROW).item() for _ in range(60)]
    one, other = (seeded(seed, 0.8, **how) for seed in (11, 12))
    got = []
    for _ in range(60):
        got.append(one(ROW).item())
        other(ROW), mx.random.uniform()  # other draws in between do not matter
    assert got == want and len(set(want)) > 1


def test_a_seed_says_the_same_alone_and_among_others(model_folder):
    """Also while an endless reply is written: mlx-lm would wait for its end."""
    with serving(model_folder) as server:
        asked = [("abc", 7), ("abc", 8), (LONG, 7), ("other", 0)]

        def drawn(ask) -> str:
            return text_of(complete(server, ask[0], 16, temperature=1.5, seed=ask[1]))

        alone = [drawn(ask) for ask in asked]
        assert len(set(alone)) == len(asked) and [drawn(ask) for ask in asked] == alone
        endless = ENDLESS | {"stream": True, "max_tokens": 1900}
        with ThreadPoolExecutor(5) as pool, asking(server, **endless):
            until(lambda: server.engine.jobs)
            (uid,) = server.engine.jobs
            other = pool.submit(complete, server, "no seed", 16, temperature=1.5)
            assert list(pool.map(drawn, asked)) == alone
            assert uid in server.engine.jobs  # it is still being written
            other.result()
        settled(server)


@pytest.fixture(scope="module")
def one_by_one(model_folder):
    """A server that does not batch, as for models whose caches cannot be merged."""
    with serving(model_folder, chunk=16) as server:
        server.engine.is_batchable = False
        yield server


def test_a_reply_that_is_served_alone_tells_the_size_of_its_caches(
    one_by_one, model_folder, monkeypatch
):
    """As in a batch, also where they are put away before the client's thread writes the size."""
    server, plain = one_by_one, CompletionReply.close

    def late(self, *args):
        until(lambda: server.engine.sessions.entries)
        return plain(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(CompletionReply, "close", late)
        alone = complete(server, LONG, 9)
    with serving(model_folder) as batches:
        assert complete(batches, LONG, 9)["kv"] == alone["kv"]


def test_who_leaves_while_the_prompt_is_read_alone_gets_no_more_of_it(one_by_one, monkeypatch):
    server = one_by_one
    with held(monkeypatch, Job, "put", kind=tuple):  # between the parts of a prompt
        with asking(server, prompt="a" * 100, max_tokens=4):
            until(lambda: server.engine.sessions.counts["lookups"])
        until(lambda: server.loaded_model.metrics.counts["cut_off"] == 1)
    tokens = server.engine.tokenizer.encode("a" * 100)
    settled(server)
    assert all(one.tokens != tokens for one in server.engine.sessions.entries)  # read to its end
    assert text_of(complete(server, "b", 4, seed=1, temperature=1))


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_count_what_a_cache_held(one_by_one, name):
    """A reply does not depend on how much of its prompt was read anew."""
    settings = {name: 1.9, f"{name.split('_')[0]}_context_size": 400}
    fresh = complete(one_by_one, LONG, 24, cache_salt=name, **settings)
    again = complete(one_by_one, LONG, 24, cache_salt=name, **settings)
    assert fresh["kv"]["cached_tokens"] == 0 < again["kv"]["cached_tokens"]
    assert text_of(fresh) == text_of(again)


def test_the_end_does_not_wait_for_a_reply_that_is_written_alone(one_by_one):
    """The client reads an error, not half of a reply."""
    server = one_by_one
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(refused, server, 503, **ENDLESS)
        until(lambda: server.engine.sessions.counts["lookups"])
        server.engine.stop_and_join()
        assert reply.result(60)["message"] == "[serve] is ending"
