"""Give a model that another program has loaded its compressed caches, and say on stderr what it got."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxkv.errors import UserError
from mlxkv.models.attach_model import attach
from mlxkv.models.catalog.fingerprint import fingerprint
from mlxkv.models.catalog.folder import check_folder
from mlxkv.models.catalog.shapes import context_limit
from mlxkv.models.hooks.mark import cached_part
from mlxkv.models.hosts import Options, usage_report
from mlxkv.models.origin import Origin, set_origin
from mlxkv.models.reports import ASKED_FOR, LayerReport, summarise
from mlxkv.models.warmup import print_reports

_reports: set[tuple] = set()  # reports that were printed: a server may load a model again


def attach_loaded(
    model: nn.Module, options: Options, name: str, folder: Path | None = None, tokenizer: Any = None
) -> list[LayerReport] | None:
    """Attach `options.kv` to the language model of `model`. Returns the reports, or None where that cannot be: then
    one line says why, and the model stays as it was.

    name, folder, tokenizer: of the model, by which its calibration is found or made.
    """
    target = cached_part(model)
    if getattr(getattr(target, "model", None), "pipeline_size", 1) > 1:
        return _refuse("layers are dealt to processes (--pipeline)", options)
    try:
        if options.kv.calibrated and folder is not None:
            set_origin(target, _origin(name, folder, tokenizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says it
            reports = attach(target, options.kv, strict=options.strict)
    except UserError as error:
        return _refuse(str(error), options)
    except Exception as error:  # a model of others may raise anything
        return _refuse(f"{type(error).__name__}: {error}", options)
    usage_report.track_usage(target, options.kv, reports, options.quiet)
    _report(name, options, reports)
    return reports


def _origin(name: str, folder: Path, tokenizer: Any) -> Origin:
    """Return where the model comes from. Raises UserError for a folder that mlxkv would not load."""
    checked = check_folder(folder)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None:
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(folder)
    return Origin(
        name, fingerprint(checked), checked.path, tokenizer, context_limit(checked.config)
    )


def _refuse(reason: str, options: Options) -> None:
    if not options.strict:
        usage_report.print_line(f"caches stay in full precision: {reason}")
        return
    usage_report.print_line(f"refused: {reason}")
    if threading.current_thread() is threading.main_thread():
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):  # servers load models in a thread of their own
        stream.flush()
    os._exit(2)


def _report(name: str, options: Options, reports: list[LayerReport]) -> None:
    """Print the report, once for each model."""
    lines = summarise(reports)
    asked_for = all(report.reason == ASKED_FOR for report in reports)
    key = name, options.kv.label, *lines
    if key in _reports:
        return
    _reports.add(key)
    if not options.quiet:
        usage_report.print_line(
            f"--kv {options.kv.label}: {name}"
            + (", in full precision as asked for" if asked_for else "")
        )
    print_reports([] if asked_for else lines, reports, options.quiet)
