"""Train one of the two natural models within a budget of minutes, or try a machine in two (--smoke).

    python -m natural.train natural-qwen --data runs/natural/data --out runs/natural/natural-qwen --minutes 12

Writes log.csv, status.json, observe.jsonl, checkpoint.pt and hub/ (the exported model); --resume
continues from checkpoint.pt. The minutes count from the start of the process, compiling included.
"""

import argparse
import json
import math
import time
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from configs import Config
from data import Batches
from model import Model
from optim import optimizers
from tokenizers import Tokenizer
from torch import Tensor
from train import rate

from natural import attention
from natural.data import WORLDS, natural
from natural.keeping import Keeper, Log
from natural.observe import fixed_ids, observe
from natural.shapes import PEAK, SCHEDULE, SHAPES, operations

LOG = (
    "step", "seconds", "progress", "tokens", "length", "lr", "loss_real", "loss_worlds",
    "loss_answers", "gradient", "skipped", "tokens_per_second", "mfu", "waiting",
)  # fmt: skip
SKIPS = 50  # steps in a row without a finite gradient end the run
WARMUP, DECAY = 150, 0.5
CHUNK = 32768  # tokens whose logits are one tensor: indices stay below 2 ** 31


def losses(
    hidden: Tensor, embedding: Tensor, ids: Tensor, weights: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss, and sums and counts [2, 3] of real text, text of the worlds, and answers.

    hidden: [B, L, width], embedding: [vocab, width], ids and weights: [B, L + 1]; total: of the
    weights of the whole step. A row without an answer counts as real text.
    """
    pairs = zip(hidden.flatten(0, 1).split(CHUNK), ids[:, 1:].flatten().split(CHUNK), strict=True)
    each = torch.cat(
        [
            F.cross_entropy(F.linear(some, embedding).float(), target, reduction="none")
            for some, target in pairs
        ]
    )
    w = weights[:, 1:].float()
    generated = (w > 1).any(dim=1, keepdim=True)
    sorts = torch.stack([(w == 1) & ~generated, (w == 1) & generated, w > 1]).flatten(1).float()
    seen = each.detach()
    return (each * w.flatten()).sum() / total, torch.stack([sorts @ seen, sorts.sum(1)])


class Trainer:
    """A model, its optimizers and what is compiled for it."""

    def __init__(self, config: Config, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.config, self.args, self.parts = config, args, args.parts
        self.model = Model(config).to(self.device).train()
        self.embedding = self.model.model.embed_tokens.weight
        self.opts = optimizers(self.model, args.muon_lr, args.adam_lr)
        self.rates = [[group["lr"] for group in opt.param_groups] for opt in self.opts]
        self.losses, self.skipped, self.in_a_row = losses, 0, 0
        if self.cuda:
            self._compile()

    def _compile(self) -> None:
        # Which attention kernel runs is fixed while tracing, and that cache does not know of the switch.
        torch._functorch.config.enable_autograd_cache = False
        chosen = attention.choose(self.model, self.args.attention, self.args.sliding)
        print(f"attention: {chosen}", flush=True)
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.suppress_errors = True  # slow is better than no run
        self.losses = torch.compile(losses, dynamic=False)
        for block in self.model.model.layers:
            block.compile(dynamic=False)

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.cuda else nullcontext()

    def backward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Add the gradients of a batch, in `self.parts` parts; returns sums and counts [2, 3]."""
        total = weights[:, 1:].float().sum()
        seen = torch.zeros(2, 3, device=self.device)
        size = max(1, math.ceil(len(ids) / self.parts))
        for some, w in zip(ids.split(size), weights.split(size), strict=True):
            with self.autocast():
                loss, part = self.losses(self.model(some[:, :-1]), self.embedding, some, w, total)
            loss.backward()
            seen += part
        return seen

    def update(self, share: float) -> float:
        """Step with a share of the learning rates, unless the gradient is not finite; returns its norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True).item()
        finite = math.isfinite(norm)
        for opt, rates in zip(self.opts, self.rates, strict=True):
            for group, lr in zip(opt.param_groups, rates, strict=True):
                group["lr"] = lr * share
            if finite:
                opt.step()
            opt.zero_grad(set_to_none=True)
        self.skipped += not finite
        self.in_a_row = 0 if finite else self.in_a_row + 1
        if self.in_a_row >= SKIPS:
            raise FloatingPointError(f"[train] no finite gradient in {SKIPS} steps")
        return norm

    def tensors(self, ids, weights) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(ids.astype("int64")).to(self.device, non_blocking=True)
        return ids, torch.from_numpy(weights).to(self.device, non_blocking=True)

    def warm_up(self, lengths: list[int]) -> None:
        """Compile for every length; where a batch does not fit, cut it into more parts."""
        for length in lengths:
            start = time.monotonic()
            while True:
                try:
                    rows = self.args.batch // length
                    ids = torch.randint(
                        5, self.config.vocab, (rows, length + 1), device=self.device
                    )
                    self.backward(ids, (ids % 3 > 0).to(torch.uint8))
                    break
                except torch.OutOfMemoryError:
                    if self.parts >= rows:
                        raise
                    self.parts *= 2
                    print(f"memory is short: {self.parts} parts a step", flush=True)
                    self.model.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
            for p in self.model.parameters():
                p.grad = None
            peak = torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0
            took = time.monotonic() - start
            print(f"length {length}: ready in {took:.1f} s, peak {peak:.1f} GiB", flush=True)


def lengths_of(args: argparse.Namespace) -> list[int]:
    return sorted({n for _, shares in args.schedule for n in shares})


def batches_of(args: argparse.Namespace, seed: int) -> Batches:
    file = str(Path(args.data) / "tokenizer" / "tokenizer.json")
    sources = partial(natural, file, str(args.data), args.workers, args.worlds)
    return Batches(sources, seed, args.batch, args.workers, args.schedule)


class Meter:
    """Sums since the last line of the log."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.clear()

    def clear(self) -> None:
        self.since, self.tokens, self.work, self.waited = time.monotonic(), 0, 0.0, 0.0
        self.seen: Tensor | None = None

    def add(self, tokens: int, length: int, waited: float, seen: Tensor) -> None:
        self.tokens += tokens
        self.work += tokens * operations(self.trainer.config, length)
        self.waited += waited
        self.seen = seen if self.seen is None else self.seen + seen

    def read(self) -> dict[str, float]:
        """Return losses by sort, tokens a second, the share of the peak rate and of time waiting for text."""
        sums, counts = self.seen.tolist()  # waits for the GPU
        took = time.monotonic() - self.since
        real, worlds, answers = (s / max(1, n) for s, n in zip(sums, counts, strict=True))
        return {
            "loss_real": round(real, 4),
            "loss_worlds": round(worlds, 4),
            "loss_answers": round(answers, 4),
            "tokens_per_second": round(self.tokens / took),
            "mfu": round(self.work / took / PEAK, 4),
            "waiting": round(self.waited / took, 4),
        }


def train(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    out, data = Path(args.out), Path(args.data)
    out.mkdir(parents=True, exist_ok=True)
    keeper = Keeper(out, data / "tokenizer")
    saved = keeper.load() if args.resume else None
    step = saved["step"] if saved else 0
    batches = batches_of(
        args, args.seed + 1000 * step
    )  # after a resume no text comes in the same order
    trainer = Trainer(SHAPES[args.model], args)
    if saved:
        keeper.restore(saved, trainer.model, trainer.opts)
        print(f"resumed at step {step}", flush=True)
    tokens, progress0 = (saved["tokens"], saved["progress"]) if saved else (0, 0.0)
    batches.progress.value = progress0
    spent = saved["seconds"] if saved else 0.0
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    texts = fixed_ids(Path(args.held), tokenizer, args.observe_tokens)
    trainer.warm_up(lengths_of(args))
    start, end = time.monotonic(), begun + 60 * args.minutes - spent
    log = Log(out / "log.csv", LOG, append=saved is not None)

    def state() -> dict:
        return {
            "step": step,
            "tokens": tokens,
            "progress": batches.progress.value,
            "seconds": round(spent + time.monotonic() - begun, 1),
        }

    def look() -> None:
        line = state() | observe(trainer.model, texts, tokenizer)
        with open(out / "observe.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    if not saved:
        (out / "observe.jsonl").unlink(missing_ok=True)
        look()
    meter, saved_at, looked_at = Meter(trainer), time.monotonic(), time.monotonic()
    while (now := time.monotonic()) < end and not (args.steps and step >= args.steps):
        done = (now - start) / max(1e-9, end - start)
        if args.steps:
            done = max(done, step / args.steps)
        progress = batches.progress.value = progress0 + (1 - progress0) * done
        ids, weights = next(batches)
        waited = time.monotonic() - now
        ids, weights = trainer.tensors(ids, weights)
        seen = trainer.backward(ids, weights)
        share = rate(step, progress, WARMUP, DECAY)
        norm = trainer.update(share)
        step, tokens = step + 1, tokens + ids.numel() - len(ids)
        meter.add(ids.numel() - len(ids), ids.shape[1] - 1, waited, seen)
        if step % args.log_every == 0 or step <= 3:
            line = state() | {
                "length": ids.shape[1] - 1,
                "lr": round(share, 4),
                "gradient": round(norm, 4),
                "skipped": trainer.skipped,
            }
            line |= meter.read()
            line["progress"] = round(progress, 5)
            log.write(line)
            left = round((end - time.monotonic()) / 60, 2)
            keeper.status(line | {"minutes_left": left})
            meter.clear()
        if time.monotonic() - saved_at > args.save_every:
            keeper.save(trainer.model, trainer.opts, state())
            saved_at = time.monotonic()
        if time.monotonic() - looked_at > args.observe_every:
            look()
            looked_at = time.monotonic()
    batches.close()
    log.close()
    look()
    keeper.save(trainer.model, trainer.opts, state(), wait=True)
    keeper.finish(state())


def smoke(args: argparse.Namespace) -> None:
    """Run `args.steps` or 30 steps of each length on real batches and print what a full run would do."""
    lengths, steps = lengths_of(args), args.steps or 30
    args.schedule = tuple((n / len(lengths), {length: 1.0}) for n, length in enumerate(lengths))
    begun = time.monotonic()
    out, data = Path(args.out), Path(args.data)
    out.mkdir(parents=True, exist_ok=True)
    batches = batches_of(args, 99)
    trainer = Trainer(SHAPES[args.model], args)
    trainer.warm_up(lengths)
    print(f"set up in {time.monotonic() - begun:.1f} s", flush=True)
    for n, length in enumerate(lengths):
        batches.progress.value = (n + 0.5) / len(lengths)
        pair = next(batches)
        while pair[0].shape[1] != length + 1:
            pair = next(batches)
        if trainer.cuda:
            torch.cuda.reset_peak_memory_stats()
        meter, done = Meter(trainer), count(1)
        for at in done:
            ids, weights = trainer.tensors(*pair)
            seen = trainer.backward(ids, weights)
            norm = trainer.update(0.2)
            if at == 3:
                meter.clear()  # the first steps are slower
            now = time.monotonic()
            if at == steps:
                break
            pair = next(batches)
            while pair[0].shape[1] != length + 1:
                pair = next(batches)
            meter.add(ids.numel() - len(ids), length, time.monotonic() - now, seen)
        peak = torch.cuda.max_memory_allocated() / 2**30 if trainer.cuda else 0
        print(
            f"length {length}: {meter.read()} gradient {norm:.3f} peak {peak:.1f} GiB", flush=True
        )
    batches.close()
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    seen = observe(
        trainer.model, fixed_ids(Path(args.held), tokenizer, args.observe_tokens), tokenizer
    )
    print(f"observing: {seen['seconds_observing']} s, loss {seen['loss']}")
    start = time.monotonic()
    keeper = Keeper(out, data / "tokenizer")
    state = {"step": steps, "tokens": 0, "progress": 0.0, "seconds": 0.0}
    keeper.save(trainer.model, trainer.opts, state)
    print(f"a checkpoint holds the run up for {time.monotonic() - start:.2f} s", flush=True)
    keeper.save(trainer.model, trainer.opts, state, wait=True)
    print(f"two checkpoints and exports: {time.monotonic() - start:.1f} s")
    print(f"all: {time.monotonic() - begun:.1f} s", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=tuple(SHAPES))
    parser.add_argument("--data", required=True, help="folder that `prepare` wrote")
    parser.add_argument("--held", required=True, help="folder with held/selection/*.txt")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=131072, help="tokens a step")
    parser.add_argument("--parts", type=int, default=1, help="parts a step is computed in")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--worlds", type=float, default=WORLDS, help="share of generated text")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--attention", default="auto", choices=("auto", *attention.FULL))
    parser.add_argument("--sliding", default="auto", choices=("auto", *attention.SLIDING))
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=float, default=60, help="seconds")
    parser.add_argument("--observe-every", type=float, default=120, help="seconds")
    parser.add_argument("--observe-tokens", type=int, default=2048)
    args = parser.parse_args(argv)
    args.schedule = SCHEDULE
    return args


if __name__ == "__main__":
    arguments = parse()
    (smoke if arguments.smoke else train)(arguments)
