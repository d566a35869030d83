"""One side of page records, by codes, scales and biases."""

from mlxkv.codec import records


def pack_side(codes, scale, bias, at):
    """codes: [..., T, R], scale, bias: [..., T, groups] float16 -> [..., T/16, words]."""
    return records.pack(codes, {"scale": scale, "bias": bias}, at)


def unpack_side(words, at):
    """[..., N, words] -> codes, scale, bias (None where the format has none)."""
    codes, numbers = records.unpack(words, at)
    return codes, numbers["scale"], numbers.get("bias")
