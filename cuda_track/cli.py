"""Options that the commands share, and faults in one line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable

from mlxkv.errors import MachineError, UserError


def parser(text: str) -> ArgumentParser:
    return ArgumentParser(description=text)


def model_options(parser: ArgumentParser, kv: str = "int4") -> None:
    parser.add_argument("--model", default="", help="a folder, or owner/name on the hub")
    parser.add_argument("--kv", default=kv, help="preset, or KEYS/VALUES")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16")
    parser.add_argument("--device", help="cuda, cpu, ...")
    parser.add_argument("--calibration", help="file of a calibration")


def note(text: str) -> None:
    """Print to stderr, beside the result."""
    print(text, file=sys.stderr)


def run(main: Callable[[], None]) -> None:
    """Run a command. Exits with 2 for a user's mistake, 1 for the machine's, without a traceback."""
    try:
        main()
    except UserError as error:
        note(str(error))
        sys.exit(2)
    except MachineError as error:
        note(str(error))
        sys.exit(1)
