"""Peak memory really falls, prefill included (DESIGN promise 1): a model whose cache dominates."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.loading.attach import attach, detach

TOKENS = 6144


@pytest.fixture(scope="module")
def model():
    args = qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
        rms_norm_eps=1e-6,
        vocab_size=256,
        num_key_value_heads=2,
    )
    mx.random.seed(0)
    model = qwen2.Model(args)
    mx.eval(model.parameters())
    return model


def prefill(model, **options) -> tuple[int, int]:
    """(peak bytes above the weights, bytes of the caches) of a prompt of TOKENS tokens."""
    cache = make_prompt_cache(model)
    prompt = mx.random.randint(0, 256, (TOKENS,))
    mx.eval(prompt)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in generate_step(prompt, model, max_tokens=2, prompt_cache=cache, **options):
        pass
    return mx.get_peak_memory() - before, sum(c.nbytes for c in cache)


@pytest.mark.slow
def test_prefill_peaks_below_both_caches_of_mlx_lm(model):
    full, full_bytes = prefill(model)
    theirs, _ = prefill(model, kv_bits=4, kv_group_size=64, quantized_kv_start=0)
    attach(model, "int4")
    ours, our_bytes = prefill(model)
    detach(model)
    print(f"\npeak above the weights: full {full:,}, mlx-lm 4 bit {theirs:,}, int4 {ours:,} bytes")
    said = rf"read {TOKENS} tokens, .* fp16 (\d+) MB\) \| (\d+) MB \| \*\*(\d+) MB"
    shown = re.search(said, (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"))
    assert [*map(int, shown.groups())] == pytest.approx(
        [x / 1e6 for x in (full, theirs, ours)], 0.1
    )
    assert our_bytes < 0.18 * full_bytes  # float32 here: 4.5 bits of 32, and the windows
    assert ours < full
    assert ours <= 0.5 * theirs
