"""The strict type check and the lint: right kernels pass, each planted breach of the dialect is found."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator import strict
from emulator.lint import lint
from emulator_kernels import (
    FUSED_MERGE,
    HADAMARD_ENCODE,
    HADAMARD_HEADER,
    MATRIX_8X8,
    ROW_SUM,
    SAXPY,
    SPLIT_K,
    TILE,
)

needs_clang = pytest.mark.skipif(strict.why_not() is not None, reason=str(strict.why_not()))

ONE = np.zeros(1, np.float32)
COUNT = np.zeros(1, np.int32)
X = np.zeros((16, 128), np.float16)
T16 = ("T", np.float16)
F32 = np.float32

# name: (input names, inputs, output names, output types, body, header, template)
CLEAN = {
    "saxpy": (["x", "y", "a"], [X, X, ONE], ["o"], [np.float16], SAXPY, "", [T16]),
    "rows": (["x"], [X], ["o"], [np.float16], ROW_SUM, "", [T16]),
    "encode": (
        *(["x"], [X], ["codes", "scales"], [np.uint16, F32]),
        *(HADAMARD_ENCODE, HADAMARD_HEADER, [T16]),
    ),
    "split": (
        *(["q", "k", "v", "length"], [X, X, X, COUNT], ["out", "stats"], [F32, F32]),
        *(SPLIT_K, "", [("D", 64)]),
    ),
    "matrix": (["x", "y"], [X, X], ["o"], [F32], MATRIX_8X8, "", [T16]),
    "tile": (["x", "y"], [X, X], ["o"], [F32], TILE, emulator.tile_header("simdgroup"), []),
}


@needs_clang
@pytest.mark.parametrize("name", CLEAN)
def test_right_kernels_are_clean(name):
    input_names, inputs, output_names, types, body, header, template = CLEAN[name]
    kernel = emulator.metal_kernel(name, input_names, output_names, body, header)
    assert strict.check(kernel, inputs, types, template) == []


@needs_clang
def test_right_kernel_with_a_counter_is_clean():
    kernel = emulator.metal_kernel(
        "merge", ["x", "counter"], ["partial", "o"], FUSED_MERGE, writable=["counter"]
    )
    counter = np.zeros(8, np.uint32)
    assert strict.check(kernel, [X.astype(F32), counter], [F32, F32]) == []


BODY = """
threadgroup float part[32];
uint i = thread_position_in_grid.x;
uint t = thread_index_in_threadgroup;
part[t % 32] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
"""

# name: (header, more of the body)
PLANTED = {
    "pointer without address space": ("", "const float* p = x; o[i] = p[0];"),
    "device pointer to threadgroup memory": ("", "device float* p = part; o[i] = p[0];"),
    "threadgroup pointer to an input": ("", "const threadgroup float* p = x + i; o[i] = p[0];"),
    "small input as a device pointer": ("", "const device int* p = n; o[i] = float(p[0]);"),
    "small input cast to a device pointer": (
        "",
        "const device int* p = (const device int*)n; o[i] = float(p[0]);",
    ),
    "threadgroup memory cast to a device pointer": (
        "",
        "device float* p = (device float*)part; o[i] = p[0];",
    ),
    "input loses its const": ("", "device float* p = x; o[i] = p[0];"),
    "write to an input": ("", "x[i] = 0.0f; o[i] = 0.0f;"),
    "helper without address space": (
        "inline float first(const float* p) { return p[0]; }",
        "o[i] = first(x);",
    ),
    "helper with a bare reference": (
        "inline void zero(float& v) { v = 0.0f; }",
        "float v; zero(v); o[i] = v;",
    ),
    "helper for device gets threadgroup memory": (
        "inline float first(const device float* p) { return p[0]; }",
        "o[i] = first(part);",
    ),
    "double": ("", "double v = x[i]; o[i] = float(v);"),
    "literal without f": ("", "o[i] = x[i] * 0.5;"),
    "literal with exponent without f": ("", "o[i] = x[i] * 1e-3;"),
    "literal of half": ("", "o[i] = x[i] * float(0.5h);"),
    "array of variable length": ("", "float v[n[0]]; v[0] = x[i]; o[i] = v[0];"),
    "simd_sum of a bool": ("", "o[i] = float(simd_sum(x[i] > 0.0f));"),
    "simd_sum of 64 bits": ("", "o[i] = float(simd_sum(ulong(i)));"),
    "simd_sum of bfloat": ("", "o[i] = float(simd_sum(bfloat(x[i])));"),
    "shuffle distance is no ushort": ("", "o[i] = simd_shuffle_xor(x[i], 1);"),
    "max of two types": ("", "o[i] = metal::max(x[i], 0);"),
    "max of int and uint": ("", "o[i] = float(metal::max(int(i), i));"),
    "float into half without a cast": ("", "half v = x[i]; o[i] = float(v);"),
    "constructor of a vector": ("", "uint4 v = uint4(i, i, i, i); o[i] = float(v.x);"),
    "lambda": ("", "auto f = [&](float v) { return v; }; o[i] = f(x[i]);"),
    "function pointer": (
        "inline float same(float v) { return v; }",
        "float (*f)(float) = same; o[i] = f(x[i]);",
    ),
    "static variable": ("", "static int count; count = 1; o[i] = x[i];"),
    "recursion": (
        "inline uint down(uint v) { return v < 2 ? v : down(v - 1); }",
        "o[i] = float(down(i));",
    ),
    "recursion of two": (
        "inline uint a(uint v); inline uint b(uint v) { return a(v / 2); }\n"
        "inline uint a(uint v) { return v ? b(v) : v; }",
        "o[i] = float(a(i));",
    ),
    "not ASCII": ("", "// \u00e9\no[i] = x[i];"),
    "comment that adds a parameter": ("", "// see max_shape\no[i] = x[i];"),
    "comment that adds an attribute": ("", "// not threads_per_grid\no[i] = x[i];"),
    "two names for the simd width": (
        "",
        "o[i] = x[i] + float(threads_per_simdgroup + thread_execution_width);",
    ),
    "threadgroup memory in a block": ("", "if (i > 0) { threadgroup float b[4]; o[i] = 0.0f; }"),
    "name of the standard library": ("", "o[i] = std::max(x[i], 0.0f);"),
    "include": ("#include <cmath>\n", "o[i] = x[i];"),
    "word of CUDA": ("", "o[i] = x[threadIdx.x];"),
    "unknown function": ("", "o[i] = expf(x[i]);"),
    "variable without a value": ("", "float v; if (n[0] > 0) v = 1.0f; o[i] = v;"),
    "header reads a template value": (
        "inline int twice() { return 2 * D; }",
        "o[i] = float(twice());",
    ),
    "atomic on an input": (
        "",
        "atomic_fetch_add_explicit((const device atomic_uint*)x, 1u, memory_order_relaxed); o[i] = 0.0f;",
    ),
}


def breaches(header: str, body: str) -> list[str]:
    kernel = emulator.metal_kernel("planted", ["x", "n"], ["o"], BODY + body, header)
    inputs = [np.zeros(64, np.float32), COUNT]
    try:
        return strict.check(kernel, inputs, [np.float32], [("D", 8)])
    except emulator.EmulatorFault as fault:
        return [str(fault)] if fault.kind == "dialect" else []


@needs_clang
def test_the_planted_body_is_clean_by_itself():
    assert breaches("", "o[i] = x[i] + part[0] + float(n[0]);") == []


@needs_clang
@pytest.mark.parametrize("name", PLANTED)
def test_planted_breach_is_found(name):
    assert breaches(*PLANTED[name])


def test_overloads_may_call_each_other():
    header = "inline uint f(ushort v) { return v; }\ninline uint f(uint v) { return f(ushort(v)); }"
    assert lint("o[0] = 1.0f;", header, [], ["o"]) == []


def test_lint_alone_needs_no_compiler():
    """The rules that are about text: these hold on a machine without clang."""
    names = ["lambda", "function pointer", "static variable", "double", "literal without f"]
    names += ["recursion", "recursion of two", "not ASCII", "comment that adds a parameter"]
    names += ["pointer without address space", "helper with a bare reference", "word of CUDA"]
    for name in names:
        header, body = PLANTED[name]
        assert lint(BODY + body, header, ["x", "n"], ["o"]), name


def test_two_outputs_with_a_shape_need_an_attribute():
    assert lint("o[0] = x_shape[0]; p[0] = 1;", "", ["x"], ["o", "p"])
    assert not lint("o[0] = x_shape[0];", "", ["x"], ["o"])
