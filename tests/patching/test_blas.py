"""Products, attention and their gradients by NumPy, against MLX's own."""

import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxkv.patching import blas
from mlxkv.patching.blas import numpy_products

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="for MLX's package under Linux")
SHAPES = (1, 6, 20, 16), (1, 2, 50, 16), (1, 2, 50, 8)  # of queries, keys, values


def test_attention_and_linear_maps_are_mlx_s(subtests):
    mx.random.seed(0)
    inputs = [mx.random.normal(shape) for shape in SHAPES]
    boolean = mx.random.uniform(shape=(20, 50)) > 0.3
    masks = {"none": None, "causal": "causal", "boolean": boolean}
    masks["additive"] = mx.where(boolean, mx.zeros(boolean.shape), -1e9)
    maps = nn.Linear(8, 32), nn.QuantizedLinear.from_linear(nn.Linear(32, 64, bias=False), 32, 4)

    def run(mask, q, k, v):
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
        scores = q.reshape(1, 2, -1, 16) @ k.swapaxes(-1, -2)
        far = mx.softmax(mx.stop_gradient(scores), axis=-1)
        return (maps[1](maps[0](out)) ** 2).sum() + ((scores * far) @ v).sum()

    for name, mask in masks.items():
        with subtests.test(mask=name):
            want = mx.value_and_grad(lambda *x, mask=mask: run(mask, *x), (0, 1, 2))(*inputs)
            mx.eval(want)
            with numpy_products():
                got = mx.value_and_grad(lambda *x, mask=mask: run(mask, *x), (0, 1, 2))(*inputs)
                mx.eval(got)
            for x, y in zip([want[0], *want[1]], [got[0], *got[1]], strict=True):
                np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5 * float(mx.abs(x).max()))


def test_types_are_kept_and_the_block_ends():
    before = mx.array.__matmul__, mx.quantized_matmul, mx.fast.scaled_dot_product_attention
    x, y = mx.ones((3, 4), mx.bfloat16), mx.ones((4, 2), mx.bfloat16)
    with pytest.raises(KeyError), numpy_products():
        assert mx.array.__matmul__ is not before[0]
        assert (x @ y).dtype == mx.bfloat16 and (x @ y.astype(mx.float32)).dtype == mx.float32
        assert mx.softmax(mx.zeros((1, 1, 2, 2), mx.float16), axis=-1).dtype == mx.float16
        raise KeyError
    assert before == (
        mx.array.__matmul__,
        mx.quantized_matmul,
        mx.fast.scaled_dot_product_attention,
    )


def test_logits_and_other_threads_are_left_to_mlx(monkeypatch):
    made = []
    original = blas._linear
    monkeypatch.setattr(blas, "_linear", lambda x, w: made.append(w.shape) or original(x, w))
    x, head = mx.ones((3, 4)), nn.QuantizedLinear.from_linear(nn.Linear(32, 99), 32, 4)

    def products():
        return x @ mx.ones((4, 5)), head(mx.ones((2, 32)))

    with numpy_products(lazy=99):
        products()
        assert made == [(4, 5)]
        other = threading.Thread(target=products)
        other.start()
        other.join()
        assert made == [(4, 5)]
        with numpy_products():  # inside, logits are computed, too
            products()
    assert made == [(4, 5), (4, 5), (32, 99)]
