"""The life of blocks in vLLM's own manager, without an engine (`make vllm`)."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from cuda_track.vllm import specs
from cuda_track.vllm.blocks import last_page
from cuda_track.vllm.settings import PAGE, RECENT, SINK

NEW, CHUNK, RUNNING = 90, 150, 6


@pytest.fixture(scope="module", autouse=True)
def hashes():
    specs.register()
    init_none_hash(sha256)


class Engine:
    """vLLM's scheduler in little. memory: what blocks hold, by (block, place): a name of the exact token there and of
    all before it, or at "codes" the names of a page."""

    def __init__(self, seed: int, blocks: int, tokens: int, drafts: int = 0):
        record = 4 * tokens * 64  # of a head: as many exact tokens of 64 dims in bfloat16 fit
        of_codes = specs.CodesSpec(
            block_size=PAGE, num_kv_heads=1, head_size=64, dtype=torch.uint8, record=record
        )
        of_exact = specs.ExactSpec(
            block_size=tokens, num_kv_heads=1, head_size=64, dtype=torch.bfloat16,
            sliding_window=RECENT + PAGE, page_size_padded=record,
        )  # fmt: skip
        groups = [KVCacheGroupSpec(["codes"], of_codes), KVCacheGroupSpec(["exact"], of_exact)]
        self.manager = KVCacheManager(
            KVCacheConfig(blocks, [], groups), max_model_len=2000, scheduler_block_size=PAGE,
            hash_block_size=tokens, max_in_flight_tokens=CHUNK + RUNNING * (drafts + 1),
        )  # fmt: skip
        self.draw, self.tokens, self.drafts = random.Random(seed), tokens, drafts
        self.hasher = get_request_block_hasher(tokens, sha256)
        self.waiting, self.running, self.memory = [], [], {}
        self.preempted = self.resumed = self.hits = self.read = 0

    def add(self, name: str, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=NEW)
        self.waiting.append(Request(name, prompt, params, None, block_hasher=self.hasher))

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens, request.spec_token_ids = 0, []
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.preempted += 1

    def step(self) -> None:
        """Plan a batch as vLLM does, then write and read its blocks, then take a token of each request."""
        batch, budget, pressed = [], CHUNK, False
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            rest = request.num_tokens - request.num_computed_tokens
            drafts = self.draw.randint(0, self.drafts) if rest == 1 else 0
            request.spec_token_ids = some(self.draw, drafts)
            count = min(rest + drafts, budget)
            while count and self.manager.allocate_slots(request, count) is None:
                pressed = True
                last = self.running[-1]
                self.preempt(last)
                if last is request:
                    count = 0
            if count:
                batch.append((request, count, request.num_computed_tokens))
                budget -= count
        while self.waiting and budget and len(self.running) < RUNNING and not pressed:
            request = self.waiting[0]
            found, hit, _ = self.manager.get_computed_blocks(request)
            count = min(request.num_tokens - hit, budget)
            if self.manager.allocate_slots(request, count, hit, found) is None:
                break
            self.running.append(self.waiting.pop(0))
            self.hits += hit
            self.resumed += request.num_output_tokens > 0
            batch.append((request, count, hit))
            budget -= count
        for request, count, before in batch:
            self.write(request, before, before + count)
        for request, _, before in batch:
            self.check(request, before)
        for request, count, before in batch:
            drafted = max(0, before + count - request.num_tokens)
            request.num_computed_tokens = before + count - drafted
            if request.num_computed_tokens == request.num_tokens:
                right = self.draw.randint(0, drafted)
                request.num_computed_tokens += right
                new = [*request.spec_token_ids[:right], *some(self.draw, 1)]
                request.append_output_token_ids(new)
            if request.num_output_tokens >= NEW:
                self.end(request)

    def end(self, request: Request) -> None:
        self.manager.free(request)
        (self.running if request in self.running else self.waiting).remove(request)

    def prefixes(self, request: Request, length: int) -> list[int]:
        """Return what names the first tokens, each with those before it, drafts included."""
        out, last = [], 0
        for token in [*request.all_token_ids, *request.spec_token_ids][:length]:
            out.append(last := hash((last, token)))
        return out

    def write(self, request: Request, before: int, after: int) -> None:
        codes, exact = self.manager.get_block_ids(request.request_id)
        names = self.prefixes(request, after)
        for t in range(before, after):
            self.memory[exact[t // self.tokens], t % self.tokens] = names[t]
        for page in range(max(before, SINK) // PAGE, after // PAGE):
            ids = [self.exact(exact, t) for t in range(page * PAGE, page * PAGE + PAGE)]
            self.memory[codes[page], "codes"] = tuple(ids)
            for place in range(self.tokens):  # the same bytes
                self.memory.pop((codes[page], place), None)
        for block in {exact[t // self.tokens] for t in range(before, after)}:
            self.memory.pop((block, "codes"), None)

    def exact(self, table: list[int], token: int):
        return self.memory.get((table[token // self.tokens], token % self.tokens))

    def check(self, request: Request, before: int) -> None:
        """What the step reads of its context was made of this request's tokens."""
        codes, exact = self.manager.get_block_ids(request.request_id)
        last = last_page(before) * PAGE
        right = self.prefixes(request, before)
        for t in [*range(min(SINK, before)), *range(min(last, before), before)]:
            assert self.exact(exact, t) == right[t], (request.request_id, before, t)
        for page in range(SINK // PAGE, last // PAGE):
            wanted = tuple(right[page * PAGE : page * PAGE + PAGE])
            assert self.memory.get((codes[page], "codes")) == wanted, (before, page)
        self.read += before


def some(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1 << 30) for _ in range(count)]


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("tokens", [4, 16])
def test_a_step_reads_what_was_written_for_its_tokens(tokens, drafts):
    """However requests are preempted, resumed, cancelled and cut into chunks."""
    for seed in range(4):
        draw = random.Random(seed)
        engine = Engine(seed, blocks=60 + 190 * 4 // tokens, tokens=tokens, drafts=drafts)
        trunk = some(draw, 600)
        for i in range(24):
            engine.add(str(i), trunk[: draw.randrange(600)] + some(draw, draw.randrange(1, 200)))
        for n in range(1500):
            if not engine.running and not engine.waiting:
                break
            engine.step()
            if n % 40 == 11 and engine.running:
                engine.preempt(draw.choice(engine.running))
            if n % 97 == 31 and engine.running:
                engine.end(draw.choice(engine.running))
        assert not engine.running and not engine.waiting
        assert engine.preempted and engine.resumed and engine.hits and engine.read
        pool = engine.manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1
        assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)


def read_before(tokens: int) -> tuple[Engine, list[int], Request]:
    """An engine that has read a prompt, whose blocks are free and known; and the same prompt, asked again."""
    engine, prompt = Engine(0, blocks=300, tokens=tokens), some(random.Random(1), 600)
    engine.add("first", prompt)
    while engine.waiting or engine.running[0].num_output_tokens < 1:
        engine.step()
    exact = engine.manager.get_block_ids("first")[1]
    engine.end(engine.running[0])
    engine.add("again", prompt)
    return engine, exact, engine.waiting[0]


@pytest.mark.parametrize("tokens", [4, 16])
def test_a_prefix_takes_as_many_free_blocks_as_were_counted(tokens):
    """Else vLLM plans a batch whose blocks it then has not: what is found may be free, and is taken."""
    engine, _, request = read_before(tokens)
    manager, pool = engine.manager, engine.manager.block_pool
    found, hit, _ = manager.get_computed_blocks(request)
    assert hit == 576
    free = pool.get_num_free_blocks()
    counted = manager.coordinator.get_num_blocks_to_allocate(
        request_id="again", num_tokens=600, new_computed_blocks=found.blocks, num_encoder_tokens=0,
        total_computed_tokens=hit, num_local_computed_tokens=hit, num_tokens_main_model=600,
    )  # fmt: skip
    assert manager.allocate_slots(request, 600 - hit, hit, found) is not None
    assert free - pool.get_num_free_blocks() == counted > 576 // PAGE + (SINK + RECENT) // tokens


@pytest.mark.parametrize("tokens", [4, 16])
def test_no_prefix_is_found_without_its_first_tokens(tokens):
    engine, exact, request = read_before(tokens)
    engine.manager.block_pool.evict_blocks({exact[SINK // tokens - 1]})
    assert engine.manager.get_computed_blocks(request)[1] == 0
