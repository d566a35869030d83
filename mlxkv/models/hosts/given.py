"""Give a model that another program has loaded its compressed caches, and say on stderr what it got."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NoReturn

import mlx.nn as nn

from mlxkv import console, versions
from mlxkv.errors import UserError
from mlxkv.formats.names import canonical, parse_kv
from mlxkv.models.catalog.fingerprint import fingerprint
from mlxkv.models.catalog.folder import check
from mlxkv.models.catalog.reports import ASKED_FOR, LayerReport, summarise
from mlxkv.models.catalog.shapes import context_limit
from mlxkv.models.decoders import not_used
from mlxkv.models.hosts import watch
from mlxkv.models.hosts.ledger import LEDGER
from mlxkv.models.hosts.voice import is_quiet, say
from mlxkv.models.origin import Origin, introduce
from mlxkv.models.seam import attach

_LEFT = "_mlxkv_left"  # on a model: it was said why it keeps its own caches
_told: set[tuple] = set()  # reports that were printed: a server may load a model again


def give(
    model: nn.Module,
    kv: str,
    strict: bool,
    name: str,
    folder: Path | None = None,
    tokenizer: Any = None,
    group: Any = None,
) -> list[LayerReport] | None:
    """Attach `kv` to the language model of `model`. Returns the reports, or None where that cannot be: then one
    line says why, and the model stays as it was.

    strict: end the process with exit code 2 where a layer that grows stays in full precision. name, folder,
    tokenizer: of the model, by which its calibration is found or made. group: processes that share it.
    """
    target = language_model(model)
    if vars(target).pop(_LEFT, False) or (group is None and LEDGER.knows(target)):
        return None  # said already, or attached before it was shared
    try:
        config = parse_kv(kv)
        if config.calibrated and folder is not None:
            introduce(target, _origin(name, folder, tokenizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says it
            reports = attach(target, kv, strict=strict, group=group, windows=_windows())
    except UserError as error:
        return _refused(str(error), strict)
    except Exception as error:  # a model of others may raise anything
        return _refused(f"{type(error).__name__}: {error}", strict)
    LEDGER.open(target, canonical(kv), config, reports)
    _tell(name, canonical(kv), reports)
    return reports


def _windows() -> int | None:
    """Tokens of the smallest sliding window that MLXKV_WINDOWS has compressed, or None."""
    text = os.environ.get(watch.WINDOWS, "").strip()
    if text.lower() in watch.OFF:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"[{watch.WINDOWS}] must be a number of tokens; got {text!r}; choose 1024")
    return int(text)


def language_model(model: nn.Module) -> nn.Module:
    """The part of a model that has a KV cache: the text side of one that also sees or hears."""
    inner = getattr(model, "language_model", None)
    if isinstance(inner, nn.Module) and not hasattr(model, "make_cache"):
        return inner
    return model


def _origin(name: str, folder: Path, tokenizer: Any) -> Origin:
    """Return where the model comes from. Raises UserError for a folder that mlxkv would not load."""
    checked = check(folder)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if tokenizer is None:
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(folder)
    return Origin(
        name, fingerprint(checked), checked.path, tokenizer, context_limit(checked.config)
    )


def left(model: nn.Module, reason: str, strict: bool) -> None:
    """Say why `model` keeps its own caches."""
    _refused(reason, strict)
    setattr(language_model(model), _LEFT, True)


def _refused(reason: str, strict: bool) -> None:
    if not strict:
        say(f"caches stay in full precision: {reason}")
        return
    say(f"refused: {reason}")
    leave(2)


def leave(code: int) -> NoReturn:
    """End the process, from whatever thread loads the model: servers do so in a thread of their own."""
    if threading.current_thread() is threading.main_thread():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _tell(name: str, kv: str, reports: list[LayerReport]) -> None:
    """Print the report, once for each model."""
    quiet = is_quiet()
    lines = summarise(reports)
    asked_for = all(report.reason == ASKED_FOR for report in reports)
    key = name, kv, *lines
    if key in _told:
        return
    _told.add(key)
    if not quiet:
        say(f"--kv {kv}: {name}" + (", in full precision as asked for" if asked_for else ""))
        for line in [] if asked_for else lines:
            console.note(f"  {line}")
    for line in versions.out_of_range():
        console.warn(f"! outside the range that mlxkv was tested with: {line}")
    if (found := not_used(reports)) and (found[1] or not quiet):
        (console.warn if found[1] else console.note)(found[0])
