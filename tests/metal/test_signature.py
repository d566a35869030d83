"""The text around a kernel is MLX's own: held against what MLX prints, and the rules against its words."""

import re

import mlx.core as mx
import pytest
from metal.signature import ATTRIBUTES, VERSIONS, kernel

HEADER = "constant constexpr int KV_THREE = 3;\n"
PARTS = {  # body, inputs, dtypes of outputs
    "every attribute": (
        "".join(f"// {x}\n" for x in ATTRIBUTES),
        {"x": mx.zeros(8)},
        {"o": mx.float32},
    ),
    "no attribute": ("o[0] = x[0];", {"x": mx.zeros(8)}, {"o": mx.float32}),
    "every type": (
        "uint i = thread_position_in_grid.x;",
        {
            f"x{i}": mx.zeros(16, d)
            for i, d in enumerate(
                (mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.int16, mx.int32, mx.int64)
                + (mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.bool_, mx.complex64)
            )
        },
        {"o": mx.float16, "p": mx.uint32, "q": mx.bfloat16},
    ),
    "small, scalar and empty-handed": (
        "o[thread_position_in_grid.x] = a[0] + b + c[0];",
        {"a": mx.zeros(7), "b": mx.array(1), "c": mx.zeros((2, 4)), "d": mx.zeros((1,))},
        {"o": mx.int32},
    ),
    "shape, strides and ndim": (
        "o[thread_position_in_grid.x] = a_shape[0] + a_strides[1] + a_ndim + bb_shape[0];",
        {"a": mx.zeros((4, 4)), "b": mx.zeros(4), "bb": mx.zeros(4), "s": mx.array(1.0)},
        {"o": mx.int32, "p": mx.int32},
    ),
    "shape and no attribute": ("o[0] = a_shape[0];", {"a": mx.zeros((4, 4))}, {"o": mx.int32}),
    "two outputs, shape and no attribute": (
        "o[0] = a_shape[0]; p[0] = 1;",
        {"a": mx.zeros((4, 4))},
        {"o": mx.int32, "p": mx.int32},
    ),
}


def printed(capfd, tmp_path, source, inputs, outputs) -> str:
    """What MLX prints that it compiles. It does so while it exports a function, on any machine from 0.32 on."""
    built = mx.fast.metal_kernel(
        name="tried",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=HEADER,
    )

    def call(*arrays):
        return built(
            inputs=list(arrays),
            output_shapes=[(8,)] * len(outputs),
            output_dtypes=list(outputs.values()),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(tmp_path / "call.mlxfn"), call, *inputs.values())
    out = capfd.readouterr().out
    return re.fullmatch(r"Generated source code for `tried`:\n```\n(.*)\n```\n", out, re.S)[1]


def version() -> str:
    """Of the rules that the MLX here follows."""
    return "0.31.2" if mx.__version__.startswith("0.31.") else "0.32"


def made(part: str):
    source, inputs, outputs = PARTS[part]
    arrays = list(inputs.values()), list(outputs.values())
    return kernel("tried", list(inputs), list(outputs), source, HEADER, *arrays)


def test_the_text_is_the_one_that_mlx_prints(capfd, tmp_path):
    if version() == "0.31.2" and not mx.metal.is_available():
        pytest.skip("MLX 0.31 builds no kernel where there is no Metal")
    for part, given in PARTS.items():
        assert made(part).text(version()) == printed(capfd, tmp_path, *given), part


def test_the_two_ends_of_the_range_differ_in_the_name_alone():
    text = made("shape, strides and ndim")
    old, new = (text.text(x) for x in VERSIONS)
    assert text.function("0.31.2") == "custom_kernel_tried"
    assert text.function("0.32") == "custom_kernel_tried_float_floatc_floatc_floats_int32_t_int32_t"
    assert old == new.replace(text.function("0.32"), text.function("0.31.2"))
