"""Options that several commands share, as typer reads them from a signature. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from mlxkv.catalog.aliases import complete_model
from mlxkv.formats.names import complete_kv

# Environment variables of a server: its keys, one a line (OpenCode and Codex read theirs from it, too); and the parent
# process, with which it ends.
KEY, PARENT = "MLXKV_API_KEY", "MLXKV_PARENT"
PORT = 8642  # of the server; 8080 is Open WebUI's, llama.cpp's and mlx_lm.server's

Model = Annotated[
    str,
    Option(
        "--model",
        "-m",
        help="An alias (mlxkv models), a hub name, a folder or a GGUF file.",
        autocompletion=complete_model,
        rich_help_panel="Model",
    ),
]
Kv = Annotated[
    str,
    Option(
        "--kv",
        help="Preset (mlxkv presets), KEYS/VALUES: int8/int4, bits, or 99% of next tokens.",
        autocompletion=complete_kv,
        rich_help_panel="Cache",
    ),
]
Memory = Annotated[
    str | None,
    Option(
        "--memory",
        help="With --kv auto: the most bits that fit into a machine of 12GB. Default: this one's.",
    ),
]
Context = Annotated[
    str | None,
    Option("--context", help="With --kv auto: the tokens that must fit: 64k. Default: 32k."),
]
AdapterPath = Annotated[
    str | None,
    Option(
        "--adapter-path",
        help="Folder of a LoRA adapter, as mlx_lm.lora writes it.",
        rich_help_panel="Model",
    ),
]
Dtype = Annotated[
    str | None, Option("--dtype", help="float32, float16 or bfloat16. Default: as stored.")
]
Weights = Annotated[
    int | None, Option("--weights", help="8: round 16-bit weights to 8 bits. Default: as stored.")
]
Strict = Annotated[
    bool, Option("--kv-strict", help="Refuse a model with layers that stay uncompressed.")
]
Calibration = Annotated[
    str | None,
    Option("--calibration", help="Calibration file. Default: the model's own."),
]
Json = Annotated[
    bool,
    Option(
        "--json", help="Make the last line of stdout one JSON document.", rich_help_panel="Output"
    ),
]
