"""The text of every kernel: the dialect by clang and lint, and the CUDA form by NVRTC, where they are
installed. Running them is `test_kernels.py`'s."""

import numpy as np
import pytest
from emulator import metal_kernel, nvrtc, strict

from mlxkv.metal.launch import SIGNATURES, body, constants, features, header, read

ARRAYS = {
    "LEVELS": 5,
    "BOOKS": 28,
    "B": 8,
    "C": 8,
}  # of constants; a list is no value of a template
ARRAYS = {f"{name}{side}": n for name, n in ARRAYS.items() for side in ("_K", "_V")}
SIDE = {
    "TREE": 0,
    "GROUP": 64,
    "SYMMETRIC": 0,
    "CODEBOOK": 0,
    "CHANNEL": 0,
    "PAIRS": 0,
    "PER_TOKEN": 1,
}
SIDES = {f"{name}_{side}": value for side in "KV" for name, value in SIDE.items()}
SIDES |= {"CODEBOOK_K": 1, "CORRECTED_K": 1, "CORRECTED_V": 0}
FLOATS = dict.fromkeys(
    (
        "table_k",
        "table_v",
        "q_pages",
        "partial_out",
        "partial_stats",
        "up",
        "sinks",
        "scale",
        "x",
        "numbers",
        "rows",
        "logs",
    )
)
HALVES = dict.fromkeys(("keys", "values", "q", "q_window", "sink_k", "sink_v", "live_k", "live_v"))
HALVES |= dict.fromkeys(("scales", "biases", "sink", "live", "rotary"))
TYPES = {**dict.fromkeys(FLOATS, np.float32), **dict.fromkeys(HALVES, np.float16)}
WORDS = ("records", "headers", "map_k", "map_v")
TYPES |= dict.fromkeys((*WORDS, *(f"{name}_2" for name in WORDS), "counter", "codes"), np.uint32)


# name: template values, dtypes of the outputs
KERNELS = {
    "seal": (
        {
            **SIDES,
            **{"T_K": np.float16, "D_K": 128, "KIND_K": 2, "BITS_K": 4},
            **{"T_V": np.float16, "D_V": 80, "KIND_V": 0, "BITS_V": 3, "S": 2, "TILE": 1024},
            **{"RANK_K": 6, "RANK_V": 7},
        },
        [np.uint32],
    ),
    "seal_channel": (
        {
            **SIDES,
            **{"T_K": np.float16, "D_K": 80, "BITS_K": 3, "T_V": np.float16, "D_V": 80},
            **{"BITS_V": 3, "S": 8, "RANK_V": 7, "CHUNK": 2},
        },
        [np.uint32, np.uint32],
    ),
    "unseal": (
        {
            **SIDES,
            **{"CHANNEL_K": 1, "PAGE": 64, "HEADER": 96, "HEADER_K": 96},
            **{"T": np.float16, "BITS_K": 3, "BITS_V": 3, "DIMS_K": 80, "DIMS_V": 80},
            **{"RECORD": 600, "SIDE_K": 300},
        },
        [np.float16],
    ),
    "attend": (
        {
            **SIDES,
            **{"T": np.float16, "QT": 4, "S": 4, "CAP": 1, "D": 128, "RK": 128, "RV": 128},
            **{"RECORD": 576, "BITS_K": 4, "BITS_V": 3, "CHANNEL_K": 1},
            **{"PAGE": 64, "HEADER": 192},
        },
        [np.float32, np.float32],
    ),
    "attend_tile": (
        {
            **SIDES,
            **{
                "T": np.float16,
                "BF16": 0,
                "S": 8,
                "STAGES": 2,
                "AHEAD": 8,
                "D": 128,
                "RK": 128,
                "RV": 128,
            },
            **{"RECORD": 544, "BITS_K": 4, "BITS_V": 3, "HAS_K": 1, "HAS_V": 1},
            **{"WINDOW": 1, "HAS_SINKS": 1, "CAP": 1, "PAGE": 64, "HEADER": 0, "RUNS": 1},
        },
        [np.float16, np.float32],
    ),
    "attend_latent": (
        {
            **{"T": np.float16, "R": 512, "QT": 3, "DH": 2, "M": 1, "BITS": 3, "GROUP": 64},
            **{"CHANNEL": 0, "SYMMETRIC": 0},
        },
        [np.float32, np.float32],
    ),
    "whiten": ({"N": 32, "R": 96, "S": 8, "INVERSE": 1, "PASSES": 1}, [np.float32]),
    "merge": (
        {"T": np.float16, "WIDTH": 128, "RV": 128, "D": 128, "HAS_UP": 1, "HAS_SINKS": 1},
        [np.float16],
    ),
}

RAW = {  # values of templates besides, for records of float16 numbers
    "seal": {"BITS_K": 16, "BITS_V": 16, "CODEBOOK_K": 0, "RANK_K": 1, "RANK_V": 1},
    "unseal": {
        **{"BITS_K": 16, "BITS_V": 16, "CHANNEL_K": 0, "CODEBOOK_K": 0},
        **{"SYMMETRIC_K": 1, "SYMMETRIC_V": 1, "RECORD": 1792},
    },
    "attend": {
        **{"BITS_K": 16, "BITS_V": 16, "CHANNEL_K": 0, "CODEBOOK_K": 0},
        **{"SYMMETRIC_K": 1, "SYMMETRIC_V": 1, "RECORD": 2048},
    },
    "attend_tile": {
        **{"BITS_K": 16, "BITS_V": 16, "CODEBOOK_K": 0, "SYMMETRIC_K": 1, "SYMMETRIC_V": 1},
        **{"RECORD": 2048, "RUNS": 2},
    },
    "attend_latent": {"M": 2, "QT": 4, "BITS": 4, "GROUP": 64, "CHANNEL": 1},
}
BLOCKS = {
    "BITS": 2,
    "GROUP": 256,
    "SYMMETRIC": 1,
    "FILL": 1,
    "RANK": 1,
}  # widths that differ by block
BLOCKS |= dict.fromkeys(("CODEBOOK", "CHANNEL", "PER_TOKEN", "KIND"), 0)
BLOCKS = {f"{name}_{side}": value for side in "KV" for name, value in BLOCKS.items()} | {"SOON": 4}
CASES = [(name, {}) for name in KERNELS] + list(RAW.items())
CASES += [(name, BLOCKS) for name in ("seal", "unseal", "attend", "attend_tile")]
CHANNELS = {"CHANNEL_K": 1, "PER_TOKEN_K": 0, "HEADER": 192, "PAGE": 128, "CODEBOOK_K": 0}
CASES += [(name, CHANNELS) for name in ("attend", "attend_tile")]


def kernel(name, before, wanted):
    inputs, outputs = SIGNATURES[name]
    return metal_kernel(
        name=f"mlxkv_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=constants(tuple((word, (0,) * n) for word, n in ARRAYS.items()))
        + body(name, wanted),
        header=before,
        any_lane=True,
    )


def inputs_of(name):
    return [np.zeros(64, TYPES.get(word, np.int32)) for word in SIGNATURES[name][0]]


def test_every_kernel_is_listed():
    assert set(KERNELS) == set(SIGNATURES)


@pytest.mark.parametrize("name", KERNELS)
def test_the_text_is_ascii_without_comments(name):
    for text in (body(name), header(name), read("cuda.h")):
        assert text.isascii()
        assert "//" not in text
    assert "threadgroup_barrier(mem_flags::mem_none" not in body(name)


@pytest.mark.skipif(strict.why_not() is not None, reason=str(strict.why_not()))
@pytest.mark.parametrize(("name", "more"), CASES)
def test_the_dialect_is_kept(name, more):
    template, outputs = KERNELS[name]
    template = template | more
    wanted = features(template)
    made = kernel(name, header(name, wanted=wanted), wanted)
    assert strict.check(made, inputs_of(name), outputs, list(template.items())) == []


@pytest.mark.skipif(nvrtc.why_not() is not None, reason=str(nvrtc.why_not()))
@pytest.mark.parametrize(("name", "more"), CASES)
def test_the_cuda_form_builds(name, more):
    template, outputs = KERNELS[name]
    template = template | more
    wanted = features(template)
    made = kernel(name, header(name, True, wanted), wanted)
    assert nvrtc.compile_cuda(made, inputs_of(name), outputs, list(template.items()))
