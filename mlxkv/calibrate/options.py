"""The options of `mlxkv calibrate`: names, defaults and help texts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from mlxkv.models.calibration import TOKENS
from mlxkv.models.catalog.aliases import DEFAULT


@dataclass(frozen=True)
class CalibrateOptions:
    """The command line, in the order of `--help`."""

    model: Annotated[
        str,
        Option(
            "--model", "-m", help="An alias (mlxkv models), a hub name, a folder or a GGUF file."
        ),
    ] = DEFAULT
    text: Annotated[
        list[str] | None,
        Option("--text", help="Text files in UTF-8. Default: text that comes with mlxkv."),
    ] = None
    tokens: Annotated[int, Option("--tokens", help="Tokens to read.")] = TOKENS
    per_layer: Annotated[
        bool, Option("--per-layer", help="One rotation for all kv heads of a layer.")
    ] = False
    target: Annotated[
        str, Option("--target", help="attention, or for ablations: surrogate tensor random none.")
    ] = "attention"
    parts: Annotated[
        str, Option("--parts", help="Parts of the rotation: u, h, p; uhp is all of it.")
    ] = "uhp"
    search_clip: Annotated[
        bool, Option("--search-clip", help="Search the clips of each layer on the text.")
    ] = False
    kv: Annotated[
        str | None,
        Option("--kv", help="Presets to search clips for, with commas. Default: oscar-int2."),
    ] = None
    calibration: Annotated[
        str | None,
        Option("--calibration", help="With --search-clip: keep the rotations of this file."),
    ] = None
    learn: Annotated[
        str | None,
        Option("--learn", help="For learned presets: scale, rotation, householder, ...+scale."),
    ] = None
    base: Annotated[
        str | None, Option("--base", help="With --learn, before it: srft (default) or none.")
    ] = None
    bits: Annotated[
        int | None, Option("--bits", help="With --learn: of the codes. Default: 4.")
    ] = None
    group: Annotated[
        int | None, Option("--group", help="With --learn: of the codes. Default: 64.")
    ] = None
    steps: Annotated[int | None, Option("--steps", help="With --learn: of Adam. Default: 300.")] = (
        None
    )
    out: Annotated[
        str | None, Option("-o", "--out", help="File. Default: where calibrated presets look.")
    ] = None
    dtype: Annotated[
        str | None, Option("--dtype", help="float32, float16 or bfloat16. Default: as stored.")
    ] = None
    json: Annotated[
        bool, Option("--json", help="Make the last line of stdout one JSON document.")
    ] = False

    @property
    def learning(self) -> dict[str, str | int]:
        """The options of learned transforms that were given, as arguments of `Learned`."""
        named = {"variant": self.learn, "base": self.base, "bits": self.bits, "group": self.group}
        return {k: v for k, v in {**named, "steps": self.steps}.items() if v is not None}
