"""Every method in plain ops of MLX and of torch: the float64 law, products with codes, bytes."""

import mlx.core as mx
import numpy as np
import torch
from methods import METHODS, OWN_BOOKS, stored, transform_at
from samples import data

from cuda_track.codec.codec import Codec as TorchCodec
from mlxkv.codec.codec import Codec
from mlxkv.formats import quantizers as formats
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Affine, Codebook, Full, Half, PolarTree
from mlxkv.spec.bounds import rms

BACKENDS = {
    "mlx": (Codec, mx.array, np.array, mx.float32),
    "torch": (TorchCodec, torch.from_numpy, torch.Tensor.numpy, torch.float32),
}
# Each format once, with the page and the transform of its first method; trees with and without one.
FORMATS = {}
for _method in METHODS.values():
    for _spec in (_method.keys, _method.values):
        _own = _method.transform if isinstance(_spec, PolarTree) else ""
        FORMATS.setdefault((_spec, _own), (_spec, _method.page, _method.transform))


def cases():
    for spec, page, transform in FORMATS.values():
        for dims in (64, 80):
            side = Side(spec, transform_at(transform, dims))
            if not (side.why_not(dims, page) or spec.why_not(dims, page)):
                yield side, dims, page


def test_every_format_has_a_method():
    assert {type(spec) for spec, _ in FORMATS} | {Full, Half} == set(formats.METHODS.values())


def test_it_stores_what_the_law_says(subtests):
    """And reads codes as it decodes them, in as many bytes as it says."""
    for backend in BACKENDS:
        for side, dims, page in list(cases()):
            with subtests.test(backend=backend, side=side, dims=dims, page=page):
                make, array, numpy, float32 = BACKENDS[backend]
                code, x = make(side, dims, page), data(2, 2, 2 * page, dims)
                held = code.encode(array(x))
                assert set(held) == side.quantizer.tensors
                decoded = numpy(code.decode(held, float32))
                bits = 8 * sum(part.nbytes for part in held.values())
                assert bits == side.quantizer.bits_per_value(dims, page) * x.size
                # q . k and p v from the codes.
                q, p = data(2, 2, 3, dims, seed=1), np.abs(data(2, 2, 3, 2 * page, seed=2))
                assert rms(numpy(code.scores(array(q), held)), q @ decoded.swapaxes(-1, -2)) < 1e-5
                assert rms(numpy(code.mix(array(p), held)), p @ decoded) < 1e-5
                law = law_of(side, x, page)
                if law is not None:
                    # A code at a rounding boundary may fall the other way: behind a transform its whole token.
                    off = np.abs(decoded - law) > 1e-4 * np.abs(law).max()
                    assert off.mean() < 0.05 and rms(decoded, law) < 1e-2


def test_codes_keep_to_their_bits(subtests):
    """Where float16 bends scales and biases most: values far from 0, beyond its range, and next to nothing."""
    for backend in BACKENDS:
        for bits in (2, 3, 4, 8):
            for symmetric in (False, True):
                with subtests.test(backend=backend, bits=bits, symmetric=symmetric):
                    make, array, numpy, float32 = BACKENDS[backend]
                    side = Side(Affine(bits, 32, symmetric))
                    noise = data(1, 2, 32, 64)
                    for x in (1000 + 0.01 * noise, 1e7 * noise, 1e-7 * noise):
                        code = make(side, 64, 32)
                        held = code.encode(array(x))
                        decoded = numpy(code.decode(held, float32))
                        law = stored(x.astype(np.float64), side, 0, 1, 32)
                        step = numpy(held["scale"]).astype(np.float64).max()
                        off = np.abs(decoded - law)
                        assert off.max() <= 1.01 * step and (off > 0.5 * step).mean() < 0.05


def law_of(side, x, page):
    """By the spec, or None where it has no such case: codebooks of its own, levels without their transform."""
    spec = side.quantizer
    transformed = isinstance(spec, Codebook)
    if (transformed and side.transform != "random") or getattr(
        spec, "codebooks", None
    ) == OWN_BOOKS:
        return None
    return stored(x.astype(np.float64), side, 0, x.shape[2] // page, page)
