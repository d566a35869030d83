"""What kernels take on an M1 or M2 by Mesa's compiler, where `make agx` has built it."""

from dataclasses import replace

import pytest
from agx import compiler, roofline
from agx.__main__ import PRESETS as DIAL
from agx.__main__ import chosen
from metal import texts

from mlxkv.formats.presets import PRESETS
from mlxkv.metal import predict

pytestmark = [
    pytest.mark.skipif(compiler.why_not() is not None, reason=str(compiler.why_not())),
    pytest.mark.slow,
]


# Instructions that write a register to memory, at most, in a kernel of a paper's preset; those of the dial have none.
SPILLS = 22
# Bytes of the largest loop of a kernel of the dial: an M1 has a cache of 12 KB. And of mixed bits, where each
# block has a branch for widths of 3 and 8 bits.
NEST = 12 << 10
NEST_OF_MIXED_BITS = 24 << 10
THREADS = 512  # of `attend` up to 128 dims


def test_registers_are_enough(subtests):
    for preset, dims, kernel, text in chosen(
        [*DIAL, *(name for name in PRESETS if name not in DIAL)]
    ):
        with subtests.test(preset=preset, dims=dims, kernel=kernel):
            took = compiler.takes(text.kernel, text.threads)
            assert took.spills <= (0 if preset in DIAL else SPILLS)
            if preset in DIAL:
                assert took.nest <= (NEST_OF_MIXED_BITS if preset == texts.MIXED_BITS else NEST)
                assert kernel != "attend" or dims > 128 or took.threads >= THREADS
            assert took.threads >= text.threads
            assert took.shared <= 32 << 10


def test_predictions_are_of_the_roofline(subtests):
    for preset, by_dims in predict.CYCLES.items():
        for dims, cycles in by_dims.items():
            with subtests.test(preset=preset, dims=dims):
                assert cycles == pytest.approx(roofline.cycles(preset, dims), rel=0.01)


def test_what_costs_registers_and_code_is_seen(subtests):
    """A private array indexed at run time, 40 floats more that live across the records, queries of 256 dims in
    registers, and a loop over blocks that is unrolled four times."""
    _, _, _, text = next(chosen(["int4"], [128], ["attend_tile"]))
    assert compiler.takes(text.kernel, text.threads).spills == 0
    loop, end = "while (unit < stop) {\n", "unit += PAIR;\n"
    planted = {
        "an array indexed at run time": (
            f"float many[64];\n#pragma unroll\nfor (int i = 0; i < 64; i++) many[i] = float(i);\n{loop}",
            f"{end}many[unit % 64] += sum[0];\nsum[1] += many[unit / 64 % 64];\n",
        ),
        "40 floats more": (
            f"float more[40];\n#pragma unroll\nfor (int i = 0; i < 40; i++) more[i] = 0.0f;\n{loop}",
            f"{end}#pragma unroll\nfor (int i = 0; i < 40; i++) more[i] = metal::fma(more[i], sum[0], "
            "top[i % 2]);\n#pragma unroll\nfor (int i = 0; i < 40; i++) sum[1] += more[i];\n",
        ),
    }
    for name, (first, last) in planted.items():
        with subtests.test(name):
            source = text.kernel.source.replace(loop, first).replace(end, last)
            assert source.count(first) == source.count(last) == 1
            took = compiler.takes(replace(text.kernel, source=source), text.threads)
            assert took.spills > 0
    _, _, _, text = next(chosen(["int4"], [256], ["attend_tile"]))
    source = text.kernel.source.replace("POOLED = 1", "POOLED = 0")
    assert source != text.kernel.source
    took = compiler.takes(replace(text.kernel, source=source), text.threads)
    assert took.spills > 0
    _, _, _, text = next(chosen(["int4"], [256], ["attend"]))
    loop = "#pragma unroll 1\nfor (int c = 0;"
    source = text.kernel.source.replace(loop, loop.replace("1", "4"))
    assert source != text.kernel.source
    assert compiler.takes(replace(text.kernel, source=source), text.threads).nest > NEST
