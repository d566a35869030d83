"""Keep a training run: checkpoints and exports written beside the training, the log, the status."""

import csv
import json
import shutil
from pathlib import Path
from threading import Thread

import export
import torch
from model import Model
from torch import Tensor


def on_cpu(value):
    """Copy every tensor in nested dicts and lists to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, list) else value


class Log:
    """A CSV file whose lines are on disk as soon as they are written."""

    def __init__(self, path: Path, fields: tuple[str, ...], append: bool):
        self.file = open(path, "a" if append else "w", newline="")  # noqa: SIM115 - closed by close()
        self.rows = csv.DictWriter(self.file, fields)
        if not append:
            self.rows.writeheader()

    def write(self, row: dict) -> None:
        self.rows.writerow(row)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Keeper:
    """Files of a run: checkpoint.pt, hub/, status.json and, at the end, done."""

    def __init__(self, out: Path, tokenizer: Path):
        self.out, self.tokenizer = out, tokenizer
        self.thread: Thread | None = None

    def load(self) -> dict | None:
        """Return the last checkpoint, or None."""
        path = self.out / "checkpoint.pt"
        return torch.load(path, map_location="cpu", weights_only=False) if path.exists() else None

    def restore(self, saved: dict, model: Model, opts: list[torch.optim.Optimizer]) -> None:
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["opts"], strict=True):
            opt.load_state_dict(state)

    def save(self, model: Model, opts: list, state: dict, wait: bool = False) -> None:
        """Copy the state, and write checkpoint and export in a thread; skip if the last one still writes."""
        if self.thread and self.thread.is_alive() and not wait:
            return
        if self.thread:
            self.thread.join()
        copy = on_cpu({"model": model.state_dict(), "opts": [opt.state_dict() for opt in opts]})
        self.thread = Thread(target=self._write, args=(copy | {"config": model.config} | state,))
        self.thread.start()
        if wait:
            self.thread.join()

    def _write(self, saved: dict) -> None:
        torch.save(saved, self.out / "checkpoint.new")
        (self.out / "checkpoint.new").replace(self.out / "checkpoint.pt")
        new, hub = self.out / "hub.new", self.out / "hub"
        export.write_weights(saved["config"], saved["model"], self.tokenizer, new)
        shutil.rmtree(hub, ignore_errors=True)
        new.rename(hub)

    def status(self, line: dict) -> None:
        new = self.out / "status.new"
        new.write_text(json.dumps(line) + "\n")
        new.replace(self.out / "status.json")

    def finish(self, state: dict) -> None:
        (self.out / "done").write_text(json.dumps(state) + "\n")
