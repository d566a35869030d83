"""Fine-tune `tiny` on dialogues, on CPUs: one process with one thread a core.

    PYTHONPATH=.:training python -m chat.train --out runs/tiny-chat --minutes 60

Processes compute gradients of rows of their own and average them, so that a core that does other work holds up
one wait a step and not one an operation. Matrices are multiplied in bfloat16, weights stay float32. `--resume`
goes on from the checkpoint, with the texts that the generator makes by then.
"""

import argparse
import csv
import os
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from random import Random

import export
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from data import sequences
from model import Model, attend, rotary, window_mask
from optim import orthogonal
from tokenizer import BOS, FastEncoder
from tokenizers import Tokenizer
from torch import Tensor

from chat.dialogues import dialogue
from mlxkv.texts.worlds.chat import messages
from mlxkv.texts.worlds.documents import render

START = Path("tests/data/tiny")
LENGTH, ROWS = 192, 12  # tokens a row of dialogues, rows a step and process
LONG = ((1024, 2), (2048, 1))  # rows of retrieval, by turns
EVERY = 24  # one step in so many reads long rows
LOG = ("step", "seconds", "tokens", "length", "lr", "loss_answers")


def rows(
    rng: Random, encode: FastEncoder, length: int = LENGTH
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield ids and weights (1 text, 2 answers) of length + 1: whole dialogues, the last one cut off."""
    ids: list[int] = []
    weights: list[int] = []
    while True:
        ids.append(BOS)
        weights.append(0)
        for weight, group in groupby(
            render(messages(dialogue(rng)), 2), key=lambda piece: piece[1]
        ):
            new = encode("".join(text for text, _ in group))
            ids += new
            weights += [weight] * len(new)
        if len(ids) > length:
            yield ids[: length + 1], weights[: length + 1]
            ids, weights = [], []


def batch(source: Iterator, count: int) -> tuple[Tensor, Tensor]:
    taken = [next(source) for _ in range(count)]
    return torch.tensor([row[0] for row in taken]), torch.tensor([row[1] for row in taken])


def attend_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`attend` by two plain products: for short rows and one key head, a CPU needs half the time of SDPA for it."""
    B, H, L, D = q.shape
    if L != LENGTH:
        return attend(q, k, v, mask)
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    scores = torch.bmm(q.reshape(B, H * L, D), k[:, 0].transpose(1, 2)).view(B, H, L, L)
    shares = (scores.float() * D**-0.5).masked_fill(later, float("-inf")).softmax(-1).to(v.dtype)
    return torch.bmm(shares.view(B, H * L, L), v[:, 0]).view(B, H, L, D)


def hidden(model: Model, ids: Tensor) -> Tensor:
    """`model(ids)`; long rows do not go through the compiled blocks, whose shapes are fixed."""
    if ids.shape[1] == LENGTH:
        return model(ids)
    x, length, c = model.embed(ids), ids.shape[1], model.config
    for block in model.model.layers:
        attention = block.self_attn
        local = attention.window is not None and length > attention.window
        mask = window_mask(length, attention.window, "cpu") if local else None
        x = block.forward(x, rotary(length, c.head_dim, attention.theta, "cpu"), mask)
    return model.model.norm(x)


def loss_of(model: Model, ids: Tensor, weights: Tensor) -> Tensor:
    """The mean loss on the tokens of answers."""
    with torch.autocast("cpu", torch.bfloat16):
        x, w, wanted = hidden(model, ids[:, :-1]), weights[:, 1:], ids[:, 1:]
        seen = w > 1
        logits = model.logits(x[seen])
    return F.cross_entropy(logits.float(), wanted[seen])


class Steps:
    """Muon for the matrices of the blocks, each process computing its share of them, and AdamW for the rest."""

    def __init__(self, model: Model, rank: int, world: int, muon: float, adam: float):
        self.rank, self.world, self.muon, self.adam = rank, world, muon, adam
        shapes: dict = {}
        for name, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in name:
                shapes.setdefault(p.shape, []).append(p)
        self.matrices = list(shapes.values())
        self.momenta = [torch.zeros(len(ps), *ps[0].shape) for ps in self.matrices]
        rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
        self.rest = torch.optim.AdamW(rest, lr=adam, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, share: float, momentum: float = 0.95, decay: float = 0.02) -> None:
        for params, held in zip(self.matrices, self.momenta, strict=True):
            grads = torch.stack([p.grad for p in params])
            held.lerp_(grads, 1 - momentum)
            mine = grads.lerp(held, momentum)[self.rank :: self.world]
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, orthogonal(mine).float().contiguous())
            rate = self.muon * share
            scale = rate * max(1.0, params[0].shape[0] / params[0].shape[1]) ** 0.5
            for n, p in enumerate(params):
                p.mul_(1 - rate * decay).add_(parts[n % self.world][n // self.world], alpha=-scale)
        for group in self.rest.param_groups:
            group["lr"] = self.adam * share
        self.rest.step()

    def state(self) -> dict:
        return {"momenta": self.momenta, "rest": self.rest.state_dict()}

    def restore(self, state: dict) -> None:
        self.momenta = state["momenta"]
        self.rest.load_state_dict(state["rest"])


def average(model: Model, world: int) -> None:
    """Average the gradients of all processes, and clip their norm to 1."""
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    flat *= min(1.0, 1.0 / (flat.norm().item() + 1e-6))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad.copy_(part.view_as(p.grad))


def rate(step: int, progress: float, warmup: int = 40, decay: float = 0.7) -> float:
    """A short warm-up, then linear decay over the last 70 % of the time."""
    return min(1.0, (step + 1) / warmup, max(0.01, (1 - progress) / decay))


def work(rank: int, world: int, args: argparse.Namespace) -> None:
    """One process of the training, in a session of its own: Linux shares cores among sessions first."""
    os.setsid()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    out, at, spent, tokens = Path(args.out), 0, 0.0, 0
    model = export.read(Path(args.init)).train()
    for block in model.model.layers:
        block.self_attn.attend = attend_short
    steps = Steps(model, rank, world, args.muon_lr, args.adam_lr)
    if args.resume and (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        steps.restore(saved["steps"])
        at, spent, tokens = saved["step"], saved["seconds"], saved["tokens"]
    if args.compile:
        for block in model.model.layers:
            block.compile(dynamic=False)
    encode = FastEncoder(Tokenizer.from_file(str(START / "tokenizer.json")))
    seed = f"chat-{args.seed}-{at}-{rank}"
    short = rows(Random(seed), encode)
    longs = [(sequences(Random(f"{seed}-{n}"), n, encode), count) for n, count in LONG]
    log = open(out / "log.csv", "a" if at else "w", newline="") if rank == 0 else None  # noqa: SIM115
    if log and not at:
        csv.writer(log).writerow(LOG)
    begun, kept = time.monotonic() - spent, time.monotonic()
    progress = torch.zeros(1)
    while True:
        now = time.monotonic() - begun
        progress[0] = now / (60 * args.minutes)
        dist.broadcast(progress, 0)
        if progress.item() >= 1:
            break
        turn = at // EVERY % len(LONG)
        source, count = longs[turn] if at % EVERY == EVERY - 1 else (short, ROWS)
        ids, weights = batch(source, count)
        loss = loss_of(model, ids, weights)
        loss.backward()
        average(model, world)
        share = rate(at, progress.item())
        steps.step(share)
        model.zero_grad(set_to_none=True)
        at, tokens = at + 1, tokens + world * ids.shape[0] * (ids.shape[1] - 1)
        if log and at % 5 == 0:
            row = at, f"{now:.0f}", tokens, ids.shape[1] - 1, f"{share:.3f}", f"{loss.item():.3f}"
            csv.writer(log).writerow(row)
            log.flush()
        if rank == 0 and time.monotonic() - kept > args.save_every:
            keep(out, model, steps, {"step": at, "tokens": tokens, "seconds": now})
            kept = time.monotonic()
    if rank == 0:
        keep(out, model, steps, {"step": at, "tokens": tokens, "seconds": now})
        (out / "done").write_text(f"{at} steps, {tokens} tokens, {now:.0f} seconds\n")
    dist.destroy_process_group()


def keep(out: Path, model: Model, steps: Steps, state: dict) -> None:
    """Write a checkpoint and a folder in the hub's format."""
    torch.save(
        {"model": model.state_dict(), "steps": steps.state()} | state, out / "checkpoint.new"
    )
    (out / "checkpoint.new").replace(out / "checkpoint.pt")
    export.write(model, START, out / "hub")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--init", default=str(START), help="hub folder to start from")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--compile", action="store_true", help="with torch.compile; needs a C++ compiler"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--muon-lr", type=float, default=0.005)
    parser.add_argument("--adam-lr", type=float, default=6e-4)
    parser.add_argument("--save-every", type=float, default=180, help="seconds")
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    mp.spawn(work, (args.processes, args), args.processes)


if __name__ == "__main__":
    main()
