"""mlx-lm's generation thread with compressed caches: admits requests, measures caches, outlives faults."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from queue import Empty, Queue
from threading import Event
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import mlx.core as mx
from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import faults
from mlxkv.console import warn
from mlxkv.errors import MachineError
from mlxkv.machine import USABLE, machine_memory
from mlxkv.models.decoders import step_down
from mlxkv.models.hooks.mark import forget_steps
from mlxkv.models.loader import Loaded
from mlxkv.models.replies.continuing import continued
from mlxkv.models.replies.stops import ReplyText
from mlxkv.models.replies.thinking import Thinking
from mlxkv.models.turns import Cut, Turns
from mlxkv.models.usage import Usage, window_of
from mlxkv.serve import told
from mlxkv.serve.alone import Alone
from mlxkv.serve.caches.disk import open_disk
from mlxkv.serve.caches.memory import Memory, cut_padding, shapes_of
from mlxkv.serve.caches.sessions import Owned, Sessions
from mlxkv.serve.grammar import Grammars
from mlxkv.serve.http.request import Request
from mlxkv.serve.job import Arguments, Aside, Job
from mlxkv.serve.metrics import Metrics
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.provider import Provider, make_sampler
from mlxkv.serve.ranks import Ranks
from mlxkv.serve.refusals import Refused, ending

MEASURE_SECONDS = 0.25
LEAST_MEMORY = 64 << 20  # bytes for caches, when --kv-memory is not given


class Engine(server.ResponseGenerator):
    """Loads the model and generates, in a thread of its own. Other threads only read attributes.

    ready: set when the model is loaded. problem: the error that ended the thread for good, or None. over:
    whether it takes no more requests, and puts sessions away.
    jobs: requests in the batch, by mlx-lm's number. kv_bytes: of the tokens of requests under way.
    kv_bytes_fp16: the same in plain 16-bit caches. kv_allocated: what their caches take, with room to grow.
    vocabulary: tokens that the model knows.
    """

    def __init__(self, options: ServeOptions, metrics: Metrics):
        self.options, self.metrics = options, metrics
        self.ready, self.problem, self.over = Event(), None, False
        self.vocabulary = 0
        self.memory: Memory | None = None
        self.sessions: Sessions | None = None
        self.jobs: dict[int, Job] = {}
        self._taken: WeakSet[Job] = WeakSet()  # requests that came out of the queue
        self.kv_bytes = self.kv_bytes_fp16 = self.kv_allocated = 0
        self._measured = 0.0
        self.ranks = Ranks()
        self._asides: Queue[Aside] = Queue()
        super().__init__(Provider(options, self.ranks.group), None)

    def started(self) -> Loaded:
        """Wait for the model. Raises what loading raised."""
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
            if (loaded := self.model_provider.loaded) is not None:
                forget_steps(loaded.model)
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
        self.model_provider.load_default = lambda: None  # mlx-lm's loop loads at every start
        while not self._stop:
            try:
                self._loop()
            except Exception as error:  # out of memory, a fault of a kernel: this batch is lost
                logging.exception("generation failed")
                self.metrics.add(faults=1)
                instead = False
                try:
                    instead = self._step_down(error)
                # The GPU may raise again; clients that wait have to be told all the same.
                except Exception:
                    logging.exception("kernels were not switched off")
                self._fail(error, instead)
                if self.ranks.many:  # they are no longer in step
                    self.problem = MachineError(f"[serve] generation failed: {error}")
                    return
        self.over = True
        self._tell(ending())
        self.sessions.close()

    def _tell(self, error: Exception) -> None:
        """End all requests that wait for something with an error."""
        while not self.requests.empty():
            self.requests.get_nowait()[0].put(error)
        while not self._asides.empty():
            self._asides.get_nowait().line.put(error)
        for job in list(self._taken):
            job.line.put(error)
        self._taken.clear()

    def _loop(self) -> None:
        self.prompt_cache = self.sessions  # mlx-lm deletes this reference as it ends
        _with_names(
            self,
            "_generate",
            BatchGenerator=partial(Batches, self),
            _make_sampler=_job_and_sampler,
            _make_logits_processors=self._processors,
        )()

    def _share_object(self, obj):
        """Tell all processes rank 0's object, which is JSON, and whether this is the end."""
        obj = self.ranks.share(obj)
        self._stop = self._stop or self.ranks.ended
        return obj

    def _share_request(self, request):
        """Tell all processes rank 0's next request, or None."""
        if not self.ranks.many:
            return request
        said = self._share_object(told.of_request(request and request[1:]))
        if self.ranks.rank == 0:
            return request
        found = told.to_request(said)
        return found and (found[1].job, *found)

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
        # After one token, caches have their shapes; and the logits have the vocabulary's size.
        logits = loaded.model(mx.array([[0]]), cache=caches)
        mx.eval(logits)
        self.vocabulary = logits.shape[-1]
        self.turns, self.thinking = Turns(loaded.tokenizer), Thinking(loaded.tokenizer)
        self.grammars = Grammars(loaded.tokenizer, self.vocabulary)
        self._anchor = loaded.tokenizer.encode("a", add_special_tokens=False)
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
            self.ranks.least(bound),
            shapes_of(caches),
            self.cli_args.prefill_step_size,
            batched=self.model_provider.is_batchable,
        )
        self.sessions = Sessions(
            self.memory,
            lambda: make_prompt_cache(loaded.model),
            disk=disk,
            reuse=self.options.reuse,
            agree=self.ranks.most,
        )

    def _step_down(self, error: Exception) -> bool:
        """Switch the kernels off that the error may come from. Returns whether there were any."""
        if self.ranks.many:  # they end, and others may never come to what is under way here
            return False
        instead = step_down(self.model_provider.loaded, error)
        if instead is None:
            return False
        warn(instead)
        self.sessions.forget()  # their caches hold on to the kernels
        return True

    def _fail(self, error: Exception, instead: bool = False) -> None:
        """Tell all clients that wait, and clear up for mlx-lm's loop to start with an empty batch.

        instead: whether kernels were switched off, so that another attempt may succeed.
        """
        said = f"[serve] generation failed: {type(error).__name__}: {faults.reason(error)}"
        if instead:
            said += "; the kernels that failed are switched off: ask again"
        for job in list(self._taken):
            job.line.put(MachineError(said))
        self._taken.clear()
        self.memory.release_all()
        self.jobs.clear()
        self.kv_bytes = self.kv_bytes_fp16 = self.kv_allocated = 0
        # A compiled sampler that raised while it was traced leaves a placeholder there (MLX 0.32).
        mx.random.seed(time.time_ns())
        mx.clear_cache()

    def _next_request(self, timeout=None):
        while not self._asides.empty():
            self._asides.get_nowait().answer()
        found = super()._next_request(timeout)
        if found is not None:
            self._taken.add(found[0])
        return found

    def _tokenize(self, tokenizer, request, args: Arguments):
        """Tokenize a request as mlx-lm does, and set memory aside for it. Raises Refused."""
        found = self.ranks.decide(
            lambda: self._read(tokenizer, request, args), told.of_prompt, told.to_prompt
        )
        prompt, limit = found[0], self.model_provider.loaded.context
        args.job.thinks = found[3] == "reasoning"
        if args.stop_words or args.continues:
            before = prompt[-1:] if args.continues else ()
            args.job.text = ReplyText(tokenizer, args.stop_words, before)
        if limit:
            args.max_tokens = min(args.max_tokens, limit - len(prompt))
        if args.shorten:
            fits = self.memory.longest(len(prompt) + args.max_tokens) - len(prompt)
            args.max_tokens = fits if fits > 0 else args.max_tokens  # else `promise` refuses it
        self.memory.promise(args.job, len(prompt) + args.max_tokens)
        # mlx-lm makes the matcher of its stop words next, then looks its cache up.
        self._text, self.sessions.tenant = args.job.text, args.job.tenant
        return found

    def _make_state_machine(self, model_key, tokenizer, stop_words):
        """Ends of the reply whose prompt was just read, and the markup that mlx-lm takes out of its text."""
        ends, markup = super()._make_state_machine(model_key, tokenizer, [])
        return self._text or ends, markup

    def _read(self, tokenizer, request, args: Arguments):
        """For rank 0 alone: templates may look at the clock, and clients may have left."""
        if args.job.given_up:
            raise Refused(504, "[serve] given up before it began", "timeout")
        found = self._prompt(tokenizer, request, args)
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

    def _prompt(self, tokenizer, request, args: Arguments):
        """Return what mlx-lm's `_tokenize` returns, of any length. Raises Refused where a template fails."""
        asked = replace(request, messages=self.thinking.named(request.messages or []))
        try:
            if args.continues:
                asked = replace(asked, messages=asked.messages[:-1])
            found = super()._tokenize(*self._with_text(tokenizer, asked, args))
            if args.continues:
                found = continued(tokenizer, self.turns, found, request.messages[-1])
        except Refused:
            raise
        except Exception as error:  # templates raise anything
            raise Refused(
                400, f"[messages] the chat template refuses this: {error}"[:300], "invalid_value"
            ) from None
        return found

    def _with_text(self, tokenizer, request, args: Arguments) -> tuple:
        """The same, with special tokens in contents as text. A prompt without a template is the caller's own."""
        mark, (chat, tools, extra) = self.turns.broken(
            request.messages, request.tools, args.chat_template_kwargs
        )
        if mark is None:
            return tokenizer, request, args
        request = replace(request, messages=chat, tools=tools)
        return (
            Cut(tokenizer, self.turns, mark),
            request,
            replace(args, chat_template_kwargs=extra),
        )

    def _processors(self, args: Arguments) -> list:
        """mlx-lm's, and a grammar's behind them: it has the last word."""
        found = server._make_logits_processors(args)
        if args.grammar is not None:
            found.append(self.grammars.processor(args.grammar, args.job.thinks))
        return found

    def _is_batchable(self, args) -> bool:
        """Requests with a seed are, too, unlike in mlx-lm: `Seeded` has a key of its own."""
        return self.model_provider.is_batchable

    def _serve_single(self, request, *more) -> None:
        line, asked, args = request
        alone = Alone(line, args.job, self.ranks)
        serve = _with_names(
            self,
            "_serve_single",
            _make_sampler=self.ranks.sampler(server._make_sampler),
            _make_logits_processors=self._processors,
            stream_generate=alone.generate,
        )
        serve((alone, asked, args), *more)  # after what it raises, `_fail` clears up
        if alone.fault is not None:
            self.metrics.add(faults=1)
            self._step_down(alone.fault)
        if args.seed is not None:
            mx.random.seed(time.time_ns())  # mlx-lm has seeded the draws of all requests
        self.memory.release(args.job)
        self.sessions.shrink()

    def enter(self, uid: int, job: Job) -> None:
        """Note the number of a job in the batch."""
        self.jobs[uid] = job
        if job.given_up:  # while its cache was looked for
            job.stop()

    def leave(self, uid: int) -> Job | None:
        """Release the memory of a job that is no longer in the batch."""
        job = self.jobs.pop(uid, None)
        if job is not None:
            self.memory.release(job)
        return job

    def measure(self, batch, now: bool = False) -> None:
        """Note the size of the caches in use, a few times a second."""
        if not now and time.monotonic() - self._measured < MEASURE_SECONDS:
            return
        self._measured = time.monotonic()
        self.kv_allocated = batch.prompt_cache_nbytes
        parts = (batch._prompt_batch, batch._generation_batch)
        held = [len(tokens) for part in parts for tokens in part.tokens]
        self.kv_bytes = sum(map(self.memory.in_use, held))
        self.kv_bytes_fp16 = sum(map(self.memory.fp16, held))

    # -- for other threads

    def check(self) -> None:
        """Raise the error that ended the generation thread for good: KeyboardInterrupt, where another
        process was asked to end."""
        if self.problem is not None:
            raise self.problem
        if self.ranks.ended:
            raise KeyboardInterrupt
        self.ranks.watch(self.options.timeout)

    def aside(self, ask: Callable[[], Any]) -> Any:
        """Return what a function returns, or raises, that the generation thread calls between two steps: tokenizers
        are its own. Raises Refused where the server ends first."""
        aside = Aside(ask)
        self._asides.put(aside)
        end = time.monotonic() + self.options.timeout
        while time.monotonic() < end:
            try:
                found = aside.line.get(timeout=MEASURE_SECONDS)
            except Empty:
                if self.over or not self.is_healthy:
                    raise ending() from None
                continue
            if isinstance(found, Exception):
                raise found
            return found
        raise Refused(504, f"[--timeout] took more than {self.options.timeout:g} s", "timeout")

    def ask(self, job: Job) -> None:
        """Hand a request to the generation thread. For any thread."""
        job.piece = self._piece
        self.requests.put((job, *_asked(job)))

    def _piece(self, token: int) -> str:
        """The text of a token inside of a text, "\ufffd" where it is a part of a character."""
        decode = self.model_provider.tokenizer.decode
        return decode([*self._anchor, token])[len(decode(self._anchor)) :]

    def count(self, asked: Request) -> int:
        """The tokens of a chat as a prompt, for any thread. Raises Refused."""
        read = partial(self._prompt, self.model_provider.tokenizer, *_asked(Job(asked)))
        return len(self.aside(read)[0])

    def numbers(self, job: Job, cached_tokens: int) -> dict:
        """The `kv` field of a reply that has ended."""
        loaded = self.model_provider.loaded
        window = window_of(loaded)
        used = job.usage or Usage(0, 0, 0, 0, window)
        bits = used.figures["bits_per_value"]
        return {
            "preset": loaded.kv_name,
            "tokens": job.tokens,
            "cached_tokens": cached_tokens,
            "exact_tokens": window,
            "bytes": used.kv_bytes,
            "bytes_fp16": used.kv_bytes_fp16,
            "allocated_bytes": used.allocated,
            "bits_per_value": bits,
            "ratio": round(16 / bits, 3) if bits else None,
            "note": used.note,
        }

    @property
    def is_healthy(self) -> bool:
        return self._generation_thread.is_alive() and self.problem is None and not self.over

    def generation_available(self) -> bool:
        return self.is_healthy


def _asked(job: Job) -> tuple[server.CompletionRequest, Arguments]:
    """A request in mlx-lm's words."""
    asked = job.asked
    request = server.CompletionRequest(
        "chat" if asked.chat else "text", asked.prompt, asked.messages, asked.tools, None
    )

    def settings(kind: type) -> Any:
        return kind(**{one.name: getattr(asked, one.name) for one in fields(kind)})

    return request, Arguments(
        model=told.ONE,
        sampling=settings(server.SamplingArguments),
        logits=settings(server.LogitsProcessorArguments),
        stop_words=asked.stop,
        max_tokens=asked.max_tokens,
        num_draft_tokens=0,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
        seed=asked.seed,
        chat_template_kwargs=asked.chat_template_kwargs,
        job=job,
        continues=asked.continue_final_message,
        grammar=asked.grammar,
        shorten=asked.shorten,
    )


def _job_and_sampler(args: Arguments, tokenizer) -> tuple[Job, Callable]:
    """mlx-lm's loop takes this for a sampler, and hands it from a request's arguments to the batch."""
    return args.job, make_sampler(args, tokenizer)


class Batches(server.BatchGenerator):
    """mlx-lm's batch, which reports to `engine`."""

    def __init__(self, engine: Engine, *args, **kwargs):
        self.engine = engine
        super().__init__(*args, **kwargs)

    def insert_segments(self, segments, *, samplers: list[tuple[Job, Callable]], **more):
        jobs, samplers = zip(*samplers, strict=True)
        uids = super().insert_segments(segments, samplers=list(samplers), **more)
        for uid, job in zip(uids, jobs, strict=True):
            self.engine.enter(uid, job)
        return uids

    def next(self):
        read, written = super().next()
        self.engine.ranks.step(self._generation_batch)
        cut_padding(self._prompt_batch.prompt_cache)
        for response in written:
            if response.finish_reason is not None and (job := self.engine.leave(response.uid)):
                job.measured(response.prompt_cache, len(response.all_tokens))
                response.prompt_cache = Owned(response.prompt_cache, job.tenant)
        self.engine.measure(self, any(response.finish_reason for response in written))
        return read, written

    def extract_cache(self, uids):
        found = super().extract_cache(uids)
        jobs = self.engine.jobs
        return {u: (Owned(cache, jobs[u].tenant), tokens) for u, (cache, tokens) in found.items()}

    def remove(self, uids, *args, **kwargs):
        found = super().remove(uids, *args, **kwargs)
        for uid in uids:
            self.engine.leave(uid)
        self.engine.measure(self, now=True)
        return found


def _with_names(engine: Engine, method: str, **names) -> Callable:
    """A method of mlx-lm's engine in which some global names mean something else: its batches, samplers
    and generator cannot be replaced in another way."""
    found = getattr(server.ResponseGenerator, method)
    return MethodType(FunctionType(found.__code__, vars(server) | names, method), engine)
