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
THREADS = 384  # of `attend` up to 128 dims: of 12 simdgroups, three to a scheduler


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
    for preset, by_dims in predict.TILES.items():
        for dims, cycles in by_dims.items():
            with subtests.test(preset=preset, dims=dims):
                assert cycles == pytest.approx(roofline.by_tiles(preset, dims).cycles, rel=0.01)
                for rows, cycles_of_rows in enumerate(predict.MULTIPLY_ADDS[preset][dims], 1):
                    count = roofline.by_multiply_adds(preset, dims, rows)
                    assert cycles_of_rows == pytest.approx(count.cycles, rel=0.01)


def test_multiply_adds_of_a_record_are_counted_by_hand():
    """4 rows, 16 tokens, keys and values of 128 dims: 512 instructions of 32 lanes. In a loop over two records, each
    simdgroup of two has half the dims of both, and codes of 4 bits take an `and` for two of them."""
    text = roofline.text_of("int4", 128, 4, "attend")
    record = max(compiler.takes(text.kernel, text.threads).nests, key=lambda nest: nest.unpacks)
    *_, keys = record.inner
    assert keys.unpacks == 2 * 8 and record.unpacks >= 2 * 8 + 4 * 8
    assert 128 + 2 * 16 < keys.cycles < 1.4 * (128 + 2 * 16 + 8)


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
    loop = "#pragma unroll 1\nfor (int n = 0; n < PK; n += AT_ONCE)"
    source = text.kernel.source.replace(loop, loop.replace("unroll 1", "unroll"))
    assert source != text.kernel.source
    source = source.replace("AT_ONCE = BITS_K == 3 ? 2 : 1;", "AT_ONCE = 1;").replace(
        "PARTS = 4", "PARTS = 1"
    )
    assert compiler.takes(replace(text.kernel, source=source), text.threads).nest > NEST


def test_cycles_by_kind_are_those_of_known_instructions(subtests):
    """Of each kind 24 more in the loop over records, each from the last: a compiler can leave none out."""
    text = roofline.text_of("int4", 128, 4, "attend")
    start, end = "float o[QT * OB * 4];\n", "unit += 2;\n"
    cases = {  # cycles of each
        "multiply-add": (1, "more = metal::fma(more, more, float(lane));\n"),
        "integer": (2, "bits = (bits | uint(unit)) + lane;\n"),
        "memory": (1, "more = weight_floats[uint(more)];\n"),
        "shuffle": (2, "more = simd_shuffle_xor(more, ushort(4)) + 1.0f;\n"),
        "other": (1, "more = more * float(lane);\n"),
    }

    def kinds(added: str) -> dict[str, int]:
        source = text.kernel.source.replace(
            start, f"float more = 1.0f;\nuint bits = lane;\n{start}"
        )
        source = source.replace(end, added + end)
        source += "if (more == 0.5f || bits == 7u) {\n  partial_stats[0] = 1.0f;\n}\n"
        assert source.count(start) == source.count(end) == 1
        took = compiler.takes(replace(text.kernel, source=source), text.threads)
        record = max(took.nests, key=lambda nest: nest.unpacks)
        return dict(zip(compiler.KINDS, record.kinds, strict=True))

    usual = kinds("")
    for kind, (cycles, line) in cases.items():
        with subtests.test(kind):
            more = kinds(24 * line)[kind] - usual[kind]
            assert 24 * cycles <= more <= 24 * cycles + 4
