"""The emulator as a backend of `metal/launch.py`: MLX arrays in, MLX arrays out."""

import mlx.core as mx
import numpy as np
from emulator import bfloat16, metal_kernel, tile_header, to_bfloat16, to_float32

from mlxkv.metal.launch import read_source

NUMPY = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: bfloat16,
    mx.uint32: np.uint32,
    mx.int32: np.int32,
}


def _to_numpy(x: mx.array):
    if x.dtype == mx.bfloat16:
        return to_bfloat16(np.array(x.astype(mx.float32)))
    return np.array(x)


def _to_mlx(x, dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(to_float32(x)).astype(dtype)
    return mx.array(x)


def make_tiles(*names, **texts):
    """The same with tile kernels, as on Metal."""
    return make(*names, **texts)


def make_mma(name, input_names, output_names, source, header=""):
    """The same with the tiles of CUDA, and with CUDA's threadgroup memory."""
    header = header.replace(read_source("tile_metal.h"), tile_header("mma"))
    header = header.replace("KV_ROOMY = 0", "KV_ROOMY = 1")
    return make(name, input_names, output_names, source, header, 48 << 10)


def make(name, input_names, output_names, source, header="", memory=32 << 10):
    """A factory like `mx.fast.metal_kernel`."""
    kernel = metal_kernel(
        name=name,
        input_names=input_names,
        output_names=output_names,
        source=source,
        header=header,
        threadgroup_memory=memory,
        writable=[name for name in input_names if name == "counter"],
    )

    def call(inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        arrays = [_to_numpy(x) for x in inputs]
        out = kernel(
            inputs=arrays,
            template=[(k, NUMPY.get(v, v) if isinstance(v, mx.Dtype) else v) for k, v in template],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=[NUMPY[dtype] for dtype in output_dtypes],
        )
        for array, name in zip(arrays, input_names, strict=True):
            assert name != "counter" or not array.any(), "the counter is not zero again"
        return [_to_mlx(x, dtype) for x, dtype in zip(out, output_dtypes, strict=True)]

    return call


make_tiles.tiles = make_mma.tiles = make_mma.wide = True
