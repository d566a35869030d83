"""One model with several caches at hand, so that they can read the same tokens side by side."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace

from mlxkv.config import CacheConfig, parse_kv
from mlxkv.eval import feed
from mlxkv.eval.prefixes import Prefixes
from mlxkv.generate import new_cache
from mlxkv.models import Loaded, attach, detach

BASELINE = "fp16"  # mlx-lm's own caches: what every other arm is compared with


class Arms:
    """loaded: the model. configs: what each arm stores, by name; BASELINE is always one of them.

    windows: (sink, recent) for every arm that compresses, or None for those of each preset.
    """

    def __init__(
        self, loaded: Loaded, names: Iterable[str], windows: tuple[int, int] | None = None
    ):
        self.loaded = loaded
        self.configs: dict[str, CacheConfig] = {
            name: parse_kv(name) for name in dict.fromkeys((BASELINE, *names))
        }
        if windows is not None:
            self.configs = {
                name: replace(config, sink=windows[0], recent=windows[1])
                for name, config in self.configs.items()
            }
        self.prefixes = Prefixes()
        self.reports: dict[str, list] = {}  # one LayerReport per cache, once an arm was made

    @property
    def names(self) -> list[str]:
        return list(self.configs)

    @contextmanager
    def attached(self, name: str):
        """The model with the arm `name` attached: whatever makes a cache inside gets that one."""
        self.reports[name] = attach(self.loaded.model, self.configs[name])
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
                self.reports[name] = attach(self.loaded.model, self.configs[name])
                last = name
                out[name] = new_cache(self.loaded)
            yield {name: out[name] for name in names}
        finally:
            if last is not None:
                detach(self.loaded.model)

    def stored(self, name: str, cache: list) -> int:
        """Allocated bytes of the layers that grow with the context."""
        return feed.stored_by(self.reports[name], cache)
