"""mlxkv's Metal kernels as `torch.mps.compile_shader` would get them: the whole text is taken apart here
and run by the emulator. Nothing of this has run on a Mac."""

import re
from itertools import islice

import emulator
import numpy as np
import pytest
import torch
from low_rank_pairs import caches
from methods import METHODS

from cuda_track.cache import choose
from cuda_track.cache.attention import attend
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.golden import kernels
from cuda_track.mps import source
from cuda_track.mps.pages import RecordPages
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))
PARAMETER = re.compile(
    r"(?P<space>const device |device |)(?P<type>\w+)\*? (?P<name>\w+) \[\[(?P<kind>\w+)(\((?P<at>\d+)\))?\]\]"
)
NUMPY = {"float": np.float32, "half": np.float16, "uint": np.uint32, "int": np.int32}


class Library:
    """A library of one kernel, out of the text alone, as Metal's compiler would see it."""

    def __init__(self, text: str):
        before, rest = text.split("kernel void ", 1)
        assert before.startswith(source.BEFORE)
        self.name, rest = rest.split("(\n", 1)
        signature, self.body = rest.split(") {\n", 1)
        assert self.body.endswith("}\n")
        self.body, self.header = self.body[:-2], before.removeprefix(source.BEFORE)
        parts = [PARAMETER.fullmatch(one) for one in signature.split(",\n")]
        assert all(parts), signature
        self.buffers = [one for one in parts if one["kind"] == "buffer"]
        assert [int(one["at"]) for one in self.buffers] == list(range(len(self.buffers)))
        for one in parts[len(self.buffers) :]:  # attributes, as Metal calls and types them
            assert (
                one["kind"] == one["name"]
                and emulator.wrapper.ATTRIBUTES[one["name"]] == one["type"]
            )

    def __getattr__(self, name: str):
        assert name == self.name
        return self.run

    def run(self, *tensors, threads, group_size):
        assert len(tensors) == len(self.buffers)
        arrays = []
        for x, one in zip(tensors, self.buffers, strict=True):
            assert x.is_contiguous()
            array = x.numpy()
            arrays.append(array.view(np.uint32) if one["type"] == "uint" else array)
            assert arrays[-1].dtype == NUMPY[one["type"]], one["name"]
        first = [one["space"] for one in self.buffers].index("device ")
        names = [one["name"] for one in self.buffers]
        kernel = emulator.metal_kernel(
            *(self.name, names[:first], names[first:], self.body, self.header)
        )
        types = [x.dtype for x in arrays[first:]]
        outputs = kernel(
            inputs=arrays[:first],
            output_shapes=[x.shape for x in arrays[first:]],
            output_dtypes=types,
            grid=tuple(threads),
            threadgroup=tuple(group_size),
        )
        for x, out in zip(tensors[first:], outputs, strict=True):
            x.copy_(torch.from_numpy(out))


def filled(config: CacheConfig, dims: int, dtype=torch.float32, batch: int = 1):
    layer_maps = caches("static-r24+int4")[0].layer_maps if config.keys.low else None
    made = CompressedKVCache(config, layer_maps)
    torch.manual_seed(0)
    tokens = config.window + 2 * config.page + 5
    made.update_and_fetch(*(torch.randn(batch, 2, tokens, dims).to(dtype) for _ in "kv"))
    return made


def test_which_methods_have_kernels(subtests):
    for name in METHODS:
        with subtests.test(name=name):
            with source.using(Library), choose.using(choose.METAL):
                why = choose.why_not(METHODS[name].config(64), (64, 64), torch.device("cpu"))
            assert (why is None) == (METHODS[name].mps and METHODS[name].kernels), why


def test_the_whole_text_computes_attention(subtests):
    for name in ("affine", "kivi", "turbo-int3", "polar", "static-r24+int4"):
        with subtests.test(name=name):
            check_the_whole_text_computes_attention(name)


def check_the_whole_text_computes_attention(name):
    low = name not in METHODS
    dims, dtype = 32 if low else 64, torch.float16 if name == "turbo-int3" else torch.float32
    config = parse_kv(name) if low else METHODS[name].config(dims)
    with source.using(Library), choose.using(choose.METAL):
        one = filled(config, dims, dtype, batch=2)
        q = torch.randn(2, 4, 2, dims).to(dtype)
        sinks = torch.randn(4)
        assert type(one.view().pages) is RecordPages
        out = attend(q, one.view(), dims**-0.5, "causal", sinks)
    with choose.using(choose.OPS):
        plain = CompressedKVCache.from_state(one.state, lambda *_: one.layer_maps)
        right = attend(q, plain.view(), dims**-0.5, "causal", sinks)
    assert type(plain.view().pages) is not RecordPages
    error = (
        out.float() - right.float()
    ).square().mean().sqrt() / right.float().square().mean().sqrt()
    assert error < (1e-5 if dtype == torch.float32 else 1e-3)


def test_records_trim_and_go_to_files_as_codes_do():
    with source.using(Library), choose.using(choose.METAL):
        one = filled(parse_kv("int4"), 64, batch=2)
        rows = torch.tensor([1, 0, 1])

        def back(cache, n):
            cache.trim_to(cache.offset - n)

        for change in (lambda c: back(c, 100), lambda c: c.select(rows), lambda c: back(c, 40)):
            with choose.using(choose.OPS):
                plain = CompressedKVCache.from_state(one.state)
            again = CompressedKVCache.from_state(plain.state)
            for cache in (one, plain, again):
                change(cache)
            for x, y, z in zip(
                *(c.view().whole(torch.float32) for c in (one, plain, again)), strict=True
            ):
                assert torch.equal(x, y) and torch.equal(x, z)
    assert set(one.state["pages"]) == {"records", "headers"}


def test_what_has_no_kernel_says_why(subtests):
    for name, dims, reason in [
        ("polar-tree", (64, 64), "polar trees"),
        ("oja-0.75+int4", (64, 64), "follow the text"),
        ("static-0.75", (64, 64), "float16 pages"),
        ("int4", (64, 128), "keys of 64"),
    ]:
        with subtests.test(name=name, dims=dims, reason=reason):
            with source.using(Library), choose.using(choose.METAL):
                assert reason in choose.why_not(parse_kv(name), dims, torch.device("cpu"))
            with choose.using(choose.METAL):
                assert (
                    choose.why_not(parse_kv("int4"), (64, 64), torch.device("cpu"))
                    == "no Metal here"
                )
            assert choose.way(torch.device("mps")) == choose.METAL


def test_golden_attention():
    """The first case; `python -m cuda_track.golden --device mps` asks for all."""
    with source.using(Library):
        rows = list(islice(kernels.metal_rows(torch.device("cpu")), 1))
    assert [row.case for row in rows] == ["one"]
    assert all(row.ok and row.rms < 1e-6 for row in rows)
