"""Store a trained folder in 8 bits, and its MLPs in 6, as mlx-lm does; norms and biases stay fp16.

    PYTHONPATH=.:training python training/pack.py runs/tiny/hub tests/data/tiny
    PYTHONPATH=.:training python training/pack.py average runs/one/hub runs/other/hub runs/mean     # float16, before

Groups of 64 (half a bit a weight), and of 32 where a width is no multiple of 64. MLPs hold over half of the weights.
Prints the bytes, and the mean KL of the stored model from the trained one on 1,500 tokens of stories.
"""

import json
import shutil
import sys
from itertools import islice
from pathlib import Path
from random import Random

import mlx.core as mx
from mlx_lm.utils import load_model, load_tokenizer, quantize_model, save_model

from mlxkv.texts.worlds import stories

BITS, MLP, GROUP, SMALL = 8, 6, 64, 32
SAME = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def how(path: str, module) -> dict:
    """How mlx-lm is to store a module that it can quantize."""
    size = GROUP if module.weight.shape[-1] % GROUP == 0 else SMALL
    return {"group_size": size, "bits": MLP if ".mlp." in path else BITS, "mode": "affine"}


def pack(source: Path, out: Path) -> int:
    """Quantize the model of a folder into another one. Returns the bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    model, config = load_model(source)
    model, config = quantize_model(model, config, SMALL, BITS, quant_predicate=how)
    usual = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    others = {name: x for name, x in config["quantization"].items() if isinstance(x, dict)}
    made = usual | {name: x for name, x in others.items() if x != usual}
    save_model(out, model)
    (out / "model.safetensors.index.json").unlink(missing_ok=True)  # one file
    stored = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(stored | {"quantization": made}, indent=2) + "\n")
    for name in SAME:
        if (source / name).resolve() != (out / name).resolve():
            shutil.copyfile(source / name, out / name)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    return weights.stat().st_size


def divergence(source: Path, out: Path, tokens: int = 1500) -> float:
    """The mean KL, in nats, of the next tokens of a packed folder from those of the folder it was made of."""
    text = "\n\n".join(islice(stories(Random("pack")), tokens // 20))
    ids = mx.array([load_tokenizer(source).encode(text)[:tokens]])
    logs = []
    for folder in (source, out):
        model, _ = load_model(folder)
        model.set_dtype(mx.float32)
        logits = model(ids)[0]
        logs.append(logits - mx.logsumexp(logits, -1, keepdims=True))
    return (mx.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean().item()


def average(*folders: Path) -> None:
    """Write the mean of the float16 weights of all folders but the last one into the last one."""
    *sources, out = folders
    out.mkdir(parents=True, exist_ok=True)
    read = [mx.load(str(source / "model.safetensors")) for source in sources]
    mean = {name: sum(w[name].astype(mx.float32) for w in read) / len(read) for name in read[0]}
    weights = {name: w.astype(mx.float16) for name, w in mean.items()}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    for name in ("config.json", *SAME):
        shutil.copyfile(sources[0] / name, out / name)


if __name__ == "__main__":
    if sys.argv[1] == "average":
        average(*map(Path, sys.argv[2:]))
    else:
        there, here = map(Path, sys.argv[1:])
        print(f"{pack(there, here):,} bytes, KL {divergence(there, here):.2g}")
