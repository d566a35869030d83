"""The command `mlxkv chat`. Imports nothing heavy until it runs."""

from __future__ import annotations

import inspect

from mlxkv.chat.options import ChatOptions


def chat(**values) -> None:
    """Talk to a model in a terminal, or in one shot: mlxkv chat "Why is the sky blue?",
    cat notes.txt | mlxkv chat "Summarise"."""
    options = ChatOptions(**values)
    from mlxkv.chat.run import run

    run(options)


# typer reads the options from the signature.
chat.__signature__ = inspect.signature(ChatOptions, eval_str=True).replace(return_annotation=None)
