"""The options of `mlxkv calibrate`: names, defaults and help texts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from mlxkv.calibration import TOKENS
from mlxkv.catalog.aliases import DEFAULT
from mlxkv.options import AdapterPath, Dtype, Model


@dataclass(frozen=True)
class CalibrateOptions:
    """The command line, in the order of `--help`."""

    model: Model = DEFAULT
    text: Annotated[
        list[str] | None,
        Option(
            "--text",
            help="Text files in UTF-8. Default: text that comes with mlxkv.",
            rich_help_panel="Model",
        ),
    ] = None
    tokens: Annotated[
        int, Option("--tokens", help="Tokens to read.", rich_help_panel="What to run")
    ] = TOKENS
    search_clip: Annotated[
        bool, Option("--search-clip", help="Search the clips of each layer on the text.")
    ] = False
    kv: Annotated[
        str | None,
        Option(
            "--kv",
            help="With --search-clip: comma-separated presets. Default: oscar-int2.",
            rich_help_panel="Cache",
        ),
    ] = None
    calibration: Annotated[
        str | None,
        Option("--calibration", help="With --search-clip: keep the rotations of this file."),
    ] = None
    learn: Annotated[
        str | None,
        Option("--learn", help="For learned presets: scale, rotation, householder, ...+scale."),
    ] = None
    bits: Annotated[
        int | None,
        Option("--bits", help="With --learn: of the codes. Default: 4.", rich_help_panel="Model"),
    ] = None
    out: Annotated[
        str | None,
        Option(
            "-o",
            "--out",
            help="File. Default: where presets look for it.",
            rich_help_panel="Output",
        ),
    ] = None
    adapter_path: AdapterPath = None
    dtype: Dtype = None

    @property
    def learning(self) -> dict[str, Any]:
        """Return the given options of learned transforms, as arguments of `Learned`."""
        named = {"variant": self.learn, "bits": self.bits}
        return {k: v for k, v in named.items() if v is not None}
