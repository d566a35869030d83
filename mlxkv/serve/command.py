"""The command `mlxkv serve`. Imports nothing heavy until it runs."""

from __future__ import annotations

import os
from importlib.metadata import version

from mlxkv.console import note, working
from mlxkv.errors import UserError
from mlxkv.models.catalog.aliases import resolve
from mlxkv.models.catalog.locate import require
from mlxkv.serve.options import ServeOptions, signature


def serve(**given) -> None:
    """Serve many chats at once: OpenAI's API, and a page at /. One model over several machines:
    mlx.launch --hostfile HOSTS -- mlxkv serve ..."""
    if given["api_key"] in (None, []):  # "" was meant to be one, and is refused
        given["api_key"] = os.environ.get("MLXKV_API_KEY", "").splitlines()
    options = ServeOptions(**given)
    # Batches of older ones have other words for where a reply ends.
    if (installed := version("mlx-lm")).startswith("0.31"):
        raise UserError(f"[serve] needs mlx-lm 0.32, for Python 3.11 and newer; got {installed}")
    for model in options.models:
        require(resolve(model))
    if os.environ.get("MLX_RANK", "0") == "0":  # of several processes the first one speaks
        note(f"{options.models[0].strip()} · --kv {options.kv.strip()}")
    with working("importing MLX and mlx-lm"):
        from mlxkv.serve.run import run

    run(options)


# typer reads the options from the signature.
serve.__signature__ = signature()
