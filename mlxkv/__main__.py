"""The `mlxkv` command, also `python -m mlxkv`."""

import sys


def main() -> int:
    """Run a command and return its exit code; Ctrl-C ends it in silence while it is imported, too."""
    try:
        from mlxkv import startup

        startup.prepare()
        from mlxkv.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
