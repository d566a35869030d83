"""What `--additional-config` asks of the plug-in, checked before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from cuda_track.cache.stores import codecs_of
from cuda_track.codec import maps
from cuda_track.codec.codec import Codec
from cuda_track.codec.maps import LayerMaps
from cuda_track.kernels import launch, layout
from cuda_track.kernels.record import Record
from mlxkv.catalog import folder
from mlxkv.errors import UserError
from mlxkv.formats import agreement
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import bound_of, parse_kv
from mlxkv.formats.quantizers import Codebook

KV, CALIBRATION = "mlxkv", "mlxkv_calibration"  # keys of --additional-config
CHOICES = "int4, int3, or fill-2.25 to fill-6"
PAGE = 64  # tokens of a block
DIMS = (
    64,
    128,
)  # of heads: those of 256 came out wrong on an H200 where drafts gave them more than eight rows
SINK, RECENT = 64, 64  # tokens that stay exact: the first, and at least as many of the last
MOST_EXACT = 16  # tokens of a block of exact ones
MOST_BITS = 6.5  # above which vLLM's own fp8 has fewer bytes


def exact_tokens(record: int, dims: int, item: int) -> int:
    """Return how many exact tokens a block holds, a power of two. record: bytes of a head's codes. item: of a value.

    Raises UserError if it holds none.
    """
    fit = min(MOST_EXACT, record // (2 * dims * item))
    if not fit:
        raise UserError(
            f"[vllm] a block of {record} bytes holds no exact token; got {item} bytes a value of {dims} dims; choose "
            "--dtype bfloat16 or more bits"
        )
    return 1 << fit.bit_length() - 1


@dataclass(frozen=True)
class Heads:
    """Of a layer, in this process. rank, size: of the processes that share its kv heads."""

    count: int
    dims: int
    rank: int = 0
    size: int = 1


@dataclass(frozen=True, eq=False)
class LayerCodecs:
    """What encodes a layer. mean: [G, 1, D] that keys lose as they arrive, or None."""

    codecs: tuple[Codec, Codec]
    record: Record
    mean: torch.Tensor | None = None


class Plan:
    """How all layers of a model are compressed.

    config: of every layer, before a calibration gives it bits. calibration: None if none is needed.
    """

    def __init__(self, config: CacheConfig, calibration: Calibration | None):
        self.config, self.calibration = config, calibration
        self._configs: dict[str, CacheConfig] = {}
        if (
            calibration is not None
        ):  # bits are allotted by layer, so that blocks of all layers have the same bytes
            for name in calibration.layers:
                self._configs |= layers.fitted({name: config}, calibration)

    @cache  # noqa: B019 (plans live as long as their process)
    def record(self, heads: Heads) -> Record:
        """Return the record of any layer; its size is that of all."""
        configs = self._configs.values() if self.calibration else (self.config,)
        records = [Record(self._layouts(config, heads.dims)) for config in configs]
        return replace(records[0], least=max(x.size for x in records))

    @staticmethod
    def _layouts(config: CacheConfig, dims: int) -> tuple[layout.Layout, layout.Layout]:
        keys, values = (
            layout.of_side(side.quantizer, dims, config.page, is_keys)
            for side, is_keys in ((config.keys, True), (config.values, False))
        )
        return keys, values

    def codecs(self, index: int, heads: Heads, device: torch.device) -> LayerCodecs:
        """Return what encodes layer `index`. Raises UserError if the calibration is of another model."""
        config, own = self._configs.get(str(index), self.config), None
        if self.calibration is not None:
            sizes = {str(index): (heads.count * heads.size, heads.dims, heads.dims)}
            self.calibration.check(sizes, None)
            own = self._maps(index, config, heads).to(device)
        made = codecs_of(config, (heads.dims, heads.dims), own, device)
        least = self.record(heads).size
        return LayerCodecs(made, Record(layout.layouts(made), least), own and own.mean)

    def _maps(self, index: int, config: CacheConfig, heads: Heads) -> LayerMaps:
        assert self.calibration is not None
        own = maps.of(self.calibration, config.fitted, [str(index)])[str(index)]
        return own if heads.size == 1 else maps.cut(own, heads.rank, heads.size)


def plan(additional: Mapping[str, object] | object, model: str) -> Plan:
    """Return the plan for --additional-config of a model, a folder or a name of the hub. Raises UserError."""
    found = dict(additional) if isinstance(additional, Mapping) else {}
    name, path = found.get(KV), found.get(CALIBRATION)
    if not isinstance(name, str | int | float) or isinstance(name, bool):
        given = json.dumps(found, default=str)
        raise UserError(
            f"[vllm] --additional-config names no cache; got {given}; choose {CHOICES}, such as "
            """'{"mlxkv": "int4"}'"""
        )
    return _plan(str(name), None if path is None else str(path), model)


@cache
def _plan(name: str, path: str | None, model: str) -> Plan:
    at = Path(model)
    if (bound := bound_of(name)) is not None:
        name = _chosen(name, bound, path, at)
    config = parse_kv(name)
    reason = launch.why_not(config, (128, 128))
    if isinstance(config.keys.quantizer, Codebook) or isinstance(config.values.quantizer, Codebook):
        reason = "codebooks are encoded by torch ops"
    if config.page != PAGE or config.needs_queries or reason:
        reason = reason or f"its pages have {config.page} tokens"
        raise UserError(f"[vllm] no blocks for this cache: {reason}; got {name}; choose {CHOICES}")
    bits = config.bits_per_value(128, 128)
    if bits > MOST_BITS:
        raise UserError(
            f"[vllm] {name} has {bits:g} bits a value, no fewer bytes than --kv-cache-dtype fp8; got {name}; "
            f"choose {CHOICES}"
        )
    config = replace(config, sink=SINK, recent=RECENT)
    if not config.calibrated:
        return Plan(config, None)
    mark = _mark(at)
    source = artifact.read_calibration(path) if path else None
    if source is None and mark is not None:
        source = artifact.find(mark, at, config)
    if source is None:
        raise UserError(
            f"[vllm] {name} needs a calibration of this model; got none; make one by python -m cuda_track.calibrate "
            f'--model {model} -o FILE, and name it: "{CALIBRATION}": "FILE"'
        )
    if mark is not None:
        source.check({}, mark)
    return Plan(config, source)


def _mark(at: Path) -> str | None:
    """Return the fingerprint of a model's folder, or None for a name of the hub. Raises UserError for a faulty one."""
    return folder.fingerprint(folder.check_folder(at)) if at.is_dir() else None


def _chosen(name: str, bound: float, path: str | None, at: Path) -> str:
    """Return the preset that mlxkv chose for this model and a share of next tokens. Raises UserError."""
    choice = None
    if (mark := _mark(at)) is not None:
        calibration = artifact.read_calibration(path) if path else artifact.find(mark, at)
        choice = agreement.find(mark, bound, calibration and calibration.digest)
    if choice is None:
        raise UserError(
            f"[vllm] {name} is chosen by MLX, once a model: mlxkv chat -m {at} --kv {name}, on this machine; got no "
            f"choice; choose {CHOICES}"
        )
    return choice.preset
