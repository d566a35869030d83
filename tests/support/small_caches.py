"""Caches of small models and small pages that have read something: alone, in batches, by kernels."""

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from random_models import tokens
from samples import data, rms

from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.layout import SideLayout
from mlxkv.formats.quantizers import Affine
from mlxkv.metal import launch
from mlxkv.serve.sessions import Memory, shapes_of

STEP = 64  # tokens of a prompt at once: some prompts take several, some less than one


def alone(model, prompt, count: int) -> list[int]:
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=count,
        prompt_cache=make_prompt_cache(model),
        prefill_step_size=STEP,
    )
    return [token for token, _ in steps]


def together(model, prompts, counts, late: int = 2) -> list[list[int]]:
    """Replies of a batch whose last `late` sequences join when others are under way."""
    batch = BatchGenerator(model, prefill_step_size=STEP, prefill_batch_size=3)
    replies = {}

    def insert(part):
        for uid in batch.insert([p for p, _ in part], max_tokens=[n for _, n in part]):
            replies[uid] = []

    work = list(zip(prompts, counts, strict=True))
    insert(work[:-late])
    for step in range(10_000):
        if step == 9:
            insert(work[-late:])
        read, written = batch.next()
        for response in written:
            replies[response.uid].append(response.token)
        if step > 9 and not read and not written:
            break
    batch.close()
    return list(replies.values())


CHUNK = 32  # tokens of a prompt that are read at once


def read(model, count: int) -> list:
    """Caches that hold `count` tokens."""
    caches = make_prompt_cache(model)
    for start in range(0, count, CHUNK):
        model(tokens(count)[None, start : start + CHUNK], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def memory_of(model, bound: int = 1 << 40, batched: bool = False) -> Memory:
    return Memory(bound, shapes_of(read(model, 1)), CHUNK, batched=batched)


def maker(loaded):
    """Makes empty caches."""
    return lambda: make_prompt_cache(loaded.model)


SMALL = CacheConfig(
    Side(Affine(4), "srft"), Side(Affine(3), "hadamard"), sink=16, recent=32, page=32
)
TIES = 5e-3  # rms of an output when one code, on a rounding tie, falls to the other side


def layout(bits: int, group: int, symmetric: bool, dims: int, keys: bool) -> SideLayout:
    return Affine(bits, group, symmetric).layout(dims, 64, keys)


def walk(factory, dtype: mx.Dtype, bound: float) -> tuple[CompressedKVCache, CompressedKVCache]:
    """Take the same steps through kernels and plain ops: (cache of records, cache of codes)."""
    keys, values = data(1, 2, 300, 64), data(1, 2, 300, 64, seed=1)
    queries = mx.array(data(1, 6, 300, 64, seed=2)).astype(dtype)
    ours, plain = CompressedKVCache(SMALL), CompressedKVCache(SMALL)
    done = 0
    for step in (100, 1, 7, 40, 1, 60, 8, 1):
        part = slice(done, done + step)
        new = tuple(mx.array(x[:, :, part]).astype(dtype) for x in (keys, values))
        mask = "causal" if step > 1 else None
        with launch.using(factory):
            view, _ = ours.update_and_fetch(*new)
            if step <= 8:
                assert view.pages.backend.kernel_builder is not None
            out = attend(queries[:, :, part], view, 0.125, mask)
        with launch.using(None):
            spec = attend(queries[:, :, part], plain.update_and_fetch(*new)[0], 0.125, mask)
        assert rms(out, spec) < bound
        done += step
    return ours, plain
