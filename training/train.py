"""Train one of the models within a budget of minutes.

    python training/train.py tiny --minutes 20 --tokenizer tests/data/tiny --out runs/tiny

Writes log.csv, checkpoint.pt (--resume continues from it) and hub/ (the exported model).
"""

import argparse
import csv
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import export
import torch
import torch.nn.functional as F
from configs import CONFIGS, Config
from data import SCHEDULE, Batches
from model import Model
from optim import optimizers
from torch import Tensor

LOG = ("step", "seconds", "tokens", "length", "lr", "loss_text", "loss_answers")


def weighted_loss(
    hidden: Tensor, embedding: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and the mean loss on plain text and on answers.

    hidden: [B, L, width], embedding: [vocab, width], ids and weights: [B, L + 1].
    """
    logits = F.linear(hidden, embedding).flatten(0, 1).float()
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten().float()
    text, answers = (w == 1).float(), (w > 1).float()
    seen = each.detach()
    return (
        (each * w).sum() / w.sum(),
        (seen * text).sum() / text.sum(),
        (seen * answers).sum() / answers.sum().clamp(min=1),
    )


def rate(step: int, progress: float, warmup: int = 100, decay: float = 0.4) -> float:
    """Return the share of the full learning rate: a short warm-up, then linear decay over the last part."""
    return min(1.0, (step + 1) / warmup, max(0.02, (1 - progress) / decay))


def save(path: Path, model: Model, opts: list, state: dict) -> None:
    """Write a checkpoint next to the old one, then replace it."""
    saved = {
        "model": model.state_dict(),
        "opts": [o.state_dict() for o in opts],
        "config": model.config,
    }
    torch.save(saved | state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def compiled(model: Model, loss_of, batch: int, device: str, cast):
    """Compile the blocks and the loss, and run both at every length of the schedule. Returns the loss to call.

    Where nothing can be compiled (no C compiler, no Python.h) the model stays as it is, and stderr says why.
    """
    torch._dynamo.config.cache_size_limit = 64
    for block in model.model.layers:
        block.compile(dynamic=False)
    made, embedding = torch.compile(loss_of, dynamic=False), model.model.embed_tokens.weight
    try:
        for length in sorted({n for _, shares in SCHEDULE for n in shares}):
            ids = torch.ones(max(1, batch // length), length + 1, dtype=torch.long, device=device)
            weights = torch.ones(ids.shape, dtype=torch.uint8, device=device)
            with cast:
                loss, *_ = made(model(ids[:, :-1]), embedding, ids, weights)
            loss.backward()
    except Exception as error:  # a compiler may raise anything at all
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(f"[train] nothing is compiled, which is slower; {reason}", file=sys.stderr)
        for block in model.model.layers:
            block._compiled_call_impl = None
        made = loss_of
    model.zero_grad(set_to_none=True)
    return made


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config: Config = CONFIGS[args.model]
    model = export.read(Path(args.init)) if args.init else Model(config)
    model = model.to(device).train()
    embedding = model.model.embed_tokens.weight
    autocast = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    loss_of = weighted_loss
    if device == "cuda":  # before the clock starts
        loss_of = compiled(model, weighted_loss, args.batch, device, autocast)
    opts = optimizers(model, args.muon_lr, args.adam_lr)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    step, tokens, spent = 0, 0, 0.0
    if args.resume and (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["opts"], strict=True):
            opt.load_state_dict(state)
        step, tokens, spent = saved["step"], saved["tokens"], saved["seconds"]
    # After a resume the workers get other seeds, so no text comes twice.
    tokenizer = Path(args.tokenizer)
    batches = Batches(
        str(tokenizer / "tokenizer.json"), args.seed + 1000 * step, args.batch, args.workers
    )
    log = open(out / "log.csv", "a" if step else "w", newline="")  # noqa: SIM115 - open until the end
    rows = csv.writer(log)
    if not step:
        rows.writerow(LOG)
    base = [[group["lr"] for group in opt.param_groups] for opt in opts]
    start, saved_at = time.monotonic() - spent, time.monotonic()
    budget = 60 * args.minutes
    while (now := time.monotonic() - start) < budget:
        progress = batches.progress.value = args.begin + (1 - args.begin) * now / budget
        share = rate(step, progress)
        for opt, rates in zip(opts, base, strict=True):
            for group, lr in zip(opt.param_groups, rates, strict=True):
                group["lr"] = lr * share
        ids, weights = next(batches)
        ids = torch.from_numpy(ids.astype("int64")).to(device, non_blocking=True)
        weights = torch.from_numpy(weights).to(device, non_blocking=True)
        with autocast:
            loss, text, answers = loss_of(model(ids[:, :-1]), embedding, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.shape[0] * (ids.shape[1] - 1)
        if step % args.log_every == 0 or step <= 3:
            values = (f"{text.item():.4f}", f"{answers.item():.4f}")
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"[train] the loss is {loss.item()} at step {step}")
            rows.writerow((step, f"{now:.1f}", tokens, ids.shape[1] - 1, f"{share:.3f}", *values))
            log.flush()
        if time.monotonic() - saved_at > args.save_every:
            save(
                out / "checkpoint.pt", model, opts, {"step": step, "tokens": tokens, "seconds": now}
            )
            export.write(model, tokenizer, out / "hub")
            saved_at = time.monotonic()
    batches.close()
    save(out / "checkpoint.pt", model, opts, {"step": step, "tokens": tokens, "seconds": now})
    export.write(model, tokenizer, out / "hub")
    (out / "done").write_text(f"{step} steps, {tokens} tokens, {now:.0f} seconds\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=tuple(CONFIGS))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", required=True)
    parser.add_argument("--init", help="hub folder to start from")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--begin", type=float, default=0.0, help="where in the schedule to begin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=65536, help="tokens a step")
    parser.add_argument("--workers", type=int, default=7)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=float, default=60, help="seconds")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
