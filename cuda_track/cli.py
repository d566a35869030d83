"""Options that the commands share."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def parser(text: str | None, kv: str = "int4", reads: bool = False) -> ArgumentParser:
    """Return a parser with the options of a model and its cache. kv: default. reads: the command reads texts, too."""
    out = ArgumentParser(description=text)
    out.add_argument("--model", default="", help="a folder, or owner/name on the hub")
    out.add_argument("--kv", default=kv, help="preset, or KEYS/VALUES")
    out.add_argument("--dtype", help="float32, float16 or bfloat16")
    out.add_argument("--device", help="cuda, cpu, ...")
    out.add_argument("--calibration", help="file of a calibration")
    if reads:
        out.add_argument(
            "--text", type=Path, action="append", default=[], help="UTF-8; by default mlxkv's own"
        )
    return out
