"""`mlxkv.eval`: a run of the command in Python, which returns its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlxkv.catalog.aliases import DEFAULT
from mlxkv.errors import UserError
from mlxkv.eval.run import QUICK, measured
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import requested
from mlxkv.formats.quantizers import Quantizer
from mlxkv.loading.attach import attach
from mlxkv.loading.load import Loaded

Kv = str | int | float | CacheConfig | Quantizer


def eval(
    model: str | Loaded = DEFAULT,
    kv: Kv | Sequence[Kv] = QUICK.kv,
    context: int | str | Sequence[int | str] = QUICK.context,
    samples: int = QUICK.samples,
    tasks: str | Sequence[str] = QUICK.tasks,
    text: Path | str | Sequence[Path | str] = (),
    windows: str | tuple[int, int] = "64,64",
    dtype: str | None = None,
    calibration: Calibration | Path | str | None = None,
    adapter_path: Path | str | None = None,
) -> list[dict[str, Any]]:
    """Measure what caches cost in quality, as the command `mlxkv eval` does, and print nothing but how far a
    calibration is, or the choice for a share.

    Arguments are its options. model: also what `load` returned, whose own cache is attached again afterwards. kv: one
    cache or several, as `load` takes them; full precision ("fp16") is always added. text: files or folders.

    Returns a row for each context and cache, fp16's first. "preset", "context"; "bits_per_value", in pages; of the
    tokens that are decoded behind the context: "kl_mean", KL(fp16 || cache) in nats, "top1", the share with the same
    likeliest token, "ppl", the perplexity, and "ppl_ratio", over fp16's; with tasks="retrieval", "retrieval", the share
    of right answers by kind; "verdict" and its "reason". "kl_interval", "top1_interval" and "ppl_ratio_interval" are
    [low, high] with 95 % confidence from resampled texts, or None for too few. "chosen": the line about a share that
    was asked for.

    Raises UserError, before the model is read if possible, and MachineError.
    """
    try:
        configs = _by_name(kv)
        command = SimpleNamespace(
            model=model,
            context=_joined(context),
            samples=samples,
            tasks=_joined(tasks),
            text=[Path(text)] if isinstance(text, str | Path) else [Path(one) for one in text],
            windows=_joined(windows),
            dtype=dtype,
            calibration=calibration,
            adapter_path=adapter_path,
        )
        data = measured(command, configs, QUICK, None)
    except UserError as error:  # the arguments have the names of the options
        raise UserError(str(error).replace("[--", "[", 1)) from None
    finally:
        if isinstance(model, Loaded):
            attach(model.model, model.kv)
    return [
        {"preset": name, "context": context}
        | row
        | ({"chosen": data["chosen"][name]} if name in data["chosen"] else {})
        for context in data["contexts"]
        for name, row in data["rows"][str(context)].items()
    ]


def _by_name(kv: Kv | Sequence[Kv]) -> dict[str, CacheConfig | str]:
    """Return the caches by name. Raises UserError."""
    out: dict[str, CacheConfig | str] = {}
    for one in [kv] if isinstance(kv, Kv) else kv:
        config = requested(one)
        name = config if isinstance(config, str) else config.label
        if out.setdefault(name, config) != config:
            raise UserError(
                f"[kv] two caches of one name; got {name!r}; name one of them otherwise"
            )
    return out


def _joined(value: Any) -> str:
    """Return 'a,b' of a text, a number or several."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
