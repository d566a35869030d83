"""What a compiler makes of the texts: no private array that stays in memory, no register that is spilled.
By clang, as a stand-in for Apple's compiler: `codegen.py` says what is approximated.

For four presets in bfloat16 with four query heads to a kv head: every text of a seal, of a prefill's
unseal and of decode attention with one new token, portable and by tiles.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from metal import codegen, measured
from metal.planted import BASE, above, below, other

pytestmark = pytest.mark.skipif(codegen.why_not() is not None, reason=str(codegen.why_not()))

# Bytes of private arrays of more than 8 words that may stay in memory, by (kernel, dims): none where nothing is said.
# What the kernels take today is `python -m metal.measured`'s last column.
ARRAY_BYTES: dict[tuple[str, int], int] = {}
# The same of (registers spilled, bytes of scratch memory).
SPILLS: dict[tuple[str, int], tuple[int, int]] = {}
# The other methods, in which the clips of trees are heavier: at most (registers spilled, bytes of
# scratch memory) at 128 dims, none where nothing is said.
OTHERS = {
    "turbo-int3": {},
    "polar": {"attend": (9, 40)},
    "polar-tree+online": {"attend": (143, 512)},
    "srft-int4": {"seal": (45, 184)},
}
CASES = [(preset, dims) for preset in measured.PRESETS for dims in (64, 128, 256)]


@pytest.mark.parametrize(("preset", "dims"), CASES)
def test_private_arrays_are_in_registers(preset, dims):
    wrong = {}
    for label, text in measured.measured(preset, dims):
        found = codegen.private_arrays(text.kernel)
        if sum(size for _, size in found) > ARRAY_BYTES.get((text.name, dims), 0):
            wrong[label] = found
    assert not wrong


@pytest.mark.parametrize(("preset", "dims"), [x for x in CASES if x[1] <= 128])
def test_no_register_is_spilled(preset, dims):
    wrong = {}
    for label, text in measured.measured(preset, dims):
        found = codegen.registers(text.kernel, text.threads)
        spilled, scratch = SPILLS.get((text.name, dims), (0, 0))
        if found.spilled > spilled or found.scratch > scratch:
            wrong[label] = found
    assert not wrong


@pytest.mark.parametrize("preset", OTHERS)
def test_other_methods_keep_their_arrays_in_registers_and_spill_no_more_than_they_did(preset):
    wrong = {}
    for label, text in measured.measured(preset, 128):
        found = codegen.registers(text.kernel, text.threads)
        spilled, scratch = OTHERS[preset].get(text.name, (0, 0))
        arrays = codegen.private_arrays(text.kernel)
        if found.spilled > spilled or found.scratch > scratch or arrays:
            wrong[label] = found, arrays
    assert not wrong


# Sums of so many numbers in a thread, read at places known when it is compiled.
SUMS = """\
float sums[{n}];
#pragma unroll
for (int i = 0; i < {n}; ++i) sums[i] = float(words[at + uint(i) * 64u]);
for (int k = 0; k < count; ++k) {{
{pragma}
for (int i = 0; i < {n}; ++i) sums[i] += scale[k] * sums[({n} - 1) - i];
}}
{pragma}
for (int i = 0; i < {n}; ++i) out[at + uint(i)] = sums[i];
"""


def summing(n: int, pragma: str):
    return replace(BASE, source=BASE.source + SUMS.format(n=n, pragma=pragma))


def test_a_clean_text_has_no_private_arrays_and_spills_nothing():
    assert codegen.private_arrays(BASE) == []
    found = codegen.registers(BASE, 128)
    assert (found.spilled, found.scratch, found.shared) == (0, 0, 1024)
    assert 4 < found.vgprs < 64 and found.code > 200


def test_accumulators_that_are_not_unrolled_are_found():
    assert codegen.private_arrays(summing(64, "#pragma unroll")) == []
    assert codegen.private_arrays(summing(64, "#pragma nounroll")) == [("[64 x float]", 256)]
    # A run-time index keeps the whole array.
    turned = below("out[at] = o[count & 7];")(other("float o[8]", "float o[16]")(BASE))
    assert codegen.private_arrays(turned) == [("[16 x float]", 64)]


def test_eight_words_may_stay():
    assert codegen.private_arrays(below("out[at] = o[count & 7];")(BASE)) == []


def test_more_accumulators_than_registers_are_found():
    """As four rows of queries at 256 dims need them: 4 x 32 a lane."""
    assert codegen.registers(summing(48, "#pragma unroll"), 128).spilled == 0
    found = codegen.registers(summing(144, "#pragma unroll"), 128)
    assert found.spilled > 0 and found.scratch > 0


def test_threads_differ_in_what_is_compiled():
    """What differs between threads is in vector registers: it would not be if it were a kernel's argument."""
    one = below("out[at] = float(lane + simdgroup_index_in_threadgroup);")(BASE)
    assert codegen.registers(one, 128).vgprs >= codegen.registers(BASE, 128).vgprs


def test_a_text_that_is_refused_says_why():
    with pytest.raises(codegen.CompileError, match="nothing_like_it"):
        codegen.private_arrays(above("inline int kv_bad() { return nothing_like_it; }")(BASE))


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("[64 x float]", 256),
        ("[2 x %struct.A]", 40),
        ("{ i32, <4 x half>, [2 x i32] }", 20),
        ("<2 x float>", 8),
        ("i1", 1),
        ("ptr", 8),
    ],
)
def test_sizes_of_types(kind, size):
    assert codegen._bytes(kind, {"%struct.A": "{ [4 x i32], i32 }"}) == size
