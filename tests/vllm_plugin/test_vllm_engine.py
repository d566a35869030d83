"""Whole engines of vLLM on a CPU (`make vllm`): what a small Llama says with our blocks under a hard life, against
vLLM's own cache.

Codes are replaced by the exact tokens that they stand for, so that a lost, stale or foreign block shows, and the loss
of quantizing does not.
"""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("vllm")

from cuda_track.vllm.blocks import Blocks
from cuda_track.vllm.settings import PAGE, SINK

NEW = 24
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
CASES = {
    "chunks": {"max_num_batched_tokens": 100},
    "one at a time": {"max_num_seqs": 1},
    "few blocks": {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 110},
    "drafts": {"speculative_config": DRAFTS},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, initializer_range=0.15,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def exact_codes(monkeypatch):
    """Keep the exact tokens of each block that is written, and read these."""
    write = Blocks.write

    def kept(self, key, value, codes, near):
        write(self, key, value, codes, near)
        self.kept = getattr(self, "kept", {})
        starts = codes.starts.tolist()
        for row, length in enumerate(codes.lengths.tolist()):
            before = length - (starts[row + 1] - starts[row])
            for page in range(max(before, SINK) // PAGE, length // PAGE):
                tokens = torch.arange(page * PAGE, page * PAGE + PAGE)
                self.kept[int(codes.table[row, page])] = self._exact(near.table[row], tokens)

    def read(self, pages, side, dims, dtype):
        blocks = [self.kept[block] for block in pages.table[0].tolist()]
        return torch.cat(blocks, 1).chunk(2, -1)[side]

    monkeypatch.setattr(Blocks, "write", kept)
    monkeypatch.setattr(Blocks, "_decoded", read)


@pytest.fixture
def start(model, monkeypatch):
    """A function that starts an engine in this process."""
    from vllm import LLM

    from cuda_track.vllm import register

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    running = []

    def stop():  # now: vLLM 0.33 does it when an engine is collected, to the one after it too
        while running:
            running.pop().engine_core.shutdown()

    def started(**options):
        stop()
        defaults = {"max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 1000}
        engine = LLM(
            model, enforce_eager=True, dtype="float32", skip_tokenizer_init=True, **(defaults | options)
        ).llm_engine  # fmt: skip
        running.append(engine)
        return engine

    yield started
    stop()


def said(engine, prompts, cancelled=()):
    """Return (tokens of each prompt, prompts that found a prefix). cancelled: (step, prompt)."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    names = [str(i) for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    out, hits, step = {}, set(), 0
    while engine.has_unfinished_requests():
        for done in engine.step():
            if done.finished:
                out[int(done.request_id)] = list(done.outputs[0].token_ids)
                hits |= {int(done.request_id)} if done.num_cached_tokens else set()
        step += 1
        engine.abort_request([names[i] for at, i in cancelled if at == step])
    return {i: x for i, x in out.items() if len(x) == NEW}, hits


def prompts():
    draw = random.Random(0)

    def some(n):
        return [draw.randrange(5, 500) for _ in range(n)]

    trunk = some(700)
    shared = [trunk[:n] + some(60) for n in (700, 1, 64, 65, 100, 130, 500)]
    return [trunk, *shared, *(some(n) for n in (37, 64, 128, 515, 130))]


@pytest.fixture
def wanted(start):
    return said(start(), prompts())[0]


@pytest.mark.slow
def test_same_text_as_vllms_own_cache(start, wanted, exact_codes, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, own = [], Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda *a, **k: (preempted.append(1), own(*a, **k))
    )
    for name, options in CASES.items():
        preempted.clear()
        engine = start(
            attention_backend="CUSTOM", additional_config={"mlxkv": "int4"}, enable_prefix_caching=True, **options
        )  # fmt: skip
        hits = set()
        for cancelled in ((), [(2, 1), (5, 4), (9, 0)]):
            got, found = said(engine, prompts(), cancelled)
            hits |= found
            assert got == {i: wanted[i] for i in got}, name
            assert len(got) >= len(wanted) - len(cancelled), name
        assert hits, name
        assert preempted or name != "few blocks"
        pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        assert len(free) == pool.get_num_free_blocks() == len(pool.blocks) - 1, name
        assert not any(block.ref_cnt for block in pool.blocks if not block.is_null), name
