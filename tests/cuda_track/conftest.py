"""Processes that these tests start find torch."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _with_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXKV_TEST_TORCH", "1")
        yield
