"""Every rule finds what is planted for it, and nothing in a clean text."""

from dataclasses import replace

import pytest
from metal import limits, parse
from metal.planted import BASE, PLANTED
from metal.signature import Kernel

pytestmark = pytest.mark.skipif(parse.why_not() is not None, reason=str(parse.why_not()))


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
