"""TINY, the small trained model of tests/data (gemma3_text): the path of its folder in full precision, calibrated.

It is kept in 8 and 6 bits, as MLX packs them, to be small. This module decodes it once, into tests/data/.decoded,
which Git ignores: torch reads the result as well as MLX. Weights are float32, which CPUs multiply ten times as fast
as float16.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import FORMAT

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "data" / "tiny"
WEIGHTS, CALIBRATION = "model.safetensors", f"{artifact.NAME}.safetensors"
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def decode() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json without quantization, and the weights by name, in float32.

    A code q of a group with scale s and bias b is s q + b, rounded to float16.
    """
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    usual, packed, out = config.pop("quantization"), load_file(SOURCE / WEIGHTS), {}
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
    config["torch_dtype"] = "float32"
    return config, {name: x.astype(np.float32) for name, x in out.items()}


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack rows of 32-bit words into codes, float32 [rows, columns]: a stream of bits, the lowest first."""
    stream = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (2.0 ** np.arange(bits)).astype(np.float32)


def _folder() -> str:
    """Decode and calibrate SOURCE where no earlier process has; return the path of the result."""
    out = SOURCE.parent / ".decoded" / f"{FORMAT}-float32" / "tiny"
    if out.is_dir():
        return str(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as base:
        part = Path(base) / out.name
        part.mkdir()
        config, weights = decode()
        (part / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        for file in COPIED:
            shutil.copyfile(SOURCE / file, part / file)
        _calibrate(part)
        try:
            part.rename(out)
        except OSError:  # another process was first
            if not out.is_dir():
                raise
    return str(out)


def _calibrate(folder: Path) -> None:
    """Calibrate in another process: this one may have to fork, or to choose how MLX multiplies."""
    command = [sys.executable, "-m", "mlxkv", "calibrate", "--model", folder, "--tokens", "1024"]
    command += ["-o", folder / CALIBRATION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


TINY = _folder()


def story_tokens(loaded, count: int) -> list[int]:
    """Return `count` tokens of stories that TINY was not trained on, without BOS."""
    text = (SOURCE / "stories.txt").read_text(encoding="utf-8")
    tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) >= count
    return tokens[:count]
