"""Attach compressed caches to a model that another program has loaded; report them on stderr, and at exit what they
held."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxkv import console
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.catalog.folder import check_folder, fingerprint
from mlxkv.catalog.reports import ASKED_FOR, LayerReport, summarise
from mlxkv.catalog.shapes import context_limit
from mlxkv.console import human_bytes, note, one_line
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import warning_of
from mlxkv.generate.usage import in_16_bits, in_use
from mlxkv.loading.attach import attach
from mlxkv.loading.warmup import print_reports
from mlxkv.patching.mark import Origin, set_origin
from mlxkv.patching.trees import MARK, cached_part, leaves
from mlxkv.run import Options

_reports: set[tuple] = set()  # reports that were printed: a server may load a model again


def compress(
    loaded: Any,
    options: Options,
    name: str,
    folder: Path | None = None,
    adapter: Path | None = None,
) -> list[LayerReport] | None:
    """Attach `options.kv` to the model that a loader returned, alone or first in a tuple. Returns the reports; None,
    with one line that says why and an unchanged model, if it cannot be attached.

    name, folder, adapter: of the model, to find or make its calibration. A tokenizer is taken from the tuple.
    """
    if (warning := warning_of(options.kv)) is not None:
        console.warn_once(warning)
    model, *companions = loaded if isinstance(loaded, tuple) else (loaded,)
    tokenizer = next((x for x in companions if not isinstance(x, dict)), None)
    target = cached_part(model)
    if getattr(getattr(target, "model", None), "pipeline_size", 1) > 1:
        return _refuse("layers are dealt to processes (--pipeline)", options)
    try:
        if options.kv.calibrated and folder is not None:
            set_origin(target, _origin(name, folder, adapter, tokenizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says it
            reports = attach(target, options.kv, strict=options.strict)
    except UserError as error:
        return _refuse(str(error), options)
    except Exception as error:  # a model of others may raise anything
        return _refuse(f"{type(error).__name__}: {error}", options)
    track_usage(target, options.kv, reports, options.quiet)
    _report(name, options, reports)
    return reports


def _origin(name: str, folder: Path, adapter: Path | None, tokenizer: Any) -> Origin:
    """Return the model's origin. Raises UserError for a folder that mlxkv would not load."""
    checked = check_folder(folder, adapter)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None:
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(folder)
    place = checked.adapter or checked.path
    return Origin(name, fingerprint(checked), place, tokenizer, context_limit(checked.config))


def _refuse(reason: str, options: Options) -> None:
    if not options.strict:
        print_line(f"caches stay in full precision: {reason}")
        return
    print_line(f"refused: {reason}")
    if threading.current_thread() is threading.main_thread():
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # servers load models in a thread of their own
        stream.flush()
    os._exit(2)


def _report(name: str, options: Options, reports: list[LayerReport]) -> None:
    """Print the report, once per model."""
    lines = summarise(reports)
    asked_for = all(report.reason == ASKED_FOR for report in reports)
    key = name, options.kv.label, *lines
    if key in _reports:
        return
    _reports.add(key)
    if not options.quiet:
        print_line(
            f"--kv {options.kv.label}: {name}"
            + (", in full precision as asked for" if asked_for else "")
        )
    print_reports([] if asked_for else lines, reports, options.quiet)


# -- what caches held

STEP, PART = 16, 16  # measure again after 16 more tokens than the longest so far, or a 16th more
OURS = (CompressedKVCache, BatchedKVCache)


@dataclass
class UsageReport:
    """The caches of one attached model.

    kv: the preset. window: tokens that stay exact before a page is quantized. bytes, plain, tokens: of the longest
    caches seen, over all compressed layers and the sequences of a batch: in use, and in 16 bits. without: calls of the
    model without a cache, of more than one token.
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
        """Measure the caches after a call of the model with tokens [B, L]."""
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
        """'longest cache 530 tokens in 96.0 KiB; in 16 bits 265 KiB', or why there is none."""
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
    """Print a line on stderr, marked as ours."""
    note(f"[mlxkv] {one_line(text)}")


def track_usage(model: nn.Module, kv: CacheConfig, reports: list[LayerReport], quiet: bool) -> None:
    """Measure the caches at each call of an attached model; print a summary at exit unless `quiet`."""
    if not any(report.compressed for report in reports):
        return
    usage = UsageReport(kv.label, kv.window)
    if not TRACKED and not quiet:
        atexit.register(print_usage)
    TRACKED.append(usage)
    vars(model)[MARK].listeners.append(usage.see)


def print_usage() -> None:
    """Print what the caches held. Ignores a closed stderr."""
    for usage in TRACKED:
        try:
            print_line(usage.line())
        except (OSError, ValueError):
            return
    sys.stderr.flush()
