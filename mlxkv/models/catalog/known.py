"""Shapes and sizes of the models that the aliases of the hub name: `fit` and `bench` need no network. known.json has
the keys of config.json that decide them, by alias; where transformers' own defaults are a published model's, these are
the values. No framework is imported here."""

from __future__ import annotations

import json
from pathlib import Path

# As the conversions that the aliases name are quantised.
QUANTIZATION = {"bits": 4, "group_size": 64}
CONFIGS: dict[str, dict] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
