"""Write a model as a folder in the hub's format, which transformers and mlx-lm load.

python training/export.py CHECKPOINT TOKENIZER_FOLDER OUT_FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from configs import Config
from model import Model
from safetensors.torch import load_file, save_file
from torch import Tensor

OUTPUT = "lm_head.weight"
GENERATION = {"bos_token_id": 1, "eos_token_id": [4, 2], "pad_token_id": 0, "do_sample": False}


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Round weights to float16: three bits more than bfloat16, and no tiny weight comes near its range.

    The gains of q_norm and k_norm, stored as gain - 1, become multiples of 1/128.
    """
    out = {}
    for name, w in weights.items():
        w = w.detach().float().cpu()
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            w = ((w + 1) * 128).round() / 128 - 1
        out[name] = w.half().contiguous()
    return out


def write(model: Model, tokenizer: Path, out: Path) -> None:
    """Write config, weights, tokenizer and generation settings of a model to a folder."""
    write_weights(model.config, model.state_dict(), tokenizer, out)


def write_weights(config: Config, weights: dict[str, Tensor], tokenizer: Path, out: Path) -> None:
    """Write a folder in the hub's format, with weights in `config.dtype`."""
    out.mkdir(parents=True, exist_ok=True)
    if config.dtype == "float16":
        stored = rounded(weights)
    else:
        dtype = getattr(torch, config.dtype)
        stored = {name: w.detach().cpu().to(dtype).contiguous() for name, w in weights.items()}
    if config.latent:  # mlx-lm's class reads an output matrix of its own
        stored[OUTPUT] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config.hub(), indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copyfile(tokenizer / name, out / name)


def read(folder: Path, device: str = "cpu") -> Model:
    """Read the model of a hub folder, in float32, decoded where it is stored in fewer bits."""
    config = json.loads((folder / "config.json").read_text())
    model = Model(Config.from_hub(config))
    if "quantization" in config:
        from small_models import decode  # tests/support

        weights = {name: torch.from_numpy(w) for name, w in decode(folder)[1].items()}
    else:
        weights = load_file(folder / "model.safetensors")
    weights.pop(OUTPUT, None)  # the input's
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return model.to(device).eval()


def main(checkpoint: str, tokenizer: str, out: str) -> None:
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)
    model = Model(saved["config"])
    model.load_state_dict(saved["model"])
    write(model, Path(tokenizer), Path(out))
    print(f"{out}: {(Path(out) / 'model.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
