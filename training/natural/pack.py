"""Pack a hub folder to 8 bits a weight, in mlx's format, cut into parts; join them again.

    python -m natural.pack FOLDER OUT            # OUT/NAME.part00 ..., each of at most 15.5 MiB
    python -m natural.pack join NAME.part* OUT   # a folder that mlx-lm loads

Matrices are stored as MLX's `affine` mode stores them: 8-bit codes in groups of 64 along a row,
four codes in a 32-bit word from the lowest byte up, with w = scale * code + bias.
"""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BITS, PART = 64, 8, 15_500 * 1024
QUANTIZATION = {"group_size": GROUP, "bits": BITS, "mode": "affine"}


def quantize(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return words [rows, columns / 4] uint32, and scales and biases [rows, columns / 64] bfloat16.

    The bias is rounded down and the scale up, so that no weight of a group lies outside its codes.
    """
    groups = w.float().unflatten(-1, (-1, GROUP))
    low = groups.amin(-1)
    bias = low.bfloat16()
    bias = torch.where(bias.float() > low, (low - low.abs() / 128).bfloat16(), bias)
    wanted = (groups.amax(-1) - bias.float()) / (2**BITS - 1)
    scale = wanted.bfloat16()
    scale = torch.where(scale.float() < wanted, (wanted * (1 + 1 / 128)).bfloat16(), scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = ((groups - bias.float()[..., None]) / scale.float()[..., None]).round()
    codes = codes.clamp(0, 2**BITS - 1).to(torch.uint8).flatten(-2)
    words = np.ascontiguousarray(codes.numpy()).view("<u4")
    return torch.from_numpy(words.view(np.int32)).view(torch.uint32), scale, bias


def packed(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files of the quantised folder."""
    tensors: dict[str, Tensor] = {}
    for name, w in load_file(folder / "model.safetensors").items():
        if w.dim() == 2 and w.shape[1] % GROUP == 0:
            stem = name.removesuffix(".weight")
            tensors[name], tensors[f"{stem}.scales"], tensors[f"{stem}.biases"] = quantize(w)
        else:
            tensors[name] = w
    out = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"
    }
    config = json.loads(out["config.json"]) | {
        "quantization": QUANTIZATION,
        "quantization_config": QUANTIZATION,
    }
    out["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    holder = folder / "packed.safetensors.new"
    save_file(tensors, holder, metadata={"format": "mlx"})
    out["model.safetensors"] = holder.read_bytes()
    holder.unlink()
    return out


def pack(folder: Path, out: Path, name: str) -> list[Path]:
    """Write the quantised folder as parts of one tar file; returns the parts."""
    out.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for file, content in packed(folder).items():
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    content, parts = stream.getvalue(), []
    for n, start in enumerate(range(0, len(content), PART)):
        parts.append(out / f"{name}.part{n:02}")
        parts[-1].write_bytes(content[start : start + PART])
    return parts


def join(parts: list[Path], out: Path) -> None:
    """Unpack parts, in the order of their names, to a folder."""
    stream = io.BytesIO(b"".join(part.read_bytes() for part in sorted(parts)))
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=stream) as tar:
        tar.extractall(out, filter="data")


def main(*args: str) -> None:
    if args[0] == "join":
        join([Path(part) for part in args[1:-1]], Path(args[-1]))
        return
    folder, out = Path(args[0]), Path(args[1])
    name = folder.name if folder.name != "hub" else folder.resolve().parent.name
    for part in pack(folder, out, name):
        print(f"{part} {part.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
