"""Load a model of transformers by name and attach a cache to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from cuda_track.models.attach_model import attach
from mlxkv.catalog import folder
from mlxkv.catalog.aliases import HUB, resolve
from mlxkv.catalog.folder import fingerprint
from mlxkv.catalog.gguf.tokens import write_tokenizer
from mlxkv.catalog.rendering import bound
from mlxkv.catalog.reports import LayerReport
from mlxkv.errors import UserError, brief
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Loaded:
    """A model that is ready to run. name: as given. kv_name: of its cache."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    kv_name: str
    layers: list[LayerReport]
    fingerprint: str | None = None


def load(
    name: str,
    kv: str | CacheConfig = "fp16",
    dtype: str | None = None,
    device: torch.device | str | None = None,
    calibration: Calibration | Path | str | None = None,
) -> Loaded:
    """Load a folder, a GGUF file of a family that transformers reads, or `owner/name` of the hub, with the cache `kv`.

    dtype: "float32", "float16" or "bfloat16"; by default as stored, on a CPU float32. Raises UserError.
    """
    if isinstance(kv, str):
        parse_kv(kv)  # before a download
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"[load] unknown dtype; got {dtype!r}; choose from {', '.join(DTYPES)}")
    if not name:
        raise UserError("[--model] is needed; got none; choose a folder, or owner/name on the hub")
    source, device = (
        resolve(name),
        torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
    )
    if name in HUB:
        raise UserError(
            f"[--model] {name} is a name for MLX weights; got it here; choose a model of "
            "transformers: owner/name on the hub, or a folder"
        )
    mark, gguf, given, words = None, {}, {}, {}
    if source.folder is not None:
        checked = folder.check_folder(source.folder)
        mark = fingerprint(checked)
        if checked.is_gguf:
            gguf, words = {"gguf_file": checked.path.name}, checked.headers[0].metadata
            # As mlxkv reads it: transformers leaves out head dims of some families, and scaled positions.
            config = {k: v for k, v in checked.config.items() if k != "quantization"}
            given = {"config": AutoConfig.for_model(config.pop("model_type"), **config)}
        elif "quantization" in checked.config:
            raise UserError(
                f"[load] transformers cannot read weights that MLX has quantized; got {name}; choose a model of "
                "transformers: owner/name on the hub, or a folder"
            )
    location = source.folder or source.repo
    assert location is not None
    logging.disable_progress_bar()
    # A GGUF file names no type to compute in.
    stored = torch.bfloat16 if gguf else "auto"
    kind = DTYPES[dtype] if dtype else torch.float32 if device.type == "cpu" else stored
    place = Path(location).parent if gguf else location
    try:
        loading: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=kind, output_loading_info=True, **gguf, **given
        )
        model, info = loading
        tokenizer = _of_gguf(words) if gguf else AutoTokenizer.from_pretrained(place)
        bound(tokenizer, Path(location))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"[load] transformers cannot read {name!r}: {brief(error)}") from None
    if gguf and (absent := [*info["mismatched_keys"], *info["missing_keys"]]):
        raise UserError(
            f"[load] transformers cannot read {len(absent)} tensors of this file; got {name}, "
            f"{absent[0]}; choose the folder that it was made from"
        )
    model = model.to(device).eval()  # pyright: ignore[reportArgumentType] (its decorator hides `self`)
    vars(model)["_mlxkv_fingerprint"] = mark
    layers = attach(model, kv, calibration)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=name,
        kv_name=kv if isinstance(kv, str) else "custom",
        layers=layers,
        fingerprint=mark,
    )


def _of_gguf(metadata: dict[str, Any]) -> Any:
    """Return the tokenizer of a GGUF file as mlxkv builds it: transformers 5.17 splits Gemma's words into pieces."""
    with TemporaryDirectory() as place:
        write_tokenizer(metadata, Path(place))
        return AutoTokenizer.from_pretrained(place)
