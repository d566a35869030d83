"""What kernels take on an M1 or M2 by Mesa's compiler, where `make agx` has built it: bounds for each kernel."""

from __future__ import annotations

import pytest
from agx import compiler
from agx.__main__ import chosen

pytestmark = [
    pytest.mark.skipif(compiler.why_not() is not None, reason=str(compiler.why_not())),
    pytest.mark.slow,
]
# Registers that are written to memory and read back, as instructions. Every kernel of a preset and head dim that is not
# named here has none.
SPILLS = {
    ("attend", 256): {"int8": 8, "int4": 3},
    ("attend", 128): {"int4": 2},
    ("attend_tile", 256): {"int8": 2, "int4": 11, "int3": 7, "fill": 14, "int2": 20},
    ("seal", 256): {"int3": 18},
    ("seal of a prompt", 256): {"int3": 33},
    ("seal_channel", 256): {"int2": 32},
}


def test_registers_are_enough(subtests):
    for preset, dims, kernel, text in chosen():
        with subtests.test(preset=preset, dims=dims, kernel=kernel):
            took = compiler.takes(text.kernel, text.threads)
            assert took.spills <= SPILLS.get((kernel, dims), {}).get(preset, 0)
            assert took.threads >= text.threads
            assert took.shared <= 32 << 10
