"""The models of a server: the first is there from the start, others come when they are asked for, and go when memory
asks for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from mlxkv.serve.http.talk import late
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.reading import Read
from mlxkv.serve.refusals import Refused, ending


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
        self._lock, self._has_ended = asyncio.Lock(), False

    @asynccontextmanager
    async def use(self, name: object) -> AsyncIterator[Site]:
        """Yield the site of a model by the name in a request; it stays loaded until the end of the block. It is loaded
        where it is not there. Raises Refused."""
        site = await self._site(name)
        site.users += 1
        try:
            yield site
        finally:
            site.users -= 1

    @asynccontextmanager
    async def read(
        self, path: str, raw: bytes, arrival_time: float
    ) -> AsyncIterator[tuple[Site, Read | int]]:
        """Yield the site of the model that the request in a body names, and the request; see `use`."""
        others, seconds = self.names[1:], self.first.options.timeout
        try:
            async with asyncio.timeout_at(arrival_time + seconds):
                result = await self.first.read(path, raw, others)
        except TimeoutError:
            raise late(seconds) from None
        name = result if isinstance(result, str) else None
        async with self.use(name) as site:
            yield site, result if name is None else await site.read(path, raw)

    async def close(self) -> None:
        """Unload all models but the first; one that is being loaded goes once it is there. No others are loaded."""
        self._has_ended = True
        async with self._lock:
            for site in list(self.loaded.values()):
                await asyncio.to_thread(site.close)

    async def _site(self, name: object) -> Site:
        if not isinstance(name, str) or name in (self.first.name, *DEFAULT_NAMES):
            return self.first
        if name not in self._options:
            raise no_model(name[:80], self.names)
        seconds = self.first.options.timeout
        try:
            async with asyncio.timeout(seconds):
                while not self._is_ready(name):
                    # Others may wait for it, too: it goes on where this request has no more time.
                    load = asyncio.create_task(self._load(name))
                    load.add_done_callback(lambda task: task.cancelled() or task.exception())
                    await asyncio.shield(load)
        except TimeoutError:
            raise late(seconds) from None
        site = self.loaded[name] = self.loaded.pop(name)  # the latest last
        return site

    def _is_ready(self, name: str) -> bool:
        return name in self.loaded and self.loaded[name].engine.is_healthy

    async def _load(self, name: str) -> None:
        """Load a model, unless that was done while this waited for others. Raises Refused."""
        async with self._lock:
            if self._has_ended:
                raise ending()
            if self._is_ready(name):
                return
            options = self._options[name]
            try:
                place = await asyncio.to_thread(locate, options.models[0])
                size = place.weights or place.config.stat().st_size
                await self._make_room(size + LEAST_MEMORY)
                self.loaded[name] = await asyncio.to_thread(self._start, options)
            except Refused:
                raise
            except Exception as error:
                what = f"[model] {name} could not be loaded: {error}"
                raise Refused(503, what[:300], "model_not_loaded") from None

    def _start(self, options: ServeOptions) -> Site:
        """Start the engine of a model. Raises what loading raises."""
        engine, site = Engine(options, self.first.metrics), None
        try:
            site = Site(options, engine, self.first.metrics)
        finally:
            if site is None:
                engine.stop_and_join()
        return site

    async def _make_room(self, need: int) -> None:
        """Unload models that nobody uses now, until so many bytes are free. Raises Refused."""
        mx.clear_cache()  # buffers that MLX has freed count as used
        free = int(USABLE * machine_memory()) - used_memory()
        for name in list(self.loaded):
            # Whether it is in use is asked in the event loop, which hands it out.
            if free < need and not self.loaded[name].users:
                await asyncio.to_thread(self.loaded.pop(name).close)
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
