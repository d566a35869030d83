"""A cache of small pages, and a walk through it by kernels beside plain ops."""

import mlx.core as mx
from samples import data, rms

from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.layout import SideLayout
from mlxkv.formats.quantizers import Affine
from mlxkv.metal import launch

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
                assert view.pages.backend.make is not None
            out = attend(queries[:, :, part], view, 0.125, mask)
        with launch.using(None):
            spec = attend(queries[:, :, part], plain.update_and_fetch(*new)[0], 0.125, mask)
        assert rms(out, spec) < bound
        done += step
    return ours, plain
