"""Options that the commands share."""

from __future__ import annotations

from argparse import ArgumentParser


def parser(text: str | None, kv: str = "int4") -> ArgumentParser:
    out = ArgumentParser(description=text)
    out.add_argument("--model", default="", help="a folder, or owner/name on the hub")
    out.add_argument("--kv", default=kv, help="preset, or KEYS/VALUES")
    out.add_argument("--dtype", help="float32, float16 or bfloat16")
    out.add_argument("--device", help="cuda, cpu, ...")
    out.add_argument("--calibration", help="file of a calibration")
    return out
