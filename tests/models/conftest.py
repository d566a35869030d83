"""Decode steps that Python builds, as on any CPU: tests/compiled has those that are traced and replayed."""

import pytest

from mlxkv.patching.steps import SWITCH


@pytest.fixture(autouse=True)
def _untraced(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
