"""Output of `mlxkv bench`, and small subjects."""

import json

import mlx.core as mx
from random_models import config_of, random_model

from mlxkv.bench.subject import Subject
from mlxkv.cli import main


def subject(family: str = "gemma3_text", **changes) -> Subject:
    return Subject(
        random_model(family, **changes), config_of(family) | changes, "random", mx.float32
    )


def said(capsys, *args) -> tuple[str, dict]:
    """Run a command that succeeds: (its output, the JSON of its last line)."""
    assert main([str(arg) for arg in args]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def fails(capsys, *args) -> str:
    """Run a command that refuses its options: its one line of error."""
    assert main([str(arg) for arg in args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    return err
