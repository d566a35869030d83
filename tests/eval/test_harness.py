"""What lm-eval's scores read: prompts that are stored compressed before the answer is scored."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.eval import feed
from mlxkv.eval.report import report
from mlxkv.eval.tasks import harness
from mlxkv.formats.presets import PRESETS
from mlxkv.models import attach, detach, load
from mlxkv.models.generate import new_cache

TOKENS = np.random.default_rng(0).integers(5, 60, 300).tolist()


@pytest.fixture(scope="module")
def loaded(model_folder):
    return load(str(model_folder), "fp16")


@pytest.fixture
def arm(loaded):
    """A preset whose errors show, attached without windows."""
    attach(loaded.model, replace(PRESETS["naive-int2"], sink=0, recent=0))
    yield loaded
    detach(loaded.model)


def test_the_last_token_reads_the_prompt_as_it_is_stored(loaded, arm):
    """Even of a prompt shorter than a chunk: mlx-lm's adapter reads it at once, exactly, and tests nothing."""
    last, cache = harness.read_prompt(arm, TOKENS, 512)
    read = harness.Read()
    read.add(cache)
    assert (read.tokens, read.stored) == (300, 256)  # pages of 64 tokens: up to a page waits
    at_once = new_cache(arm)
    whole = arm.model(mx.array(TOKENS)[None], cache=at_once)[0, -1].astype(mx.float32)
    whole = whole - mx.logsumexp(whole)
    detach(arm.model)
    exact = feed.log_probabilities(arm, feed.prefill(arm, TOKENS[:-1]), TOKENS[-1:])[0]
    assert mx.abs(whole - exact).max().item() < 1e-3  # as full precision: nothing was tested
    assert last.shape == (1, exact.size)
    assert mx.abs(last[0] - exact).max().item() > 1e-2


def test_full_precision_reads_the_same_whatever_the_chunk(loaded):
    one, other = (harness.read_prompt(loaded, TOKENS, chunk) for chunk in (512, 32))
    assert mx.abs(one[0] - other[0]).max().item() < 1e-3
    read = harness.Read()
    read.add(one[1])
    assert read.share == 0.0


def test_the_report_says_how_much_was_compressed():
    rows = {"fp16": {"lm_eval_stored": {"piqa": 0.0}}, "int4": {"lm_eval_stored": {"piqa": 0.25}}}
    (line,) = report._read_stored({"rows": {"2048": rows}})
    assert line.startswith("piqa: 25 %") and "--windows 0,0" in line
    rows["int4"]["lm_eval_stored"]["piqa"] = 0.9
    (line,) = report._read_stored({"rows": {"2048": rows}})
    assert line.startswith("piqa: 90 %") and "--windows" not in line


LONG = "The following are multiple choice questions. " * 20


def test_scores_of_a_task_come_from_codes(loaded, arm):
    """Through the harness's own requests: with --chunk they differ from full precision, as with 0 they do not."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    requests = [SimpleNamespace(args=(LONG, end)) for end in ("b", "c")]  # a token each
    scores = {}
    for chunk in (512, 0):
        model = harness.adapter(arm, chunk)
        scores[chunk] = [score for score, _ in model.loglikelihood(requests)]
        assert (model.read.share > 0.5) == (chunk > 0)
    detach(arm.model)
    exact = [score for score, _ in harness.adapter(arm, 512).loglikelihood(requests)]
    off = {chunk: np.abs(np.array(found) - exact).max() for chunk, found in scores.items()}
    assert off[0] < 1e-3 < 1e-2 < off[512]
