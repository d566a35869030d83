"""The sizes of a program's caches, for one line on stderr as it ends."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.console import human_bytes, note, one_line
from mlxkv.formats.config import CacheConfig
from mlxkv.models.hooks.patching import MARK
from mlxkv.models.hooks.probe import leaves
from mlxkv.models.reports import LayerReport
from mlxkv.models.usage import in_16_bits, in_use

STEP, PART = 16, 16  # tokens more than the longest so far, or a 16th, until one is measured again
OURS = (CompressedKVCache, BatchedKVCache)


@dataclass
class UsageReport:
    """The caches of one attached model.

    kv: the preset. window: tokens that stay exact before a page is quantized. bytes, plain, tokens: of the longest
    caches
    seen, over all compressed layers and the sequences of a batch: in use, and in 16 bits. without: calls of the model
    without a cache, of more than one token.
    """

    kv: str
    window: int
    bytes: int = 0
    plain: int = 0
    tokens: int = 0
    sequences: int = 0
    without: int = 0
    next: int = field(default=1, repr=False)

    def see(self, inputs: Any = None, cache: Any = None, *args, **kwargs) -> None:
        """Note what caches hold after a call of the model with tokens [B, L]."""
        if cache is None:
            self.without += getattr(inputs, "ndim", 0) == 2 and inputs.shape[1] > 1
            return
        pairs = leaves(cache) if isinstance(cache, (list, tuple)) else []
        compressed = [cache for _, cache in pairs if isinstance(cache, OURS)]
        if not compressed:
            return
        counts = (
            compressed[0].offsets
            if isinstance(compressed[0], BatchedKVCache)
            else [compressed[0].offset]
        )
        if (total := sum(counts)) < self.next:
            return
        self.tokens, self.sequences = total, len(counts)
        self.next = total + max(STEP, total // PART)
        self.bytes, self.plain = sum(map(in_use, compressed)), sum(map(in_16_bits, compressed))

    def line(self) -> str:
        """'longest cache 530 tokens in 96.0 KiB; in 16 bits 265.0 KiB', or why there is none."""
        if not self.tokens:
            reason = "the program reads text without one" if self.without else "no model was run"
            return f"--kv {self.kv}: no cache was filled, so nothing was compressed ({reason})"
        sequences = f" of {self.sequences} sequences" if self.sequences > 1 else ""
        exact = ""
        if self.tokens <= self.window * self.sequences:
            exact = f" (nothing compressed yet: exact up to {self.window} tokens)"
        return (
            f"--kv {self.kv}: longest cache {self.tokens:,} tokens{sequences} in {human_bytes(self.bytes)}, in 16 "
            f"bits {human_bytes(self.plain)}{exact}"
        )


TRACKED: list[UsageReport] = []  # of all models of this process


def print_line(text: str) -> None:
    """Print a line on stderr, told apart from the program's own."""
    note(f"[mlxkv] {one_line(text)}")


def track_usage(model: nn.Module, kv: CacheConfig, reports: list[LayerReport], quiet: bool) -> None:
    """Watch the calls of an attached model from now on, and tell of them as the process ends unless `quiet`."""
    if not any(report.compressed for report in reports):
        return
    usage = UsageReport(kv.label, kv.window)
    if not TRACKED and not quiet:
        atexit.register(print_usage)
    TRACKED.append(usage)
    vars(model)[MARK].listeners.append(usage.see)


def print_usage() -> None:
    """Say what the caches held; a closed stderr hears nothing."""
    for usage in TRACKED:
        try:
            print_line(usage.line())
        except (OSError, ValueError):
            return
    sys.stderr.flush()
