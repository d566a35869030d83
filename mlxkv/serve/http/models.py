"""The models of a server: the first is there from the start, others come when they are asked for, and go when memory
asks for it."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import mlx.core as mx

from mlxkv.console import human_bytes
from mlxkv.errors import UserError
from mlxkv.machine import USABLE, machine_memory
from mlxkv.models.catalog.locate import locate
from mlxkv.serve.caches.memory import used_memory
from mlxkv.serve.engine import LEAST_MEMORY, Engine
from mlxkv.serve.http.request import DEFAULT_NAMES, no_model
from mlxkv.serve.http.site import Site, name_of
from mlxkv.serve.refusals import Refused


class Models:
    """The models by name. For the event loop. first: the one that is always there. loaded: others that are there now,
    the least recently used first. Raises UserError where two have one name."""

    def __init__(self, first: Site):
        _, *others = first.options.models
        self.first = first
        self._options = {name_of(model): replace(first.options, model=model) for model in others}
        self.names = (first.name, *self._options)
        if len({*self.names}) <= len(others):
            raise UserError(f"[--model] two have one name; got {', '.join(self.names)}")
        self.loaded: dict[str, Site] = {}
        self._lock = asyncio.Lock()

    async def site(self, name: object) -> Site:
        """The site of a model by the name in a request; it is loaded where it is not there. Raises Refused."""
        if not isinstance(name, str) or name in (self.first.name, *DEFAULT_NAMES):
            return self.first
        if name not in self._options:
            raise no_model(name[:80], self.names)
        async with self._lock:
            site = self.loaded.get(name)
            if site is None or not site.engine.is_healthy:
                site = await asyncio.to_thread(self._load, name)
            self.loaded.pop(name, None)
            self.loaded[name] = site
        return site

    def _load(self, name: str) -> Site:
        options, site = self._options[name], None
        place = locate(options.models[0])
        self._make_room((place.weights or place.config.stat().st_size) + LEAST_MEMORY)
        engine = Engine(options, self.first.metrics)
        try:
            site = Site(options, engine, self.first.metrics)
        except Exception as error:
            what = f"[model] {name} could not be loaded: {error}"
            raise Refused(503, what[:300], "model_not_loaded") from None
        finally:
            if site is None:
                engine.stop_and_join()
        return site

    def _make_room(self, need: int) -> None:
        """Unload models that nobody uses now, until so many bytes are free. Raises Refused."""
        free = int(USABLE * machine_memory()) - used_memory()
        for name in list(self.loaded):
            if free < need and not self.loaded[name].engine.is_busy:
                self.loaded.pop(name).engine.stop_and_join()
                gc.collect()
                mx.clear_cache()
                free = int(USABLE * machine_memory()) - used_memory()
        if free < need:
            raise Refused(
                503,
                f"[model] needs {human_bytes(need)} of memory, {human_bytes(max(0, free))} are free beside the models "
                "in use; try again later",
                "memory_busy",
                retry=10,
            )
