"""`python -m mlxkv` is the `mlxkv` command."""

import sys

from mlxkv.cli import main

sys.exit(main())
