"""mlx-lm's generation thread with compressed caches: admission, measuring, and life after a failure."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue
from threading import Event, local
from types import FunctionType, MethodType
from weakref import WeakSet

import mlx.core as mx
from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.errors import MachineError
from mlxkv.fit import USABLE, machine_memory
from mlxkv.generate import prefill_step
from mlxkv.models import load
from mlxkv.models.layers import left_out
from mlxkv.models.loader import Loaded
from mlxkv.serve.alone import Alone
from mlxkv.serve.disk import Disk
from mlxkv.serve.draws import make_sampler
from mlxkv.serve.memory import Memory, cut_padding, shapes_of
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import Options
from mlxkv.serve.refusals import Refused
from mlxkv.serve.sessions import Sessions

MEASURE_SECONDS = WAIT_SECONDS = 0.25
LEAST_MEMORY = 64 << 20  # for caches, when --kv-memory is not given


@dataclass(eq=False)
class Ticket:
    """One request on its way. kv_bytes: of its caches, as measured at the end. tokens: that they
    hold. cache: those it started from. given_up: nobody waits for it any more. line: where replies go."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    cache: list | None = field(default=None, repr=False)
    given_up: bool = False
    line: Queue = field(default_factory=Queue, repr=False)

    def drop(self) -> None:
        """Stop what lies in the line, which nobody reads."""
        while not self.line.empty():
            getattr(self.line.get_nowait(), "stop", lambda: None)()


class Provider:
    """The one model, where mlx-lm's `ModelProvider` has any that a request names."""

    def __init__(self, options: Options):
        self.options = options
        self.cli_args = _arguments(options)
        self.loaded: Loaded | None = None
        self.model = self.tokenizer = self.processor = self.draft_model = None
        self.model_key = "the model"
        self.is_batchable = False

    def load_default(self) -> None:
        """In the generation thread: arrays are computed where they were made."""
        o = self.options
        loaded = load(o.model, o.kv, o.kv_strict, o.dtype, o.calibration, fold=o.fold)
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        mixed = any(r.compressed for r in loaded.layers) and left_out(loaded.layers)
        caches = make_prompt_cache(self.model)
        # Masks of one kind of batched cache do not fit the other: such a model runs one by one.
        self.is_batchable = not mixed and all(hasattr(cache, "merge") for cache in caches)

    def load(self, model, adapter=None, draft=None):
        """The model, whatever name: names were checked before."""
        return self.model, self.tokenizer

    def reset(self) -> None:
        """The thread ends (mlx-lm 0.32)."""
        self.model = self.tokenizer = None


class Engine(server.ResponseGenerator):
    """`started` waits for the model. Attributes are written by the generation thread alone."""

    def __init__(self, options: Options, metrics: Metrics):
        self.options, self.metrics = options, metrics
        self.ready, self.problem = Event(), None
        self.vocabulary = 0
        self.memory: Memory | None = None
        self.sessions: Sessions | None = None
        self.tickets: dict[int, Ticket] = {}  # by the number of a sequence in the batch
        self._ticket: Ticket | None = None  # of the request that is being taken up
        self._queues: WeakSet[Queue] = WeakSet()  # of requests that were taken up
        self.kv_bytes = self.kv_bytes_fp16 = 0  # of caches in use, and what 16 bits would take
        self._measured = 0.0
        self.waiting = local()  # `check`: called by a thread that waits; raises to give up
        super().__init__(Provider(options), None)

    def started(self) -> Loaded:
        """The loaded model. Raises what loading raised."""
        self.ready.wait()
        if self.problem is not None:
            raise self.problem
        return self.model_provider.loaded

    # -- the generation thread

    def _generate(self) -> None:
        try:
            self._serve()
        finally:
            # Arrays that outlive this thread's streams abort the process as it ends (MLX 0.32).
            getattr(mx, "clear_streams", lambda: None)()

    def _serve(self) -> None:
        try:
            self.model_provider.load_default()
            self._prepare()
        except Exception as error:
            self.problem = error
            return
        finally:
            self.ready.set()
        # The model is there: mlx-lm's own call has nothing left to do, this time and after a fault.
        self.model_provider.load_default = lambda: None
        while not self._stop:
            try:
                _loop(self)()
            except Exception as error:  # out of memory, a fault of a kernel: this batch is lost
                logging.exception("generation failed")
                self.metrics.add(faults=1)
                self._fail(error)
        self.sessions.close()

    def _prepare(self) -> None:
        loaded = self.model_provider.loaded
        caches = make_prompt_cache(loaded.model)
        # One token: caches tell their shapes, and the model how many tokens it knows.
        logits = loaded.model(mx.array([[0]]), cache=caches)
        mx.eval(logits)
        self.vocabulary = logits.shape[-1]
        bound = self.options.memory_bytes
        if bound is None:
            spare = int(USABLE * machine_memory()) - mx.get_active_memory()
            bound = max(LEAST_MEMORY, spare // 2)
        folder = self.options.disk_folder
        disk = None
        if folder and self.options.reuse:
            disk = Disk(folder, self.options.disk_bytes, loaded)
        self.memory = Memory(
            *(bound, shapes_of(caches), self.cli_args.prefill_step_size),
            batched=self.model_provider.is_batchable,
        )
        self.sessions = Sessions(
            self.memory, lambda: make_prompt_cache(loaded.model), disk, self.options.reuse
        )
        self.prompt_cache = _Watched(self)

    def _fail(self, error: Exception) -> None:
        """Tell all who wait; mlx-lm's loop starts again with an empty batch."""
        for queue in list(self._queues):
            queue.put(MachineError(f"[serve] generation failed: {type(error).__name__}: {error}"))
        self._queues.clear()
        for ticket in [*self.tickets.values(), *filter(None, [self._ticket])]:
            self.memory.release(id(ticket))
        self.tickets.clear()
        self._ticket, self.kv_bytes, self.kv_bytes_fp16 = None, 0, 0
        self.prompt_cache = _Watched(self)
        # A compiled sampler that raised while it was traced leaves a placeholder there (MLX 0.32).
        mx.random.seed(time.time_ns())
        mx.clear_cache()

    def _next_request(self, timeout=None):
        request = super()._next_request(timeout)
        if request is not None:
            self._queues.add(request[0])
            if ticket := getattr(request[1], "ticket", None):
                ticket.line = request[0]
        return request

    def _tokenize(self, tokenizer, request, args):
        """As mlx-lm's, then: does it fit? What is raised here goes back to the client."""
        self._ticket, ticket = None, getattr(request, "ticket", None) or Ticket()
        if ticket.given_up:
            raise Refused(504, "[serve] given up before it began", "timeout")
        for word in args.stop_words:
            if not tokenizer.encode(word, add_special_tokens=False):
                raise Refused(400, f"[stop] has no tokens; got {word!r}", "invalid_value")
        try:
            found = super()._tokenize(tokenizer, request, args)
        except Exception as error:  # templates raise anything
            raise Refused(
                400, f"[messages] the chat template refuses this: {error}"[:300], "invalid_value"
            ) from None
        prompt, limit = found[0], self.model_provider.loaded.context
        if not prompt:
            raise Refused(400, "[prompt] has no tokens; got an empty one", "invalid_value")
        if limit and len(prompt) >= limit:
            raise Refused(
                400,
                f"[prompt] longer than the model's context; got {len(prompt)} tokens; it takes "
                f"{limit}, the reply included",
                "context_length_exceeded",
            )
        if limit:
            args.max_tokens = min(args.max_tokens, limit - len(prompt))
        ticket.prompt_tokens = len(prompt)
        self.memory.promise(id(ticket), len(prompt) + args.max_tokens)
        self._ticket = ticket
        return found

    def _is_batchable(self, args) -> bool:
        """Seeds are no obstacle, as they are to mlx-lm: see `draws`."""
        return self.model_provider.is_batchable

    def _serve_single(self, request, *more) -> None:
        self._ticket = None
        line, asked, args = request
        ticket = getattr(asked, "ticket", None) or Ticket()
        try:
            super()._serve_single((Alone(line, lambda: ticket.given_up), asked, args), *more)
        finally:
            if args.seed is not None:
                mx.random.seed(time.time_ns())  # mlx-lm has seeded everybody's draws
            if self._ticket is not None:
                self.memory.release(id(self._ticket))
                self._ticket = None
                self.sessions.shrink()

    def taken_up(self, uid: int) -> None:
        """The batch has given the request that was tokenized last a number."""
        self.tickets[uid], self._ticket = self._ticket, None
        self.tickets[uid].cache = None  # the batch has it
        if self.tickets[uid].given_up:  # while its cache was looked for
            self.tickets[uid].drop()

    def left(self, uid: int) -> Ticket | None:
        """A sequence has left the batch."""
        ticket = self.tickets.pop(uid, None)
        if ticket is not None:
            self.memory.release(id(ticket))
        return ticket

    def measure(self, batch, now: bool = False) -> None:
        """Note what the caches in use take, a few times a second."""
        if not now and time.monotonic() - self._measured < MEASURE_SECONDS:
            return
        self._measured = time.monotonic()
        self.kv_bytes = batch.prompt_cache_nbytes
        parts = (batch._prompt_batch, batch._generation_batch)
        self.kv_bytes_fp16 = sum(self.memory.fp16(len(t)) for part in parts for t in part.tokens)

    # -- for those who ask from other threads

    def _await_response(self, response_queue):
        """As mlx-lm's (0.32), but while nothing comes, the thread that waits looks after its line."""
        while True:
            try:
                return response_queue.get(timeout=WAIT_SECONDS)
            except Empty:
                if not self.generation_available():
                    raise MachineError("[serve] the generation thread has ended") from None
                getattr(self.waiting, "check", lambda: None)()

    def numbers(self, ticket: Ticket) -> dict:
        """The `kv` field of a reply."""
        if ticket.cache is not None and not ticket.kv_bytes:  # served alone
            ticket.kv_bytes = sum(cache.nbytes for cache in ticket.cache)
            ticket.tokens = max((cache.size() for cache in ticket.cache), default=0)
        fp16 = self.memory.fp16(ticket.tokens)
        return {
            "preset": self.model_provider.loaded.kv_name,
            "tokens": ticket.tokens,
            "cached_tokens": ticket.cached_tokens,
            "bytes": ticket.kv_bytes,
            "bytes_fp16": fp16,
            "ratio": round(fp16 / ticket.kv_bytes, 3) if ticket.kv_bytes else None,
        }

    @property
    def is_healthy(self) -> bool:
        return self._generation_thread.is_alive() and self.problem is None

    def generation_available(self) -> bool:
        return self.is_healthy


class _Watched:
    """The sessions as mlx-lm's loop sees them: it deletes its own reference as it ends."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine.sessions, name)

    def __len__(self) -> int:
        return len(self._engine.sessions)

    def fetch_nearest_cache(self, model, tokens):
        cache, rest = self._engine.sessions.fetch_nearest_cache(model, tokens)
        if (ticket := self._engine._ticket) is not None:
            ticket.cache, ticket.cached_tokens = cache, len(tokens) - len(rest)
        return cache, rest


class Batches(server.BatchGenerator):
    """A batch that reports to `engine`."""

    def __init__(self, engine: Engine, *args, **kwargs):
        self.engine = engine
        super().__init__(*args, **kwargs)

    def insert_segments(self, *args, **kwargs):
        uids = super().insert_segments(*args, **kwargs)
        for uid in uids:
            self.engine.taken_up(uid)
        return uids

    def next(self):
        read, written = super().next()
        cut_padding(self._prompt_batch.prompt_cache)
        for response in written:
            if response.finish_reason is not None and (ticket := self.engine.left(response.uid)):
                ticket.kv_bytes = sum(cache.nbytes for cache in response.prompt_cache)
                ticket.tokens = len(response.all_tokens)
        self.engine.measure(self, any(response.finish_reason for response in written))
        return read, written

    def remove(self, uids, *args, **kwargs):
        found = super().remove(uids, *args, **kwargs)
        for uid in uids:
            self.engine.left(uid)
        self.engine.measure(self, now=True)
        return found


def _loop(engine: Engine) -> Callable[[], None]:
    """mlx-lm's generation loop as it is, but for the class of its batches (they are a variable inside
    it, and nothing else leads to them) and the samplers of their rows."""
    loop = server.ResponseGenerator._generate
    own = {"BatchGenerator": partial(Batches, engine), "_make_sampler": make_sampler}
    names = vars(server) | own
    return MethodType(FunctionType(loop.__code__, names, loop.__name__), engine)


def _arguments(options: Options) -> Namespace:
    """What mlx-lm's server reads of its own command line, both ends of the pinned range."""
    return Namespace(
        **{"model": None, "adapter_path": None, "draft_model": None, "trust_remote_code": False},
        **{"num_draft_tokens": 0, "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0, "pipeline": False},
        **{"chat_template": "", "use_default_chat_template": False, "chat_template_args": {}},
        max_tokens=options.max_tokens,
        decode_concurrency=options.batch,
        prompt_concurrency=options.prefill_batch,
        prefill_step_size=options.prefill_step or prefill_step(),
        prompt_cache_size=None,
        prompt_cache_bytes=None,
        allowed_origins=list(options.origins),
    )
