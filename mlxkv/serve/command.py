"""The options of `mlxkv serve`. Heavy imports live inside."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def serve(
    model: Annotated[
        str, typer.Option("--model", help="An alias (mlxkv models), a hub name or a local folder.")
    ] = "tiny",
    kv: Annotated[
        str, typer.Option("--kv", help="Cache preset (mlxkv presets), or KEYS/VALUES: int8/int4.")
    ] = "int4",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            help="Bound for all caches (of each process): 8GB. Default: half of what is free.",
        ),
    ] = None,
    kv_disk: Annotated[
        str | None,
        typer.Option("--kv-disk", help="Folder for sessions that memory has no room for."),
    ] = None,
    kv_disk_size: Annotated[
        str, typer.Option("--kv-disk-size", help="Bound for that folder.")
    ] = "16GB",
    host: Annotated[
        str, typer.Option("--host", help="Address; other than loopback needs --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", help="Clients have to send it. Or MLXKV_API_KEY, which is not shown."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="A web page's origin that may ask; may be repeated."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Longest reply, where a request names none.")
    ] = 512,
    max_body: Annotated[str, typer.Option("--max-body", help="Largest request.")] = "8MB",
    max_requests: Annotated[
        int, typer.Option("--max-requests", help="Requests under way at once.")
    ] = 64,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request.")] = 600,
    batch: Annotated[int, typer.Option("--batch", help="Replies decoded at once.")] = 32,
    prefill_batch: Annotated[
        int, typer.Option("--prefill-batch", help="Prompts read at once.")
    ] = 8,
    prefill_step: Annotated[
        int | None, typer.Option("--prefill-step", help="Tokens of a prompt read at once.")
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", help="Keep finished conversations for reuse.")
    ] = True,
    kv_strict: Annotated[
        bool, typer.Option("--kv-strict", help="Refuse a model with layers that stay uncompressed.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, float16 or bfloat16. Default: as stored."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            help="For calibrated presets: a file, or owner/name on the hub. Default: the model's.",
        ),
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="Turn values by the weights, for calibrated presets.")
    ] = False,
) -> None:
    """Serve many chats at once: OpenAI's API, and a page at /. One model over several machines:
    mlx.launch --hostfile HOSTS -- mlxkv serve ..."""
    from mlxkv.serve.options import Options

    options = Options(
        model=model,
        kv=kv,
        host=host,
        port=port,
        kv_memory=kv_memory,
        kv_disk=kv_disk,
        kv_disk_size=kv_disk_size,
        api_key=api_key or os.environ.get("MLXKV_API_KEY"),
        max_tokens=max_tokens,
        max_body=max_body,
        timeout=timeout,
        max_requests=max_requests,
        batch=batch,
        prefill_batch=prefill_batch,
        prefill_step=prefill_step,
        reuse=reuse,
        origins=tuple(allow_origin or ()),
        kv_strict=kv_strict,
        dtype=dtype,
        calibration=calibration,
        fold=fold,
    )
    from mlxkv.serve.run import run

    run(options)
