"""Run by test_cuda_parallel.py: a random model by two processes, one kv head each, beside one
process. Its last line is JSON.

A process of its own, so that it may fork before anything of it has threads; forked, so that torch and
transformers are imported once.
"""

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import COPIED, TINY
from transformers import Qwen2Config, Qwen2ForCausalLM

from cuda_track.calibrate import calibrate
from mlxkv.errors import UserError
from mlxkv.torch import attach, detach, handed, load, new_cache

PRESETS = ("balanced-int3", "static-0.75+int4")
DECODED = 6


def write_model(folder: Path) -> Path:
    """Three narrow layers of Qwen2 with two kv heads of 128 dims, and the tokenizer of TINY."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=3072, hidden_size=512, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=[4, 2], pad_token_id=0,
    )  # fmt: skip
    made = Qwen2ForCausalLM(config).half()
    for name, p in made.named_parameters():
        p.data += (0.1 if "norm" in name else 0.05) * torch.randn_like(p)
    made.save_pretrained(folder)
    for name in COPIED:
        shutil.copyfile(Path(TINY) / name, folder / name)
    return folder


def codes_of(cache) -> list[torch.Tensor]:
    """Of every layer and side, as bytes [B, G, T, ...]."""
    pages = (
        layer.cache.state["pages"][side] for layer in cache.layers for side in ("keys", "values")
    )
    return [x["codes"].contiguous().view(torch.uint8) for x in pages]


@torch.no_grad()
def run(model, kv: str, ids: torch.Tensor, calibration):
    attach(model, kv, calibration)
    cache, out = new_cache(model), []
    logits = model(ids, **handed(cache)).logits[:, -1]
    first, codes = logits, codes_of(cache)
    while len(out) < DECODED:
        out.append(int(logits.argmax()))
        logits = model(torch.tensor([out[-1:]]), **handed(cache)).logits[:, -1]
    return first, codes, out


def worker(rank: int, loaded, ids, calibration, alone: dict, folder: Path) -> None:
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = loaded.model
    # Shared weights are sharded before they are tied, in `from_pretrained`, which needs accelerate.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=2))
    model = type(model).maybe_distribute_model(model, config, mesh)
    found = {"mlx": "mlx.core" in sys.modules}
    for kv, (first, codes, text) in alone.items():
        logits, own, out = run(model, kv, ids, calibration)
        right = [x[:, rank : rank + 1] for x in codes]
        pairs = list(zip(own, right, strict=True))
        found[kv] = {
            "heads": sorted({x.shape[1] for x in own}),
            "logits": float((logits - first).abs().max()),
            "bytes": sum(x.numel() for x in own),
            "differ": sum(int((x != y).sum()) for x, y in pairs),
            "text": out == text,
        }
    for kv in ("oja-0.75+int4", "int4+keep0.5"):
        try:
            attach(model, kv)
        except UserError as error:
            found[kv] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    loaded = load(str(write_model(folder / "model")), "fp16", "float32")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 3000, (1, 330), generator=random)
    calibration = calibrate(loaded, torch.randint(5, 3000, (600,), generator=random).tolist())
    alone = {kv: run(loaded.model, kv, ids, calibration) for kv in PRESETS}
    detach(loaded.model)
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=worker, args=(rank, loaded, ids, calibration, alone, folder))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    print(json.dumps([json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
