"""The emulator as a backend of `metal/launch.py`: MLX arrays in, MLX arrays out; factories of kernels that count, or
fail like Metal's; pairs of keys and values that it quantizes, against the spec."""

import mlx.core as mx
import numpy as np
from emulator import bfloat16, metal_kernel, tile_header, to_bfloat16, to_float32

from mlxkv.codec import affine, packing, records
from mlxkv.formats.quantizers import Affine
from mlxkv.formats.records import RecordLayout
from mlxkv.metal import quantize
from mlxkv.metal.launch import read_source
from mlxkv.spec import affine as ref

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


NOT_BUILT = (
    "[metal::Device] Unable to build metal library from source\n"
    "program_source:1312:5: error: use of undeclared identifier 'kv_level'\n"
    "    kv_level(code);\n    ^\n"
    "program_source:1340:9: error: no matching function for call to 'simd_sum'\n"
    "program_source:20:1: warning: unused variable\n"
)
LOST = "[METAL] Command buffer execution failed: Caused GPU Hang Error (00000003)"


def counting(built: list[str], tiles: bool = False):
    """Notes the name of every kernel that is built."""

    def build(name, *names, **texts):
        built.append(name)
        return (make_tiles if tiles else make)(name, *names, **texts)

    build.tiles = tiles
    return build


def unbuildable(part: str = "", tiles: bool = False):
    """The compiler refuses kernels with `part` in their names when they first run."""

    def build(name, *names, **texts):
        if part not in name:
            return make_tiles(name, *names, **texts)

        def call(**_):
            raise RuntimeError(NOT_BUILT)

        return call

    build.tiles = tiles
    return build


class Failing:
    """Kernels with `part` in their names raise after `left` more calls; None: never."""

    def __init__(self, part: str, tiles: bool = False, said: str = LOST):
        self.part, self.tiles, self.said, self.left = part, tiles, said, None

    def __call__(self, name, *names, **texts):
        kernel = make_tiles(name, *names, **texts)

        def call(**given):
            if self.part in name and self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise RuntimeError(self.said)
            return kernel(**given)

        return call


def broken(part, good, bad):
    """Replaces `good` by `bad` in the texts of kernels called `part`. held: whether each had `good`."""
    held = []

    def build(name, input_names, output_names, source, header=""):
        if name.startswith(part):
            held.append(good in source + header)
            source, header = source.replace(good, bad), header.replace(good, bad)
        return make(name, input_names, output_names, source, header)

    build.held = held
    return build


def unpack_side(words, at):
    """[..., N, words] -> codes, scale, bias (None where the format has none)."""
    codes, numbers = records.unpack(words, at)
    return codes, numbers["scale"], numbers.get("bias")


def quantize_by_ops(pair, specs):
    """Quantize keys and values [B, G, T, R] without a transform: (records, their layout, the numbers that they
    hold)."""
    sides = zip(pair, specs, (True, False), strict=True)
    whole = RecordLayout(*(spec.layout(x.shape[-1], 64, keys) for x, spec, keys in sides))
    words, held = [], []
    for x, spec, at in zip(pair, specs, (whole.keys, whole.values), strict=True):
        stored = affine.encode(spec, x, 16)
        codes = packing.unpack(stored["codes"], spec.bits, at.dims)
        words.append(records.pack(codes, stored, at))
        held.append(affine.decode(spec, stored, at.dims, 16, mx.float32))
    return mx.concatenate(words, -1), whole, held


NEAR = 1e-3  # of a code from where rounding transforms
INT8, INT4, INT3, INT2 = (
    Affine(8, 64),
    Affine(4, 32, symmetric=True),
    Affine(3, 64),
    Affine(2, 0, symmetric=True),
)


def data(*shape, seed=0, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[..., 3] *= 6
    return mx.array(x.astype(np.float32)).astype(dtype)


def layout(specs, dims):
    keys, values = (
        s.layout(d, 64, i == 0) for i, (s, d) in enumerate(zip(specs, dims, strict=True))
    )
    return RecordLayout(keys, values)


def check(words, x, spec, at, down=None):
    """The side `at` of records against the spec's codes of x @ down, rounding ties aside."""
    codes, scale, bias = (None if y is None else np.array(y) for y in unpack_side(words, at))
    stored = np.array(x.astype(mx.float32), np.float64)
    if down is not None:
        stored = stored @ np.array(down, np.float64)
    stored = ref.clip_rows(stored, spec.clip)
    group = spec.group_size(at.dims, 64)
    want, want_scale, want_bias = ref.affine_encode(stored, spec.bits, group, spec.symmetric)
    # Scales and biases: float16 of values that differ in the last bits of a float32.
    for ours, theirs in ((scale, want_scale), (bias, want_bias)):
        if ours is not None:
            off = np.abs(ours - theirs)
            assert (off <= np.maximum(np.abs(theirs), 1e-4) / 1000).all()
            assert (off > 0).mean() < 0.01
    # Codes by our own scales, so that each stands for itself.
    start = -(2 ** (spec.bits - 1)) * scale.astype(float) if bias is None else bias.astype(float)
    wide = [np.repeat(y, group, -1)[..., : at.dims] for y in (start, scale.astype(float))]
    exact = (stored - wide[0]) / np.where(wide[1] > 0, wide[1], 1)
    low, top = (1 if spec.symmetric else 0), 2**spec.bits - 1
    nearest = np.clip(np.rint(exact), low, top)
    if spec.symmetric:
        nearest = np.where(wide[1] > 0, nearest, 2 ** (spec.bits - 1))
    wrong = codes != nearest
    tie = np.abs(np.abs(exact - np.rint(exact)) - 0.5) < NEAR
    assert not (wrong & ~tie).any()
    assert wrong.mean() < 2e-3
    assert (codes != want).mean() < 2e-2


def quantize_and_check(pair, specs, transforms, start=0, tokens=None):
    downs = [None if t is None else t.down for t in transforms]
    dims = [x.shape[3] if d is None else d.shape[-1] for x, d in zip(pair, downs, strict=True)]
    whole = layout(specs, dims)
    ranks = tuple(spec.clip_rank(n) for spec, n in zip(specs, dims, strict=True))
    words = quantize.quantize_pages(pair, whole, make, transforms, start, tokens, ranks)
    stop = pair[0].shape[2] if tokens is None else start + tokens
    assert words.shape == (*pair[0].shape[:2], (stop - start) // 16, whole.words)
    split = whole.keys.words
    sides = (words[..., :split], whole.keys), (words[..., split:], whole.values)
    for x, spec, down, (side, at) in zip(pair, specs, downs, sides, strict=True):
        check(side, x[:, :, start:stop], spec, at, down)
    return words


def orthogonal(dims, seed, *lead):
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.standard_normal((*lead, dims, dims)))[0].astype(np.float32)
