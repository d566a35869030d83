"""Store a trained folder in 8 bits, groups of 32, as mlx-lm does: embeddings and all matrices; norms stay fp16.

PYTHONPATH=.:training python -m chat.pack runs/tiny-chat/hub mlxkv/models/embedded/tiny-chat
"""

import json
import shutil
import sys
from pathlib import Path

from mlx_lm.utils import load_model, quantize_model, save_model

BITS, GROUP = 8, 32  # 736, the width of the MLP, is a multiple of 32
SAME = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def pack(source: Path, out: Path) -> int:
    """Quantize the model of a folder into another one. Returns the bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    model, config = load_model(source)
    model, _ = quantize_model(model, config, GROUP, BITS)
    save_model(out, model)
    (out / "model.safetensors.index.json").unlink(missing_ok=True)  # one file
    stored = json.loads((source / "config.json").read_text())
    stored["quantization"] = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    (out / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
    for name in SAME:
        shutil.copyfile(source / name, out / name)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    return weights.stat().st_size


if __name__ == "__main__":
    print(f"{pack(*map(Path, sys.argv[1:])):,} bytes")
