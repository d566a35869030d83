"""Texts that a Mac would build are read as C++ for OpenCL behind MLX's own preamble: a preset of each kind,
both bodies. Portable ones have the words of Metal 3.1, tiles those of 3.2. With MLXKV_TEXTS=all, as
`make planted ARGS=--all` has it, every preset at every head dim and in every dtype.

What 3.1 reads, 3.2 and 4.0 read too, since `words.h` only adds to them: a text is read at every level
where it asks for the version. Trees are walked once for texts that differ in constants alone, as is the
lint; all else is for every text.
"""

import os
from collections import Counter

import pytest
from metal import limits, parse, texts
from methods import NO_KERNELS

from mlxkv.formats.presets import PRESETS

pytestmark = pytest.mark.skipif(parse.why_not() is not None, reason=str(parse.why_not()))
EVERY = os.environ.get("MLXKV_TEXTS") == "all"
KINDS = ("int4", "int3", "int2", "oscar-int2", "turbo-int3", "polar", "polar-tree+online")
KINDS += ("static-0.75", texts.MIXED_BITS)
OTHER_DIMS = ("int4", "turbo-int3", texts.MIXED_BITS)
# Inputs that may have fewer than 8 elements: a logit for each head of a small model.
SHORT = {"sinks"}
SEEN: set[object] = set()  # texts that this process has read


def levels(text: texts.Text) -> tuple[int, ...]:
    """At which a text has to be read: one, unless it asks which Metal it is."""
    asks = "__METAL" in text.kernel.source or "__METAL" in text.kernel.header
    return tuple(x for x in parse.LEVELS if x >= text.level) if asks else (text.level,)


def breaches(found: list[texts.Text]) -> list[str]:
    """What is wrong with these, the same of many in one line."""
    new = [x for x in found if x.kernel not in SEEN]
    SEEN.update(x.kernel for x in new)
    names = {x.kernel.function(): x for x in new}
    assert len(names) == len(new), "two texts of one name: MLX would build one of them alone"
    wrong: dict[str, list[texts.Text]] = {}
    for level in parse.LEVELS:
        units = [parse.Unit.of(x.kernel) for x in new if level in levels(x)]
        for name, those in parse.parse(units, level).items():
            for breach in those:
                wrong.setdefault(f"{names[name].name} at {level}: {breach}", []).append(names[name])
    for text in new:
        for breach in limits.counted(text.kernel, text.threads, SHORT):
            wrong.setdefault(f"{text.name}: {breach}", []).append(text)
        shape = parse.shape(text.kernel.source), parse.shape(text.kernel.header)
        if shape not in SEEN:
            SEEN.add(shape)
            for breach in limits.linted(text.kernel):
                wrong.setdefault(f"{text.name}: {breach}", []).append(text)
    return [
        f"{line} ({len(those)} texts: {next(iter(those[0].uses))})" for line, those in wrong.items()
    ]


def test_texts_are_read():
    """One preset of each kind, some at two head dims, or all of them."""
    wrong = []
    for names in texts.families().values() if EVERY else [(name,) for name in KINDS]:
        if EVERY:
            kernels = texts.dump(names, dtypes=("bfloat16",), others=False)
            kernels += texts.dump(names, (80, 128), ("float32", "float16"), others=False)
        else:
            kernels = texts.dump(names, (128,), ("bfloat16",), others=False)
            if names[0] in OTHER_DIMS:
                kernels += texts.dump(names, (80,), ("float16",), others=False)
        assert kernels or set(names) <= NO_KERNELS, names
        wrong += breaches(list({text.kernel: text for text in kernels}.values()))
    assert not wrong, "\n".join(wrong)


def test_every_text_of_no_preset_is_read():
    found = texts.dump([])
    assert {x.name for x in found} >= {"whiten"}
    assert not (wrong := breaches(found)), "\n".join(wrong)


def test_mlx_preamble_is_read_at_every_level_and_so_is_a_text_of_each_body():
    for level in parse.LEVELS:
        first = {}
        for text in texts.dump(["int4", "oja-0.75"], dims=(64,), dtypes=("bfloat16",)):
            if text.level <= level:
                first.setdefault(text.name, text)
        assert len(first) >= (5 if level == 310 else 6)
        wrong = parse.parse([parse.Unit.of(x.kernel) for x in first.values()], level)
        assert not wrong, "\n".join(f"{name}: {x}" for name, those in wrong.items() for x in those)


def test_every_preset_is_recorded_or_has_no_kernels_for_a_reason():
    missing = {}
    for name, config in PRESETS.items():
        reasons = {dims: texts.why_not(config, dims) for dims in texts.DIMS}
        if all(reasons.values()):
            missing[name] = set(reasons.values())
    assert set(missing) == {"fp16", "fp16+keep0.5", *NO_KERNELS}, missing


def test_steps_of_a_chat_and_both_bodies_are_recorded():
    found = texts.dump(["int4", "oja-0.75+int4"], dims=(128,), dtypes=("bfloat16",))
    steps = Counter((x.name, use.step) for x in found for use in x.uses)
    bodies = {use.body for x in found for use in x.uses}
    assert bodies == set(texts.BODIES)
    for step in (
        "quantize",
        "prefill quantize",
        "dequantize",
        "attend 1",
        "attend 5",
        "attend 1 of two runs",
    ):
        assert any(x == step for _, x in steps), step
    assert any(x == "attend 1 with sinks" for _, x in steps)
    assert {x.level for x in found} == {310, 320}
