"""Run one model with several caches, so that all of them can read the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace

from mlxkv.calibration.fitting import find_calibration
from mlxkv.catalog.sizes import COMPRESSED, bits_in_pages, layer_bytes
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.generate.generation import new_cache
from mlxkv.loading.attach import attach, detach
from mlxkv.loading.load import Loaded
from mlxkv.patching.cache_shapes import layers_of

BASELINE = "fp16"  # mlx-lm's own caches, the reference of every other arm


class Arms:
    """A model and the caches to compare: an arm is a cache preset or configuration, by name.

    presets: names, or {name: configuration}; BASELINE is always added. windows: (sink, recent) for all arms; None
    keeps each preset's own; a string does too, and describes windows already set in the configurations. model_name:
    replaces the loaded name in rows. calibrations: by arm; others use the model's own.
    """

    def __init__(
        self,
        loaded: Loaded,
        presets: Iterable[str] | Mapping[str, CacheConfig],
        windows: tuple[int, int] | str | None = None,
        model_name: str | None = None,
    ):
        self.loaded, self.model_name = loaded, model_name or loaded.name
        self.calibrations: dict[str, Calibration] = {}
        asked = presets if isinstance(presets, Mapping) else {n: parse_kv(n) for n in presets}
        self.configs: dict[str, CacheConfig] = {BASELINE: parse_kv(BASELINE), **asked}
        self.windows = windows if isinstance(windows, str) else "own"
        if isinstance(windows, tuple):
            self.windows = "{},{}".format(*windows)
            self.configs = {
                name: replace(config, sink=windows[0], recent=windows[1])
                for name, config in self.configs.items()
            }
        self._own: Calibration | None = None
        self.reports: dict[str, list] = {}  # a LayerReport per cache, after an arm was attached

    @property
    def names(self) -> list[str]:
        return list(self.configs)

    @contextmanager
    def attached(self, name: str):
        """Attach the arm `name` inside the block: every cache made there is of this arm."""
        self._attach(name)
        try:
            yield self.loaded
        finally:
            detach(self.loaded.model)

    @contextmanager
    def caches(self, names: Iterable[str]):
        """Make new caches, {arm: [cache of each layer]}. Inside the block the model accepts any
        of them; no other arm may be attached there."""
        out, names = {}, list(names)
        last = None
        try:
            # The last arm stays attached. It compresses if any arm does, and its attention works for every arm.
            for name in sorted(names, key=lambda n: self.configs[n].compresses):
                self._attach(name)
                last = name
                out[name] = new_cache(self.loaded)
            yield {name: out[name] for name in names}
        finally:
            if last is not None:
                detach(self.loaded.model)

    def _attach(self, name: str) -> None:
        used = self.calibration(name)
        self.reports[name] = attach(self.loaded.model, self.configs[name], calibration=used)

    def calibration(self, name: str) -> Calibration | None:
        """Return the calibration of an arm: its own or the model's; None if it needs none."""
        if not self.configs[name].calibrated:
            return None
        if name in self.calibrations:
            return self.calibrations[name]
        config = self.configs[name]
        if self._own is None or not self._own.serves(config.fitted):
            # Read the model's file only until it has been found.
            self._own = find_calibration(self.loaded.model, config)
        return self._own

    def stored(self, name: str, cache: list) -> int:
        """Return the allocated bytes of the layers that grow with the context. Sliding windows are left out: they are
        the same for every preset."""
        growing = {report.index for report in self.reports[name] if report.grows}
        return sum(cache[index].nbytes for index in growing)

    def bits(self, name: str, context: int) -> dict:
        """Return bits per value, over the layers that grow with the context: inside pages, and of the
        whole cache of `context` tokens with its windows at 16 bits per number; and that cache's bytes."""
        config = self.configs[name]
        layers = [s for s in layers_of(self.loaded.model) if s.kind in COMPRESSED]
        values = sum(s.values(context) for s in layers)
        inside = sum(s.values(context) * bits_in_pages(s, config) for s in layers)
        size = sum(layer_bytes(s, config, context) for s in layers)
        return {
            "bits_per_value": inside / values if values else 16.0,
            "bits_with_windows": 8 * size / values if values else 16.0,
        } | ({"kv_bytes_in_use": size} if values else {})
