"""The small trained models find facts and predict text with int4 as in full precision."""

from functools import cache
from math import log

import pytest
from small_models import QWEN, TINY, story_tokens

from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence, retrieval
from mlxkv.eval.tasks.part import TaskOptions
from mlxkv.models import load

CONTEXT, QUESTIONS = 1536, 12

pytestmark = pytest.mark.slow


@cache
def single(model: str, kv: str) -> dict:
    arms = Arms(load(model, "fp16"), [kv])
    options = TaskOptions(contexts=(CONTEXT,), questions=QUESTIONS, kinds=("single",), samples=2)
    parts = retrieval.parts(arms, options)
    found = {f"{part.task}-{part.name}": part.run(arms, [kv], lambda _: None) for part in parts}
    return retrieval.pooled(found)[f"retrieval-single-{CONTEXT}"][kv]


def loss(model: str, kv: str) -> float:
    """How much more the loss is than in full precision, nats a token."""
    arms = Arms(load(model, "fp16"), [kv])
    found = divergence.measure(arms, [kv], story_tokens(arms.loaded, 769), 512, lambda _: None)
    decode = found[kv]["legs"]["decode"]
    return log(decode["ppl"] / decode["ppl_base"])


@pytest.mark.parametrize(
    ("model", "kv"),
    (
        (TINY, "int4"),
        (TINY, "hadamard-int4"),
        (QWEN, "srft-int4"),
        (QWEN, "int4"),
    ),
)
def test_facts_are_found_with_int4_as_in_full_precision(model, kv):
    assert single(model, "fp16")["values"] >= 0.93
    assert single(model, kv)["values"] >= single(model, "fp16")["values"] - 0.07


@pytest.mark.parametrize("model", (TINY, QWEN))
def test_int4_raises_perplexity_by_less_than_a_hundredth(model):
    for kv in ("int4", "hadamard-int4"):
        assert loss(model, kv) < 0.01
