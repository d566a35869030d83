"""One model: its engine, its reader of requests, and its part of /v1/kv."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mlxkv import __version__
from mlxkv.metal.launch import backend
from mlxkv.models.usage import window_of
from mlxkv.serve.engine import Engine
from mlxkv.serve.grammar import calls_of
from mlxkv.serve.http.request import Served
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.reading import Read, Reader


def name_of(model: str) -> str:
    """The name under which a model is asked for: of a local folder or file, but not where it lies."""
    path = Path(model.strip()).expanduser()
    return path.resolve().name if path.exists() else model.strip()


class Site:
    """A model and its state, shared by all its requests. users: requests that it was given to, and whose replies have
    not ended. Raises what loading raises."""

    def __init__(self, options: ServeOptions, metrics: Metrics):
        self.options, self.engine, self.users = options, Engine(options, metrics), 0
        try:
            self.loaded = self.engine.wait_until_ready()
            self.name = name_of(self.loaded.name)
            self.served = Served(
                model=self.name,
                kv=self.loaded.kv_name,
                longest=self.loaded.context or 1 << 20,
                max_tokens=options.max_tokens,
                vocabulary=self.engine.vocabulary,
                calls=calls_of(self.loaded.tokenizer),
                sampling=self.loaded.sampling,
            )
            self._reader = Reader(self.loaded.tokenizer, options.template, self.served)
        except Exception:
            self.engine.stop_and_join()
            raise

    async def read(self, path: str, raw: bytes, names: tuple[str, ...] = ()) -> Read | int | str:
        """The request in a body, as `Reader.read` returns it. names: of other models. Raises Refused."""
        context, room = self.loaded.context, None
        if self.options.overflow == "drop":
            room = self.engine.memory.longest(context or 1 << 20)
        return await self._reader.read(path, raw, context, room, names)

    def close(self) -> None:
        """End the engine. Raises nothing."""
        self.engine.stop_and_join()
        self._reader.close()

    def kv(self, is_operator: bool = True) -> dict:
        """The document of /v1/kv. is_operator: with numbers that depend on what all clients ask."""
        engine, loaded = self.engine, self.loaded
        memory, sessions, disk = engine.memory, engine.sessions, engine.sessions.disk
        document = {
            "model": self.name,
            "kv": loaded.kv_name,
            "backend": backend(),
            "version": __version__,
            "context": loaded.context,
            "max_tokens": self.options.max_tokens,  # of a reply whose request names none
            # Of a sequence, its reply included, where nobody else asks: by memory and by context.
            "longest_tokens": memory.longest(self.served.longest),
            "exact_tokens": window_of(loaded),  # nothing is compressed in sequences up to here
            "batched": engine.is_batchable,
            "processes": engine.ranks.size,  # bytes below are those of one
            "report": loaded.report(),
            "steps": loaded.steps,
            "layers": [asdict(layer) for layer in loaded.layers],
            "memory": {"bound_bytes": memory.bound},
        }
        if not is_operator:
            return document
        # Bytes of the tokens that are held, by the rule of `models.usage`; 16 bits by the same.
        active = [job.cache_tokens for job in list(engine.jobs.values())]
        kept = [len(session.tokens) for session in list(sessions.entries)]
        bytes_active = sum(map(memory.in_use, active))
        bytes_kept = sum(memory.in_use(tokens, rests=True) for tokens in kept)
        fp16_active, fp16_kept = sum(map(memory.fp16, active)), sum(map(memory.fp16, kept))
        return document | {
            # The same beside what is promised now: a request of so many tokens is admitted.
            "safe_tokens": memory.longest(self.served.longest, beside=True),
            "memory": {
                "bound_bytes": memory.bound,
                "promised_bytes": memory.promised,
                "bytes": bytes_active + bytes_kept,
                "bytes_fp16": fp16_active + fp16_kept,
                "active_bytes": bytes_active,
                "active_bytes_fp16": fp16_active,
                "sessions_bytes": bytes_kept,
                "sessions_bytes_fp16": fp16_kept,
                # With room to grow; parts that sessions share count once, or (apart) each time.
                "allocated_bytes": engine.kv_allocated + sessions.nbytes,
                "active_allocated_bytes": engine.kv_allocated,
                "sessions_allocated_bytes": sessions.nbytes,
                "sessions_allocated_bytes_apart": sessions.bytes_apart,
            },
            "sessions": {
                "count": len(sessions),
                "lookups": sessions.lookups,
                "hits": sessions.hits,
                "hit_rate": round(sessions.hits / max(1, sessions.lookups), 4),
                "tokens": sessions.tokens,
                "tokens_found": sessions.tokens_found,
                "evicted": sessions.evicted,
            },
            "disk": disk
            and {
                "files": len(disk.entries),
                "bytes": disk.nbytes,
                "saved": disk.saved,
                "found": disk.found,
                "failed": disk.failed,
            },
        }
