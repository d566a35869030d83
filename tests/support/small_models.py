"""Two small trained models of tests/data, TINY (gemma3_text) and QWEN (qwen2): paths of folders in 16 bits.

They are kept in 8 and 6 bits, as MLX packs them, to be small, and stand for models in full precision. This module
decodes each once, into tests/data/.decoded, which Git ignores: torch reads the result as well as MLX.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mlxkv.formats.calibration import artifact
from mlxkv.models.catalog.fingerprint import fingerprint
from mlxkv.models.catalog.folder import check

DATA = Path(__file__).parents[1] / "data"
WEIGHTS, CALIBRATION = "model.safetensors", f"{artifact.NAME}.safetensors"
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def decode(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json without quantization, and the weights by name, affine codes as float16.

    A code q of a group with scale s and bias b is s q + b, computed in float32 and rounded once.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    usual, packed, out = config.pop("quantization"), load_file(folder / WEIGHTS), {}
    for name, x in packed.items():
        stem, _, part = name.rpartition(".")
        if part == "weight" and x.dtype == np.uint32:
            bits = usual.get(stem, usual)["bits"]
            pair = (packed[f"{stem}.{kind}"] for kind in ("scales", "biases"))
            scales, biases = (y.astype(np.float32)[..., None] for y in pair)
            groups = _codes(x, bits).reshape(*scales.shape[:-1], -1)
            out[name] = (scales * groups + biases).astype(np.float16).reshape(len(x), -1)
        elif part not in ("scales", "biases"):
            out[name] = x
    return config, out


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack rows of 32-bit words into codes, float32 [rows, columns]: a stream of bits, the lowest first."""
    stream = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (2.0 ** np.arange(bits)).astype(np.float32)


def _folder(name: str) -> str:
    """Decode DATA/name where no earlier process has; return the path of the result."""
    out = DATA / ".decoded" / name
    if not out.is_dir():
        out.parent.mkdir(exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=out.parent))
        config, weights = decode(DATA / name)
        (part / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        for file in COPIED:
            shutil.copyfile(DATA / name / file, part / file)
        made = artifact.read(DATA / name / CALIBRATION)
        artifact.write(part / CALIBRATION, replace(made, fingerprint=fingerprint(check(part))))
        try:
            part.rename(out)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return str(out)


TINY, QWEN = map(_folder, ("tiny", "tiny-qwen"))


def story_tokens(loaded, count: int) -> list[int]:
    """Return `count` tokens of stories that the models were not trained on, without BOS."""
    text = (DATA / "tiny" / "stories.txt").read_text(encoding="utf-8")
    tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) >= count
    return tokens[:count]
