"""Every rule finds what is planted for it, and nothing in a clean text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from metal import limits, parse
from metal.planted import BASE, PLANTED
from metal.signature import Kernel

pytestmark = pytest.mark.skipif(parse.why_not() is not None, reason=str(parse.why_not()))


def rules(kernel: Kernel, level: int, threads: int = 128) -> dict[str, list[str]]:
    """What each rule finds."""
    parse.forget()
    found = parse.parse([parse.Unit.of(kernel)], level).get(kernel.function(), [])
    out: dict[str, list[str]] = {}
    for breach in (*found, *limits.counted(kernel, threads), *limits.linted(kernel)):
        out.setdefault(breach.rule, []).append(str(breach))
    return out


@pytest.mark.parametrize("level", parse.LEVELS)
def test_a_clean_text_passes(level):
    assert rules(BASE, level) == {}


@pytest.mark.parametrize("name", PLANTED)
def test_the_rule_finds_what_is_planted(name):
    planted = PLANTED[name]
    kernel = planted.change(BASE)
    assert planted.rule in rules(kernel, planted.level, planted.threads)
    if planted.later:
        assert rules(kernel, planted.later, planted.threads) == {}


def test_what_one_text_breaks_is_not_blamed_on_those_beside_it():
    wrong = replace(PLANTED["double"].change(BASE), name="mlxkv_wrong")
    others = [replace(BASE, name=f"mlxkv_right{i}") for i in range(2)]
    parse.forget()
    units = [parse.Unit.of(x) for x in (others[0], wrong, others[1])]
    found = parse.parse(units, 320)
    assert list(found) == [wrong.function()]
    lines = wrong.tail().split("\n")
    assert "double" in lines[found[wrong.function()][0].line - 1]


def test_a_template_of_the_header_is_blamed_on_the_text_that_asks_for_it():
    kernels = [
        replace(BASE, name=f"mlxkv_{n}", source=f"{BASE.source}float z = kv_total<{n}>(o);\n")
        for n in ("1", "sizeof(int) == 4 ? -1 : 2")
    ]
    header = BASE.header.replace("float sum", 'static_assert(N > 0, "some");\nfloat sum')
    units = [
        parse.Unit(f"custom_kernel_{i}", header, replace(x, name=str(i)).tail("0.31.2"))
        for i, x in enumerate(kernels)
    ]
    assert list(parse.parse(units, 320)) == ["custom_kernel_1"]


def test_macros_of_one_text_are_gone_in_the_next():
    kernels = [
        replace(BASE, name=f"mlxkv_{n}", source=f"#define KV_ROWS {n}\n{BASE.source}")
        for n in (1, 2)
    ]
    assert parse.parse([parse.Unit.of(x) for x in kernels], 320) == {}
