"""One side of page records, by codes, scales and biases; both, by plain ops."""

import mlx.core as mx

from mlxkv.codec import affine, packing, records
from mlxkv.formats.records import RecordLayout


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
