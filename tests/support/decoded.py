"""Embedded models as they were before they were packed, with which MLX on a CPU is several times faster."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import dequantize_model
from safetensors.numpy import save_file

from mlxkv.formats.calibration import artifact
from mlxkv.models import Loaded, load
from mlxkv.models.catalog.aliases import EMBEDDED
from mlxkv.models.catalog.fingerprint import fingerprint
from mlxkv.models.catalog.folder import check
from mlxkv.models.catalog.weights import stored


def loaded(name: str, kv: str) -> Loaded:
    """A model with its weights decoded, in float32."""
    found = load(name, kv)
    found.model = dequantize_model(found.model)
    found.model.set_dtype(mx.float32)
    return found


@cache
def folder(name: str) -> Path:
    """Write a folder of float16 with its calibration, for as long as this process lives."""
    source, out = EMBEDDED[name].folder, Path(tempfile.mkdtemp(prefix="decoded-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    save_file(stored.decode(source), out / "model.safetensors", metadata={"format": "pt"})
    config = stored.plain(json.loads((source / "config.json").read_text(encoding="utf-8")))
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / file, out / file)
    made = artifact.read(source / f"{artifact.NAME}.safetensors")
    artifact.write(
        out / f"{artifact.NAME}.safetensors", replace(made, fingerprint=fingerprint(check(out)))
    )
    return out
