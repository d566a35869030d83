"""One model with several caches at hand, so that they can read the same tokens side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace

from mlxkv.artifact import Calibration
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.eval import feed
from mlxkv.eval.prefixes import Prefixes
from mlxkv.generate import new_cache
from mlxkv.models import Loaded, attach, detach
from mlxkv.models.calibrations import known

BASELINE = "fp16"  # mlx-lm's own caches: what every other arm is compared with


class Arms:
    """loaded: the model. presets: of the arms, or configurations by name; BASELINE is always there.

    windows: (sink, recent) for every arm, or None for those of each preset. prepare: called with
        the name and the fresh caches of an arm before they are used. calibrations: by arm, for
        those that do not take the model's own.
    """

    def __init__(
        self,
        loaded: Loaded,
        presets: Iterable[str] | Mapping[str, CacheConfig],
        windows: tuple[int, int] | None = None,
        prepare: Callable[[str, list], None] | None = None,
        calibrations: Mapping[str, Calibration] | None = None,
    ):
        self.loaded, self.prepare = loaded, prepare
        self.calibrations = dict(calibrations or {})
        given = presets if isinstance(presets, Mapping) else {n: parse_kv(n) for n in presets}
        self.configs: dict[str, CacheConfig] = {BASELINE: parse_kv(BASELINE), **given}
        if windows is not None:
            self.configs = {
                name: replace(config, sink=windows[0], recent=windows[1])
                for name, config in self.configs.items()
            }
        self.prefixes = Prefixes()
        self._own: Calibration | None = None
        self.reports: dict[str, list] = {}  # one LayerReport per cache, once an arm was made

    @property
    def names(self) -> list[str]:
        return list(self.configs)

    @contextmanager
    def attached(self, name: str):
        """The model with the arm `name` attached: whatever makes a cache inside gets that one."""
        self._attach(name)
        try:
            yield self.loaded
        finally:
            detach(self.loaded.model)

    @contextmanager
    def caches(self, names: Iterable[str]):
        """A fresh list of caches per arm, {name: [cache of each layer]}. Inside, the model takes any
        of them; no other arm may be attached there."""
        out, names = {}, list(names)
        last = None
        try:
            # The last to be attached stays: what compresses rebinds attention for all alike.
            for name in sorted(names, key=lambda n: self.configs[n].compresses):
                self._attach(name)
                last = name
                out[name] = new_cache(self.loaded)
                if self.prepare:
                    self.prepare(name, out[name])
            yield {name: out[name] for name in names}
        finally:
            if last is not None:
                detach(self.loaded.model)

    def _attach(self, name: str) -> None:
        given = self.calibration(name)
        self.reports[name] = attach(self.loaded.model, self.configs[name], calibration=given)

    def calibration(self, name: str) -> Calibration | None:
        """That of an arm: its own, or that of the model; None where it needs none."""
        if not self.configs[name].calibrated:
            return None
        if name not in self.calibrations:
            balanced = self.configs[name].balanced or self.configs[name].low
            if self._own is None or (balanced and not self._own.balanced):
                # Until there is one: read it once.
                self._own = known(self.loaded.model, balanced) or self._own
            return None if balanced and self._own and not self._own.balanced else self._own
        return self.calibrations[name]

    def stored(self, name: str, cache: list) -> int:
        """Allocated bytes of the layers that grow with the context."""
        return feed.stored_by(self.reports[name], cache)
