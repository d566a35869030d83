"""Train `tiny-chat` on one GPU: plain torch, bf16 products over float32 weights, text from worker processes.

    PYTHONPATH=.:training python -m chat.gpu --init mlxkv/models/embedded/tiny-chat --out runs/tiny-chat-gpu --minutes 5

The rows and the loss are those of `chat.train`; a step is five times as large. Writes log.csv and hub/.
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from random import Random

import export
import torch
import torch.nn.functional as F
from data import Batches, Row, sequences
from model import Model
from optim import optimizers
from parts import rotary
from tokenizer import FastEncoder
from tokenizers import Tokenizer
from torch import Tensor

from chat.train import LENGTH, START, rows

# One step in 24 reads long texts, so that facts in them are still found.
SCHEDULE = ((0.0, {LENGTH: 46, 1024: 1, 2048: 1}),)
LOG = ("step", "seconds", "tokens", "length", "lr", "loss_answers", "loss_unseen")
UNSEEN = 96  # rows of dialogues of a seed of their own


def chats(tokenizer_file: str, seed: str, lengths: set[int]) -> dict[int, Iterator[Row]]:
    """Return endless rows: dialogues in the short ones, documents of the worlds in the long ones."""
    encode = FastEncoder(Tokenizer.from_file(tokenizer_file))
    return {
        n: rows(Random(f"{seed}-{n}"), encode)
        if n == LENGTH
        else sequences(Random(f"{seed}-{n}"), n, encode)
        for n in lengths
    }


@lru_cache(maxsize=8)
def windowed(length: int, window: int, device: str) -> Tensor:
    """Return which keys a query sees: [length, length]."""
    at = torch.arange(length, device=device)
    return (at[:, None] >= at) & (at[:, None] - at < window)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend as `parts.attend` does, with the keys repeated: fused kernels take no mask together with shared keys."""
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def loss_of(model: Model, ids: Tensor, weights: Tensor) -> Tensor:
    """The mean loss on the tokens of answers; ids and weights: [B, L + 1]."""
    x, length, device = model.embed(ids[:, :-1]), ids.shape[1] - 1, str(ids.device)
    for block in model.model.layers:
        attention = block.self_attn
        rope = rotary(length, model.config.head_dim, attention.theta, device)
        local = attention.window is not None and length > attention.window
        x = block(x, rope, windowed(length, attention.window, device) if local else None)
    seen = weights[:, 1:] > 1
    logits = model.logits(model.model.norm(x[seen]))
    return F.cross_entropy(logits.float(), ids[:, 1:][seen])


def rate(step: int, progress: float, warmup: int = 60, decay: float = 0.75) -> float:
    """A short warm-up, then linear decay over the last three quarters of the time, down to nothing."""
    return min(1.0, (step + 1) / warmup, max(0.0, (1 - progress) / decay))


def moved(batch: tuple, device: str) -> tuple[Tensor, Tensor]:
    ids, weights = (torch.from_numpy(x) for x in (batch[0].astype("int64"), batch[1]))
    return ids.to(device, non_blocking=True), weights.to(device, non_blocking=True)


def unseen(encode: FastEncoder, device: str) -> tuple[Tensor, Tensor]:
    """Return rows of dialogues that no worker makes."""
    source = rows(Random("unseen"), encode)
    taken = [next(source) for _ in range(UNSEEN)]
    return tuple(torch.tensor([row[i] for row in taken], device=device) for i in (0, 1))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    out, device = Path(args.out), args.device
    out.mkdir(parents=True, exist_ok=True)
    model = export.read(Path(args.init), device).train()
    for block in model.model.layers:
        block.self_attn.attend = attend
        if args.compile:
            block.compile(dynamic=False)
    opts = optimizers(model, args.muon_lr, args.adam_lr)
    base = [[group["lr"] for group in opt.param_groups] for opt in opts]
    tokenizer = str(START / "tokenizer.json")
    held = unseen(FastEncoder(Tokenizer.from_file(tokenizer)), device)
    batches = Batches(partial(chats, tokenizer), args.seed, args.batch, args.workers, SCHEDULE)
    half = torch.autocast(device, torch.bfloat16)
    step = tokens = 0
    begun = time.monotonic()
    with open(out / "log.csv", "w", newline="") as file:
        log = csv.writer(file)
        log.writerow(LOG)
        while (now := time.monotonic() - begun) < 60 * args.minutes:
            share = rate(step, now / (60 * args.minutes))
            for opt, rates in zip(opts, base, strict=True):
                for group, lr in zip(opt.param_groups, rates, strict=True):
                    group["lr"] = lr * share
            ids, weights = moved(next(batches), device)
            with half:
                loss = loss_of(model, ids, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + ids.shape[0] * (ids.shape[1] - 1)
            if step % args.log_every == 0:
                with half, torch.no_grad():
                    other = loss_of(model, *held).item()
                if not math.isfinite(loss.item()):
                    raise FloatingPointError(f"[chat.gpu] the loss is {loss.item()} at step {step}")
                row = (step, f"{now:.1f}", tokens, ids.shape[1] - 1, f"{share:.3f}")
                log.writerow((*row, f"{loss.item():.4f}", f"{other:.4f}"))
                file.flush()
                print(*row, f"{loss.item():.4f}", f"{other:.4f}", flush=True)
    batches.close()
    export.write(model, START, out / "hub")
    (out / "done").write_text(f"{step} steps, {tokens} tokens, {now:.0f} seconds\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--init", default=str(START), help="hub folder to start from")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--batch", type=int, default=24576, help="tokens a step")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="needs a C compiler")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=50)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
