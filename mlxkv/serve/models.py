"""The models of a server: the first is loaded at the start, others on demand, and unloaded when memory is
short."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlxkv import __version__
from mlxkv.catalog.hub import locate
from mlxkv.console import human_bytes
from mlxkv.errors import UserError
from mlxkv.generate.usage import window_of
from mlxkv.machine import USABLE, footprint, machine_memory
from mlxkv.metal.launch import device_type
from mlxkv.serve.apis.reply import Markup
from mlxkv.serve.engine import LEAST_MEMORY, Engine
from mlxkv.serve.grammar import calls_of
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.reading import Reader, Worker
from mlxkv.serve.refusals import OtherModel, Refused, ending
from mlxkv.serve.request import ModelInfo, Read, Request, no_model
from mlxkv.serve.sessions import used_memory


def name_of(model: str) -> str:
    """Return the name of a model in requests: for a local path its last part, to hide the folder."""
    path = Path(model.strip()).expanduser()
    return path.resolve().name if path.exists() else model.strip()


class LoadedModel:
    """A model and its state, shared by all its requests. users: requests that hold it until their
    replies end. Raises the errors of loading."""

    def __init__(self, options: ServeOptions, worker: Worker | None = None):
        self.options, self.engine, self.users = options, Engine(options), 0
        self.metrics = Metrics()
        try:
            self.loaded = self.engine.wait_until_ready()
            self.name = name_of(self.loaded.name)
            self.model_info = ModelInfo(
                model=self.name,
                kv=self.loaded.kv_name,
                longest=self.loaded.context or 1 << 20,
                max_tokens=options.max_tokens,
                vocabulary=self.engine.vocabulary,
                calls=calls_of(self.loaded.tokenizer),
                sampling=self.loaded.sampling,
                context=self.loaded.context,
            )
            self._machine = make_text_state_machine(self.loaded.tokenizer)
            tokenizer, packs = self.loaded.tokenizer, self.engine.packs
            self.reader = Reader(tokenizer, options.template, self.model_info, worker, packs)
        except Exception:
            self.engine.stop_and_join()
            raise

    async def read(
        self, path: str, raw: bytes, key: str | None, names: tuple[str, ...] = ()
    ) -> Read:
        """Parse a request body, like `Reader.read`. key: the client's API key. names: other models. Raises Refused and
        OtherModel."""
        budget = None
        if self.options.overflow == "drop":
            budget = self.engine.memory.longest(self.model_info.longest)
        return await self.reader.read(path, raw, budget, names, key)

    def markup(self, request: Request, state: str) -> Markup:
        """Return the parser for a reply that begins in `state`; text completions have no thinking and no calls."""
        tokenizer = self.loaded.tokenizer
        marks = tokenizer.tool_call_start, tokenizer.tool_call_end
        machine = self._machine if request.chat else TextStateMachine()
        return Markup(machine, state, tokenizer.tool_parser, request.tools, marks)

    def close(self) -> None:
        """Stop the engine. Never raises."""
        self.engine.stop_and_join()
        self.reader.close()

    def kv(self, is_operator: bool = True) -> dict:
        """Return the /v1/kv document. is_operator: whether to include numbers that depend on all clients' requests."""
        engine, loaded = self.engine, self.loaded
        memory, sessions, disk = engine.memory, engine.sessions, engine.sessions.disk
        document = {
            "model": self.name,
            "kv": loaded.kv_name,
            "backend": device_type(),
            "version": __version__,
            "context": loaded.context,
            "max_tokens": self.options.max_tokens,  # default of a request
            # Longest sequence, reply included, without other requests: bounded by memory and context.
            "longest_tokens": memory.longest(self.model_info.longest),
            "tool_calls": loaded.tokenizer.has_tool_calling,
            "exact_tokens": window_of(loaded),  # shorter sequences are not compressed
            "batched": engine.is_batchable,
            "processes": engine.ranks.size,  # byte counts below are per process
            "report": loaded.report(),
            "chosen": loaded.chosen,  # what --kv 99% came to
            "steps": loaded.steps,
            "layers": [layer.as_dict() for layer in loaded.layers],
            "memory": {"bound_bytes": memory.bound},
        }
        if not is_operator:
            return document
        # Bytes of the cached tokens as computed by `models.usage`, and in 16 bits.
        active = [job.cache_tokens for job in list(engine.jobs.values())]
        kept = [len(session.tokens) for session in list(sessions.entries)]
        return document | {
            # Longest request admitted given current reservations.
            "safe_tokens": memory.longest(self.model_info.longest, beside=True),
            "memory": {
                "bound_bytes": memory.bound,
                "promised_bytes": memory.promised,
                "bytes": sum(map(memory.in_use, active))
                + sum(memory.in_use(tokens, rests=True) for tokens in kept),
                "bytes_fp16": sum(map(memory.fp16, [*active, *kept])),
                # Slack included; shared parts of sessions count once, or (apart) per session.
                "allocated_bytes": engine.kv_allocated + sessions.nbytes,
                "sessions_allocated_bytes": sessions.nbytes,
                "sessions_allocated_bytes_apart": sessions.bytes_apart,
            },
            "sessions": {
                "count": len(sessions.entries),
                "hit_rate": round(sessions.counts["hits"] / max(1, sessions.counts["lookups"]), 4),
                **sessions.counts,
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


class Models:
    """The models by name. For the event loop. loaded: loaded models except the first, the least recently used first.
    active: requests in progress. Raises UserError if two models share a name, and the errors of loading."""

    def __init__(self, options: ServeOptions, worker: Worker | None = None):
        self.options = options
        _, *others = options.models
        self.first, self.active = LoadedModel(options, worker), 0
        alone = replace(options, pack=None)  # packs are of the first model
        self._options = {name_of(model): replace(alone, model=model) for model in others}
        self.names = (self.first.name, *self._options)
        self.listed = (*self.names, *options.packs)
        if len({*self.listed}) < len(self.listed):
            self.first.close()
            raise UserError(f"[--model] two have one name; got {', '.join(self.listed)}")
        self.loaded: dict[str, LoadedModel] = {}
        self._lock, self._has_ended = asyncio.Lock(), False

    @asynccontextmanager
    async def read(
        self, path: str, raw: bytes, key: str | None, start: float
    ) -> AsyncIterator[tuple[LoadedModel, Read]]:
        """Yield the model named by a request, loading it if needed, and the parsed request. The model stays loaded
        until the block ends. key: the client's API key. The block counts as a request in progress, limited to the
        rest of `--timeout`. Raises Refused."""
        seconds = self.options.timeout
        if self.active >= self.options.max_requests:
            raise Refused(429, f"[--max-requests] {self.active} under way", "busy", retry=1)
        self.active += 1
        try:
            async with asyncio.timeout_at(start + seconds):
                loaded_model, result = self.first, None
                try:
                    result = await loaded_model.read(path, raw, key, self.names[1:])
                except OtherModel as other:
                    loaded_model = await self._loaded_model(other.name)
                loaded_model.users += 1
                try:
                    yield loaded_model, result or await loaded_model.read(path, raw, key)
                finally:
                    loaded_model.users -= 1
        except TimeoutError:
            raise Refused(504, f"[--timeout] took more than {seconds:.15g} s", "timeout") from None
        finally:
            self.active -= 1

    async def close(self) -> None:
        """Unload all models except the first, including one that is still loading, and load no more."""
        self._has_ended = True
        async with self._lock:
            for loaded_model in list(self.loaded.values()):
                await asyncio.to_thread(loaded_model.close)

    async def _loaded_model(self, name: str) -> LoadedModel:
        if name not in self._options:
            raise no_model(name[:80], self.names)
        while not self._is_ready(name):
            # A task of its own: other requests may wait for it after this one times out.
            load = asyncio.create_task(self._load(name))
            load.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(load)
        loaded_model = self.loaded[name] = self.loaded.pop(name)  # the latest last
        return loaded_model

    def _is_ready(self, name: str) -> bool:
        return name in self.loaded and self.loaded[name].engine.is_healthy

    async def _load(self, name: str) -> None:
        """Load a model, unless another request has loaded it meanwhile. Raises Refused."""
        async with self._lock:
            if self._has_ended:
                raise ending()
            if self._is_ready(name):
                return
            options = self._options[name]
            if broken := self.loaded.pop(name, None):  # its engine failed for good
                await asyncio.to_thread(broken.close)
            try:
                place = await asyncio.to_thread(locate, options.models[0])
                size = place.weights or place.config.stat().st_size
                await self._free_memory(size + LEAST_MEMORY)
                self.loaded[name] = await asyncio.to_thread(LoadedModel, options)
            except Refused:
                raise
            except Exception as error:
                what = f"[model] {name} could not be loaded: {error}"
                raise Refused(503, what[:300], "model_not_loaded") from None

    async def _free_memory(self, need: int) -> None:
        """Unload idle models until `need` bytes are free. Raises Refused."""
        for name in (None, *self.loaded):
            # Checked in the event loop, which assigns models to requests.
            if name is not None and not self.loaded[name].users:
                await asyncio.to_thread(self.loaded.pop(name).close)
                gc.collect()
            mx.clear_cache()  # MLX's cached buffers count as used
            free = int(USABLE * machine_memory()) - used_memory()
            if free >= need:
                return
        reason = f"[model] needs {human_bytes(need)} of memory"
        # Logged, not sent: free memory reveals other clients' requests.
        logging.warning(f"{reason}; {human_bytes(max(0, free))} are free beside the models in use")
        reason += ", which are not free beside the models in use; try again later"
        raise Refused(503, reason, "memory_busy", retry=10)

    def kv(self, is_operator: bool) -> dict:
        """Return the /v1/kv document: the first model's caches, then those of other loaded models."""
        document = self.first.kv(is_operator)
        if is_operator:
            document |= {"active_requests": self.active}
            document["memory"] |= _process_memory()
        others = {name: loaded_model.kv(is_operator) for name, loaded_model in self.loaded.items()}
        return {"models": self.names} | document | {"others": others}

    def metrics(self, responses: Counter[int], wrong_keys: int) -> str:
        """Return the /metrics page. responses: counts by status."""
        loaded_models = {self.first.name: self.first} | self.loaded
        for loaded_model in loaded_models.values():
            loaded_model.metrics.counts["faults"] = loaded_model.engine.faults
        models = {name: (each.metrics, each.kv()) for name, each in loaded_models.items()}
        gauges: dict[str, float] = {"active_requests": self.active, "wrong_keys": wrong_keys}
        gauges |= {f"kv_{name}": value for name, value in _process_memory().items()}
        return metrics_page(responses, gauges, models)


def _process_memory() -> dict[str, int]:
    """Return the bytes of all models: MLX's arrays, including weights, and the whole process."""
    return {"mlx_bytes": mx.get_active_memory(), "process_bytes": footprint()}


# -- metrics: counts and times since the start of the server, in Prometheus' text format

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that a cache held already.",
    "generated_tokens": "Tokens of replies.",
    "cut_off": "Replies whose reader left.",
    "faults": "Failures of the generation thread.",
}
# Parts of the /v1/kv document exported as gauges.
GAUGES = {
    "memory": ("kv", "Of KV caches."),
    "sessions": ("sessions", "Of the prompt cache."),
    "disk": ("disk", "Of sessions on disk."),
}
TIMES = {
    "first_token": "Seconds to the first token.",
    "duration": "Seconds to the end of a reply.",
}


class Metrics:
    """Counters of one model, named as in `COUNTERS`. For the event loop."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        # Counts of observations at or below each of `BUCKETS`, the total count, and the sum.
        self.times = {name: [0.0] * (len(BUCKETS) + 2) for name in TIMES}

    def took(self, name: str, seconds: float) -> None:
        """Record an observation of one of `TIMES`."""
        counts = self.times[name]
        for i, bound in enumerate((*BUCKETS, inf)):
            counts[i] += seconds <= bound
        counts[-1] += seconds


def metrics_page(
    responses: Counter[int], gauges: dict[str, float], models: dict[str, tuple[Metrics, dict]]
) -> str:
    """Return the page of `/metrics`. responses: counts by status. gauges: the server's. models: metrics of the loaded
    models, and their /v1/kv documents."""
    families: dict[str, list[str]] = {}

    def add(name: str, kind: str, words: str, value: float, suffix: str = "", **labels) -> None:
        full = f"mlxkv_{name}"
        lines = families.setdefault(full, [f"# HELP {full} {words}", f"# TYPE {full} {kind}"])
        shown = ",".join(f'{label}="{_escaped(str(x))}"' for label, x in labels.items())
        lines.append(f"{full}{suffix}{f'{{{shown}}}' if shown else ''} {value:.10g}")

    for status, count in sorted(responses.items()):
        add("responses_total", "counter", "HTTP responses.", count, status=status)
    for name, value in gauges.items():
        add(name, "gauge", "Of the whole server.", value)
    for model, (metrics, document) in models.items():
        for name, words in COUNTERS.items():
            add(f"{name}_total", "counter", words, metrics.counts[name], model=model)
        for name, words in TIMES.items():
            family = f"{name}_seconds", "histogram", words
            *counts, total, seconds = metrics.times[name]
            for bound, count in zip((*BUCKETS, "+Inf"), (*counts, total), strict=True):
                add(*family, count, "_bucket", model=model, le=bound)
            add(*family, seconds, "_sum", model=model)
            add(*family, total, "_count", model=model)
        words = "Of a request that is admitted now."
        add("safe_tokens", "gauge", words, document["safe_tokens"], model=model)
        for part, (prefix, words) in GAUGES.items():
            for name, value in (document[part] or {}).items():
                add(f"{prefix}_{name}", "gauge", words, value, model=model)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _escaped(text: str) -> str:
    """Escape a label's value. Prometheus accepts no other escapes, and rejects the page otherwise."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
