"""mlx-lm's generation thread with compressed caches: admission, measuring, and life after a failure."""

from __future__ import annotations

import logging
import time
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

from mlxkv import faults
from mlxkv.console import warn
from mlxkv.errors import MachineError
from mlxkv.fit import USABLE, machine_memory
from mlxkv.models.decoders import step_down
from mlxkv.models.loader import Loaded
from mlxkv.serve.alone import Alone
from mlxkv.serve.disk import open_disk
from mlxkv.serve.draws import make_sampler
from mlxkv.serve.memory import Memory, cut_padding, shapes_of
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import Options
from mlxkv.serve.provider import Provider
from mlxkv.serve.ranks import Ranks
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

    def __reduce__(self):
        return Ticket, ()  # in another process, where nobody waits

    def drop(self) -> None:
        """Stop what lies in the line, which nobody reads."""
        while not self.line.empty():
            getattr(self.line.get_nowait(), "stop", lambda: None)()


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
        self.ranks = Ranks()
        super().__init__(Provider(options, self.ranks.group), None)

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
            self.ranks.start(self.model_provider.load_default)
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
                self._loop()
            except Exception as error:  # out of memory, a fault of a kernel: this batch is lost
                logging.exception("generation failed")
                self.metrics.add(faults=1)
                instead = False
                try:
                    instead = self._step_down(error)
                # The GPU may raise again; who waits has to hear of it all the same.
                except Exception:
                    logging.exception("kernels were not switched off")
                self._fail(error, instead)
                if self.ranks.many:  # they are no longer in step
                    self.problem = MachineError(f"[serve] generation failed: {error}")
                    return
        self.sessions.close()

    def _loop(self) -> None:
        names = {"BatchGenerator": partial(Batches, self), "_make_sampler": make_sampler}
        _with_names(self, "_generate", **names)()

    def _share_object(self, obj):
        """As mlx-lm's, and whether this is the end."""
        obj = self.ranks.share(obj)
        self._stop = self._stop or self.ranks.ended
        return obj

    def stop_and_join(self) -> None:
        self.ranks.end()
        if not self.ranks.many:
            super().stop_and_join()
            return
        while self._generation_thread.is_alive():
            self._generation_thread.join(0.1)
            self.ranks.watch(self.options.timeout)

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
            limit = self.options.disk_bytes
            disk = self.ranks.together(lambda: open_disk(folder, limit, loaded, self.ranks))
        self.memory = Memory(
            *(self.ranks.least(bound), shapes_of(caches), self.cli_args.prefill_step_size),
            batched=self.model_provider.is_batchable,
        )
        self.sessions = Sessions(
            *(self.memory, lambda: make_prompt_cache(loaded.model), disk, self.options.reuse),
            agree=self.ranks.most,
        )
        self.prompt_cache = _Watched(self)

    def _step_down(self, error: Exception) -> bool:
        """Go on without the kernels that the error may come from, where there are any."""
        if self.ranks.many:  # they end, and others may never come to what is under way here
            return False
        instead = step_down(self.model_provider.loaded, error)
        if instead is None:
            return False
        warn(instead)
        self.sessions.forget()  # their caches hold on to the kernels
        return True

    def _fail(self, error: Exception, instead: bool = False) -> None:
        """Tell all who wait; mlx-lm's loop starts again with an empty batch. instead: whether something
        else runs now."""
        said = f"[serve] generation failed: {type(error).__name__}: {faults.reason(error)}"
        if instead:
            said += "; the kernels that failed are switched off: ask again"
        for queue in list(self._queues):
            queue.put(MachineError(said))
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
        found = self.ranks.decide(lambda: self._read(tokenizer, request, args, ticket))
        prompt, limit = found[0], self.model_provider.loaded.context
        if limit:
            args.max_tokens = min(args.max_tokens, limit - len(prompt))
        ticket.prompt_tokens = len(prompt)
        self.memory.promise(id(ticket), len(prompt) + args.max_tokens)
        self._ticket = ticket
        return found

    def _read(self, tokenizer, request, args, ticket: Ticket):
        """The tokens of a request: templates may look at the clock, clients may have left."""
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
        return found

    def _is_batchable(self, args) -> bool:
        """Seeds are no obstacle, as they are to mlx-lm: see `draws`."""
        return self.model_provider.is_batchable

    def _serve_single(self, request, *more) -> None:
        self._ticket = None
        line, asked, args = request
        ticket = getattr(asked, "ticket", None) or Ticket()
        line = Alone(line, lambda: ticket.given_up, self.ranks)
        serve = _with_names(
            self, "_serve_single", _make_sampler=self.ranks.sampler(server._make_sampler)
        )
        serve((line, asked, args), *more)  # what it raises, `_fail` clears up
        if line.fault is not None:
            self.metrics.add(faults=1)
            self._step_down(line.fault)
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

    def check(self) -> None:
        """Raises what ended the generation thread for good: KeyboardInterrupt, where another process
        was asked to end."""
        if self.problem is not None:
            raise self.problem
        if self.ranks.ended:
            raise KeyboardInterrupt
        self.ranks.watch(self.options.timeout)

    def _await_response(self, response_queue):
        """As mlx-lm's (0.32), but while nothing comes, the thread that waits looks after its line."""
        while True:
            try:
                return response_queue.get(timeout=WAIT_SECONDS)
            except Empty:
                if not self.generation_available() and response_queue.empty():
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
        self.engine.ranks.step(self._generation_batch)
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


def _with_names(engine: Engine, method: str, **names) -> Callable:
    """A method of mlx-lm's as it is, but for some names inside it that nothing else leads to: the class
    of its batches, the maker of its samplers."""
    found = getattr(server.ResponseGenerator, method)
    return MethodType(FunctionType(found.__code__, vars(server) | names, method), engine)
