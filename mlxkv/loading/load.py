"""Load a model by name, after checking everything that can be checked, and attach a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv import console, startup
from mlxkv.calibration.fitting import read_calibration
from mlxkv.catalog import rendering
from mlxkv.catalog.aliases import DEFAULT, KV, resolve
from mlxkv.catalog.folder import Folder, check_folder, fingerprint
from mlxkv.catalog.gguf import tokens
from mlxkv.catalog.hub import fetch, require
from mlxkv.catalog.option_checks import check_weights, dtype_name, fitting_sizes
from mlxkv.catalog.reports import LayerReport, summarise
from mlxkv.catalog.shapes import context_limit, text_config
from mlxkv.console import user_path
from mlxkv.errors import UserError, brief
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import bound_of, check_fold, parse_kv, warning_of
from mlxkv.formats.quantizers import Quantizer
from mlxkv.generate.stops import turn_end
from mlxkv.loading import agreement, plans
from mlxkv.loading import weights as reading
from mlxkv.loading.attach import attach
from mlxkv.loading.sampling import Sampling
from mlxkv.loading.sampling import read_sampling as read_sampling
from mlxkv.loading.warmup import print_reports
from mlxkv.metal.launch import device_type
from mlxkv.patching import mlx_lm_compat
from mlxkv.patching.mark import Origin, set_origin, steps_of

ODD = "\u2603 Zq\U0010fffd"  # in no vocabulary as one token: encoding fails if there is no token for unknown text


@dataclass(repr=False)
class Loaded:
    """A model that is ready to run; unpacks as `model, tokenizer`, like the result of mlx_lm.load.

    name: as requested. path: its folder. config: its config.json. kv, kv_name: the cache format, and its name.
    layers: one report per cache. dtype: of the activations. fingerprint: of its files. context: the longest context
    the model was made for, in tokens, or None. notes: lines to show after the layers. sampling: the settings that
    its makers recommend. chosen: the line about `kv` where a share was asked for, or "".
    """

    model: nn.Module
    tokenizer: Any
    name: str
    path: Path
    config: dict
    kv: CacheConfig
    kv_name: str
    layers: list[LayerReport]
    dtype: mx.Dtype
    fingerprint: str
    context: int | None = None
    notes: list[str] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)
    chosen: str = ""
    _has_spoken: bool = field(default=False, init=False, repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        kind = str(self.dtype).split(".")[-1]
        return (
            f"Loaded({self.name!r}, kv={self.kv_name!r}, dtype={kind!r}, layers={len(self.layers)})"
        )

    def report(self) -> list[str]:
        """Return one line per kind of layer, then the notes."""
        return summarise(self.layers) + self.notes

    @property
    def steps(self) -> str:
        """Return how decode steps run: "replayed", "built by Python: ..." or "none yet"."""
        steps = steps_of(self.model)
        return "built by Python: nothing is compressed" if steps is None else steps.state

    def tell_steps(self) -> None:
        """Print once on stderr why decode steps are built by Python, unless the user chose that."""
        steps = steps_of(self.model)
        if steps is not None and steps.refused and not self._has_spoken:
            self._has_spoken = True
            console.note(f"  decode steps are {steps.state}")

    def print_report(self, backend: str = "", quiet: bool = False) -> None:
        """Print the report on stderr, and warnings about versions and unused kernels. quiet: print only the
        warnings."""
        lines = self.report()
        if backend:
            lines[:1] = [f"{backend}: {line}" for line in lines[:1]]
        print_reports(lines, self.layers, quiet)


def load(
    name: str = DEFAULT,
    kv: str | float | CacheConfig | Quantizer = KV,
    strict: bool = False,
    dtype: str | None = None,
    calibration: Calibration | Path | str | None = None,
    fold: bool = False,
    group: mx.distributed.Group | None = None,
    progress: Callable[[int, int], None] | None = None,
    weights: int | None = None,
    adapter_path: Path | str | None = None,
    memory: str | int | None = None,
    context: str | int | None = None,
) -> Loaded:
    """Load `name` (an alias, a folder, a GGUF file, or `owner/name` on the hub) and attach a cache of preset `kv`.

    kv: also a share, "99%" or "auto": the fewest bits that keep it, measured once for a model (`agreement.choose`).
    strict: as in `attach`. dtype: "float32", "float16" or "bfloat16" for unquantised weights; by default as stored,
    except that 16-bit weights become float32 if there is no GPU. calibration: as in `attach`; a later `attach` uses
    it too. fold: apply the map of values in the weights permanently; the model records it and can no longer be
    calibrated. group: processes that shard the model (mlx-lm's `model.shard`): each keeps its part of the weights and
    of the kv heads. progress: called with (bytes read, all bytes) while weights are read. weights: 8 rounds
    unquantised matrices to 8-bit codes; in a GGUF file, the types for which MLX has no codes. adapter_path: a folder
    with a LoRA adapter, as mlx-lm's `load` takes it; with it, a model has calibrations and sessions of its own.
    memory, context: turn a share round: the most bits with which so many tokens fit into so many bytes; "12GB" and
    "64k" are understood. With one of them, the other is this machine's memory, or 32k tokens.

    Raises UserError, before heavy work if possible, and MachineError for a full disk.
    """
    # First, so that a typo does not cost a download.
    size, bound, chosen = 1 if group is None else group.size(), bound_of(kv), ""
    if bound is not None and size > 1:
        raise UserError(
            f"[--kv] a share is measured in one process; got {kv} and {size} of them; choose a number of bits"
        )
    if any(x is not None for x in fitting_sizes(kv, memory, context)):
        kv, chosen = plans.fitting(name, kv, memory, context)
        bound = None
    if bound is not None:
        startup.whole_float32()  # that is what a share is measured in
    if bound is not None and fold:
        raise UserError(f"[fold] folds maps of a preset; got {kv}; choose a number of bits")
    # With `strict`, a layer that stays in full precision is told before a share is measured.
    config = parse_kv(kv if bound is None else "int4" if strict else "fp16")
    check_fold(config, fold)
    dtype = dtype_name(dtype)
    check_weights(weights)
    if calibration is not None:
        calibration = read_calibration(calibration)
    source = resolve(name)
    require(source)
    adapter = None if adapter_path is None else user_path(adapter_path, "--adapter-path")
    folder = check_folder(source.folder or fetch(source.repo), adapter)
    if (warning := warning_of(config)) is not None:
        console.warn_once(warning)
    rendering.RENDERER.start()  # ready by the time the weights are read
    model, full_config = reading.build(folder, dtype, weights, progress)
    if size > 1:
        reading.check_shares(model, folder, size)
    notes = reading.set_dtype(model, dtype)
    if adapter is not None:
        notes.append(f"adapter {adapter.resolve().name}")  # no path: servers show the notes
    if size == 1:
        reading.read_model(model, None if folder.is_gguf else progress)
        reading.try_out(model, folder)
        if device_type() == "cpu" and dtype in (None, "float32") and weights is None:
            reading.fit_cpu(model)
    tokenizer = _tokenizer(folder, full_config)
    rendering.bound(mlx_lm_compat.inner_tokenizer(tokenizer), folder.path)
    if (end := turn_end(tokenizer)) is not None:
        tokenizer.add_eos_token(end)
    mark = fingerprint(folder)
    longest = context_limit(folder.config)
    place = folder.adapter or folder.path
    set_origin(model, Origin(source.name, mark, place, tokenizer, longest, calibration, chosen))
    layers = attach(model, config, strict, fold=fold, group=group)
    if (
        group is not None and size > 1
    ):  # before weights are read, so that no process holds all of them
        reading.take_share(model, folder, group)
    loaded = Loaded(
        model=model,
        tokenizer=tokenizer,
        name=source.name,
        path=folder.path,
        config=folder.config,
        kv=config,
        kv_name=config.label,
        layers=layers,
        dtype=reading.dtype_of(model),
        fingerprint=mark,
        context=longest,
        notes=notes,
        sampling=read_sampling(
            folder.path,
            source.name,
            text_config(folder.config).get("vocab_size") or 0,
            folder.headers[0].metadata if folder.is_gguf else None,
        ),
    )
    if chosen:
        loaded.chosen = chosen
        loaded.notes.append(chosen)
    if bound is not None:
        choice = agreement.choose(loaded, str(kv))
        loaded.kv = parse_kv(choice.preset)
        loaded.kv_name = loaded.kv.label
        loaded.layers = attach(model, loaded.kv, strict)
        loaded.chosen = choice.line
        loaded.notes.append(choice.line)
    return loaded


def _tokenizer(folder: Folder, config: dict):
    from mlx_lm.utils import load_tokenizer

    extra = {"trust_remote_code": False}
    # generation_config.json, which mlx-lm puts into `config`, may name fewer than config.json.
    named = [each.get("eos_token_id") for each in (config, text_config(config), folder.config)]
    eos = [x for ids in named for x in (ids if isinstance(ids, list) else [ids]) if type(x) is int]
    try:
        if folder.is_gguf:
            with TemporaryDirectory() as place:
                tokens.write_tokenizer(folder.headers[0].metadata, Path(place))
                tokenizer = load_tokenizer(Path(place), extra, eos_token_ids=eos)
        else:
            tokenizer = load_tokenizer(folder.path, extra, eos_token_ids=eos)
        tokenizer.encode(ODD)
        return tokenizer
    except BaseException as error:  # any kind, Rust panics included
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = type(error).__name__  # transformers reads config.json too
        culprit = "config.json" if kind.startswith("StrictDataclass") else "the tokenizer"
        raise UserError(
            f"[load] {culprit} cannot be loaded ({kind}: "
            f"{brief(error)}); got {folder.path}; fetch the model again"
        ) from error
