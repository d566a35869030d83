"""`Plan`: a preset for each layer, where `CacheConfig` is one for all of them.

Layers are numbered as in the list of caches that a model makes. A layer that a plan does not name has the
default. Both kinds answer `at(layer)`, `as_dict` and the questions about a whole model (`compresses`,
`calibrated`, `listens`, ...), so that most of the project need not know which one it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig

VERSION = 1
MOST = 4096  # layers; the deepest models have some hundreds


@dataclass(frozen=True)
class Part:
    """What one layer stores. name: of its preset; two names of one configuration are equal."""

    name: str = field(compare=False)
    config: CacheConfig

    @property
    def stores(self) -> tuple:
        """The configuration, and what it leaves out of comparisons: equal ones may have rotary keys of other bits
        beside latents, or ask for them where there are none."""
        return self.config, self.config.of_latents, self.config.asks_rotary


@dataclass(frozen=True)
class Plan:
    """A preset for each layer.

    default: of layers that `layers` does not name. layers: (layer, part), ascending, without those that are
        as the default.
    label: the name of the plan in reports. last: the highest layer that was named, or -1. count: how many
        layers there have to be, where a list named all of them.
    calibration: the file that the plan came with, which serves its calibrated presets, or None.
    """

    default: Part
    layers: tuple[tuple[int, Part], ...] = ()
    label: str = field(default="plan", compare=False)
    last: int = field(default=-1, compare=False)
    count: int | None = field(default=None, compare=False)
    calibration: Path | None = field(default=None, compare=False)

    @staticmethod
    def of(default: Part, layers: Mapping[int, Part], **more) -> Plan:
        """A plan of these parts."""
        own = tuple((i, layers[i]) for i in sorted(layers) if layers[i].stores != default.stores)
        return Plan(default, own, last=max(layers, default=-1), **more)

    # -- one layer

    def part(self, layer: int) -> Part:
        return next((part for i, part in self.layers if i == layer), self.default)

    def at(self, layer: int) -> CacheConfig:
        """What this layer stores."""
        return self.part(layer).config

    def name_at(self, layer: int) -> str:
        """The preset of this layer."""
        return self.part(layer).name

    def check(self, count: int, where: str = "--kv") -> None:
        """Raises UserError for layers that a model of `count` layers does not have."""
        if self.count is not None and self.count != count:
            raise UserError(
                f"[{where}] {self.label} lists another number of layers; got {self.count}; this model has "
                f"{count} caches; list as many, or name layers by number"
            )
        if self.last >= count:
            raise UserError(
                f"[{where}] {self.label} names a layer that the model does not have; got {self.last}; "
                f"choose from 0 to {count - 1}"
            )

    # -- all layers

    @property
    def configs(self) -> tuple[CacheConfig, ...]:
        """What layers store, each configuration once, the default first unless a list replaced it."""
        used = [part.config for _, part in self.layers]
        if self.count is None or len(self.layers) < self.count:
            used.insert(0, self.default.config)
        return tuple(dict.fromkeys(used))

    def _any(self, name: str) -> bool:
        return any(getattr(config, name) for config in self.configs)

    compresses = property(lambda self: self._any("compresses"))
    follows = property(lambda self: self._any("follows"))
    listens = property(lambda self: self._any("listens"))
    calibrated = property(lambda self: self._any("calibrated"))
    balanced = property(lambda self: self._any("balanced"))
    centred = property(lambda self: self._any("centred"))
    learned = property(lambda self: self._any("learned"))
    scaled = property(lambda self: self._any("scaled"))
    low = property(lambda self: self._any("low"))
    # Bits of rotary keys beside latents: the fewest of any layer.
    rotary = property(lambda self: min(config.rotary for config in self.configs))

    def _most(self, name: str) -> int:
        """The largest number of the layers that compress, or 0."""
        own = (getattr(config, name) for config in self.configs if config.compresses)
        return max(own, default=0)

    sink = property(lambda self: self._most("sink"))
    recent = property(lambda self: self._most("recent"))
    page = property(lambda self: self._most("page"))
    window = property(lambda self: self._most("window"))

    def each(self, change: Callable[[CacheConfig], CacheConfig]) -> Plan:
        """The plan with `change` made to what every layer stores."""

        def changed(part: Part) -> Part:
            return replace(part, config=change(part.config))

        own = tuple((i, changed(part)) for i, part in self.layers)
        return replace(self, default=changed(self.default), layers=own)

    @property
    def asks_rotary(self) -> bool:
        """Whether a preset asks for rotary keys of some bits; `configs` has one of those that are equal."""
        parts = (self.default, *(part for _, part in self.layers))
        return any(part.config.asks_rotary for part in parts)

    @property
    def of_latents(self) -> Plan:
        """The plan for a model whose caches hold latents (MLA)."""
        return self.each(lambda config: config.of_latents)

    @property
    def whole(self) -> Plan:
        """The plan for layers that see the whole text."""
        return self.each(lambda config: config.whole)

    # -- as text

    @property
    def spec(self) -> dict:
        """What a plan file holds: {"version", "default", "layers": {"0-3": preset}}."""
        layers = {}
        for name, members in _by_name(self.layers):
            layers[_ranges(members)] = name
        return {"version": VERSION, "default": self.default.name, "layers": layers}

    def as_dict(self) -> dict:
        """Plain data for headers of saved files: presets by name, and all their numbers."""
        own = {str(i): part.config.as_dict() for i, part in self.layers}
        names = {str(i): part.name for i, part in self.layers}
        return {
            "default": self.default.config.as_dict(),
            "layers": own,
            "presets": {"default": self.default.name, **names},
        }

    @staticmethod
    def from_dict(data: dict) -> Plan:
        """Read what `as_dict` returns. Raises UserError on anything else."""
        try:
            names, layers = data["presets"], data["layers"]
            if len(layers) > MOST or not all(type(name) is str for name in names.values()):
                raise ValueError("names")
            parts = {int(i): Part(names[i], CacheConfig.from_dict(layers[i])) for i in layers}
            return Plan.of(Part(names["default"], CacheConfig.from_dict(data["default"])), parts)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"[Plan] not a plan that this version reads ({error})") from None


def read_config(data: dict) -> CacheConfig | Plan:
    """What `as_dict` of a configuration or of a plan wrote. Raises UserError."""
    is_plan = isinstance(data, dict) and "presets" in data
    return Plan.from_dict(data) if is_plan else CacheConfig.from_dict(data)


def _by_name(layers: Iterable[tuple[int, Part]]) -> Iterable[tuple[str, list[int]]]:
    """Presets and their layers, in the order of the first ones."""
    found: dict[str, list[int]] = {}
    for i, part in layers:
        found.setdefault(part.name, []).append(i)
    return found.items()


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5", as plan files write it."""
    out = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        out.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    return ",".join(out)
