"""The options of `mlxkv chat`: names, defaults and help texts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option


@dataclass(frozen=True)
class ChatOptions:
    """The command line, in the order of `--help`."""

    model: Annotated[
        str, Option("--model", help="An alias (mlxkv models), a hub name or a local folder.")
    ] = "tiny"
    kv: Annotated[
        str, Option("--kv", help="Cache preset (mlxkv presets), or KEYS/VALUES: int8/int4.")
    ] = "int4"
    prompt: Annotated[
        str | None, Option("--prompt", help="Answer this and leave (or pipe the text in).")
    ] = None
    system: Annotated[str | None, Option("--system", help="System prompt.")] = None
    max_tokens: Annotated[int, Option("--max-tokens", help="Longest reply.")] = 512
    temp: Annotated[float, Option("--temp", help="Temperature; 0 takes the likeliest.")] = 0.0
    top_p: Annotated[float, Option("--top-p", help="Nucleus sampling.")] = 1.0
    seed: Annotated[int, Option("--seed", help="Seed of the sampling.")] = 0
    kv_strict: Annotated[
        bool, Option("--kv-strict", help="Refuse a model with layers that stay uncompressed.")
    ] = False
    raw: Annotated[bool, Option("--raw", help="No chat template: continue the text as it is.")] = (
        False
    )
    load: Annotated[str | None, Option("--load", help="Go on with a saved session.")] = None
    dtype: Annotated[
        str | None, Option("--dtype", help="float32, float16 or bfloat16. Default: as stored.")
    ] = None
    calibration: Annotated[
        str | None,
        Option(
            "--calibration",
            help="For calibrated presets: a file, or owner/name on the hub. Default: the model's.",
        ),
    ] = None
    fold: Annotated[
        bool, Option("--fold", help="Turn values by the weights, for calibrated presets.")
    ] = False
    keep: Annotated[
        float | None,
        Option("--keep", help="Share of a prompt's stored tokens that stays (SnapKV)."),
    ] = None
    encode: Annotated[
        str, Option("--encode", help="By what: kernel, or cpu or cpu-columns (matrix products).")
    ] = "kernel"
    json: Annotated[
        bool, Option("--json", help="Make the last line of stdout one JSON document.")
    ] = False
