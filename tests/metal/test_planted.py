"""Every rule finds what is planted for it, and nothing in a clean text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from metal import limits, parse
from metal.signature import Input, Kernel

pytestmark = pytest.mark.skipif(parse.why_not() is not None, reason=str(parse.why_not()))

HEADER = """\
constant constexpr float KV_PI = 3.14159265f;
constant constexpr int KV_TABLE[4] = {1, 2, 3, 4};
inline float kv_scaled(float x, float by) { return x * by; }
inline void kv_put(device float* out, uint at, float x) { out[at] = x; }
inline void kv_twice(thread float& x) { x = x + x; }
inline float kv_first(const threadgroup float* x) { return x[0]; }
template <int N>
inline float kv_total(const thread float* x) {
float sum = 0.0f;
#pragma unroll
for (int i = 0; i < N; ++i) sum += x[i];
return sum;
}
"""
SOURCE = """\
constexpr int D = 64;
typedef bfloat16_t T;
threadgroup float shared[4 * D];
uint lane = thread_index_in_simdgroup;
uint thread_id = thread_position_in_threadgroup.x;
uint at = threadgroup_position_in_grid.x * 128u + thread_id;
int count = size[0];
float o[8];
#pragma unroll
for (int i = 0; i < 8; ++i) o[i] = float(x[at]) * scale[i];
kv_twice(o[0]);
shared[thread_id] = kv_total<8>(o);
threadgroup_barrier(mem_flags::mem_threadgroup);
float y = metal::exp2(kv_first(shared)) + metal::simd_shuffle_xor(o[1], ushort(1));
y = metal::max(y, metal::simd_shuffle(o[2], ushort(lane)));
uint word = as_type<uint>(y) ^ words[at];
if (metal::simd_any(word == 3u)) y = kv_scaled(y, KV_PI) + float(KV_TABLE[lane % 4u]);
half near = half(y);
simdgroup_half8x8 a;
a.thread_elements()[0] = near;
if (int(at) < count) {
kv_put(out, at, float(a.thread_elements()[0]));
kept[at] = T(y);
}
"""
INPUTS = (*(("x", "bfloat16_t"), ("words", "uint32_t"), ("scale", "float")), ("size", "int32_t"))
OUTPUTS = (("out", "float"), ("kept", "bfloat16_t"))
BASE = Kernel("mlxkv_base", tuple(Input(*x, False, False) for x in INPUTS), OUTPUTS, SOURCE, HEADER)
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);\n"


@dataclass(frozen=True)
class Planted:
    """rule: that has to find it. level: at which. change: of the base. later: a level at which it is none."""

    rule: str
    change: Callable[[Kernel], Kernel]
    level: int = 320
    later: int = 0
    threads: int = 128


def above(line: str) -> Callable[[Kernel], Kernel]:
    """A line before all others of the header."""
    return lambda k: replace(k, header=f"{line}\n{k.header}")


def below(line: str) -> Callable[[Kernel], Kernel]:
    """A line behind all others of the body."""
    return lambda k: replace(k, source=f"{k.source}{line}\n")


def other(old: str, new: str) -> Callable[[Kernel], Kernel]:
    """Another word, in the header or the body, which has it."""

    def change(k: Kernel) -> Kernel:
        assert (old in k.header) != (old in k.source), old
        return replace(k, header=k.header.replace(old, new), source=k.source.replace(old, new))

    return change


SCOPE, TYPE, BARE = "program scope", "type", "address space"
PLANTED: dict[str, Planted] = {
    # Of the first version of this project: what Apple's compiler refused.
    "KV_PI": Planted(SCOPE, other("constant constexpr float KV_PI", "constexpr float KV_PI")),
    # Address spaces.
    "a thread pointer to device memory": Planted(
        TYPE, below("thread float* p = out; p[0] = 1.0f;")
    ),
    "a bare pointer in a body": Planted(BARE, below("float* p = o; p[0] = 1.0f;")),
    "a write to an input": Planted(TYPE, below("words[at] = 1u;")),
    "a small input": Planted(
        "small input",
        lambda k: replace(k, inputs=(*k.inputs[:3], replace(k.inputs[3], small=True))),
    ),
    # Memory and counts.
    "40 KiB of threadgroup memory": Planted(
        "threadgroup memory", other("shared[4 * D]", "shared[160 * D]")
    ),
    "threadgroup memory of a block": Planted(
        TYPE, below("{ threadgroup float z[4]; z[0] = 1.0f; out[at] = z[0]; }")
    ),
    "more than 31 buffers": Planted("buffers", lambda k: replace(k, inputs=k.inputs * 8)),
    "more than 1024 threads": Planted("threads", lambda k: k, threads=2048),
    # Levels of the language.
    "a fence on 3.1": Planted(TYPE, below(FENCE), level=310, later=320),
    "a word of C++17": Planted("wording", below("if constexpr (D == 64) out[at] = y;")),
    # Types.
    "double": Planted(TYPE, below("double z = 1.0f; out[at] = float(z);")),
    "a literal without f": Planted(TYPE, other("3.14159265f", "3.14159265")),
    # What a name meets.
    "a function that MLX has": Planted(TYPE, above("inline float log1p(float x) { return x; }")),
    # What the lint alone sees.
    "a lambda": Planted("lint", below("auto f = [](float z) { return z; }; out[at] = f(y);")),
    "a function pointer": Planted(
        "lint", below("float (*f)(float, float) = kv_scaled; out[at] = f(y, y);")
    ),
    "an include": Planted("lint", above("#include <metal_math>")),
}


def rules(kernel: Kernel, level: int, threads: int = 128) -> set[str]:
    """The rules that a kernel breaks."""
    parse.forget()
    breaches = parse.parse([parse.Unit.of(kernel)], level).get(kernel.function(), [])
    return {x.rule for x in (*breaches, *limits.counted(kernel, threads), *limits.linted(kernel))}


def test_each_rule_finds_what_is_planted_for_it():
    assert {level: rules(BASE, level) for level in parse.LEVELS} == dict.fromkeys(
        parse.LEVELS, set()
    )
    missed = []
    for name, planted in PLANTED.items():
        kernel = planted.change(BASE)
        if planted.rule not in rules(kernel, planted.level, planted.threads):
            missed.append(name)
        if planted.later and rules(kernel, planted.later, planted.threads):
            missed.append(f"{name}: not from {planted.later} on")
    assert not missed


def test_what_one_text_breaks_is_not_blamed_on_those_beside_it():
    wrong = replace(PLANTED["double"].change(BASE), name="mlxkv_wrong")
    others = [replace(BASE, name=f"mlxkv_right{i}") for i in range(2)]
    parse.forget()
    breaches = parse.parse([parse.Unit.of(x) for x in (others[0], wrong, others[1])], 320)
    assert list(breaches) == [wrong.function()]
    lines = wrong.tail().split("\n")
    assert "double" in lines[breaches[wrong.function()][0].line - 1]


def test_macros_of_one_text_are_gone_in_the_next():
    kernels = [
        replace(BASE, name=f"mlxkv_{n}", source=f"#define KV_ROWS {n}\n{BASE.source}")
        for n in (1, 2)
    ]
    assert parse.parse([parse.Unit.of(x) for x in kernels], 320) == {}
