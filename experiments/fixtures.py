"""TINY and QWEN: paths of the two small trained models of tests/data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from small_models import QWEN, TINY  # noqa: E402, F401
