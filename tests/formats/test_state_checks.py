"""What a saved cache may look like, checked by its shapes alone."""

from pathlib import Path

import numpy as np
import pytest

from mlxkv.errors import UserError
from mlxkv.formats import session, state
from mlxkv.formats.names import parse_kv

CONFIG = parse_kv("int4")
TOKEN = ((1, 2, 1, 8), (1, 2, 1, 4))
PAGE = {"keys": {"codes": np.zeros((1, 2, 64, 1), np.uint32)}}


def pair(tokens: int, heads: int = 2) -> dict:
    return {
        "keys": np.zeros((1, heads, tokens, 8), np.float32),
        "values": np.zeros((1, heads, tokens, 4), np.float32),
    }


def sound() -> dict:
    pages = {"keys": {"codes": np.zeros((1, 2, 128, 1), np.uint32)}}
    return {"header": b"", "sink": pair(64), "last": pair(64), "live": pair(70), "pages": pages}


def check(tree: dict, pages: int = 2) -> None:
    state.check_shapes(tree, CONFIG, TOKEN, PAGE, [pages], {})


def test_a_sound_state_passes():
    check(sound())
    check({"header": b"", "live": pair(70)}, 0)


def test_other_shapes_and_parts_are_refused(subtests):
    for change in [
        {"live": pair(70, heads=3)},
        {"live": {"keys": pair(70)["values"], "values": pair(70)["keys"]}},
        {"sink": pair(63)},
        {"last": pair(63)},
        {"other": pair(1)},
        {"basis": {"keys": np.zeros((1, 2, 8, 4))}},
        {"pages": {"keys": {"codes": np.zeros((1, 2, 64, 1), np.uint32)}}},
        {"pages": {"keys": {"codes": np.zeros((1, 2, 128, 1), np.int32)}}},
        {"pages": {"keys": {}}},
    ]:
        with subtests.test(change=change):
            with pytest.raises(ValueError):
                check(sound() | change)


def test_exact_tokens_of_a_page_need_a_page():
    with pytest.raises(ValueError, match="parts"):
        check({"header": b"", "live": pair(70), "last": pair(64)}, 0)


def test_rows_that_no_cache_has_after_so_many_tokens(subtests):
    for rows, offset, more in [
        (9, 10, {}),  # a row too few
        (10, 10, {"place": 9}),
        (10, -1, {}),
        (8, 20, {"keep": 4, "size": 8, "place": 3}),  # a ring goes on behind its first tokens
        (8, 20, {"keep": 4, "size": 8, "place": 9}),
        (10, 20, {"size": 8, "place": 9}),  # in order, and not at the end
        (6, 20, {"size": 8, "place": 6}),
    ]:
        with subtests.test(rows=rows, offset=offset, more=more):
            with pytest.raises(ValueError, match="tokens in a cache"):
                state.check_rows(rows, offset, **more)


def test_rows_that_caches_have():
    state.check_rows(12, 10)
    state.check_rows(10, 10, place=10)
    state.check_rows(8, 20, keep=4, size=8, place=4)
    state.check_rows(8, 20, keep=4, size=8, place=8)
    state.check_rows(10, 20, size=8, place=10)


def test_tokens_are_numbers_below_the_vocabulary():
    def read(text: str) -> list[int]:
        return session.tokens_of(session.SessionHeader(Path("x"), {"tokens": text}, []), 64)

    assert read("[0, 63]") == [0, 63]
    for text in ("[64]", "[-1]", "[1.0]", "[true]", '{"0": 1}'):
        with pytest.raises(UserError, match="none of this model's"):
            read(text)
