"""The generation thread: a loop over mlx-lm's batches with compressed caches. It admits requests, measures caches and
recovers from faults."""

from __future__ import annotations

import logging
import time
from math import isqrt
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from mlxkv import errors
from mlxkv.catalog.hub import config_of
from mlxkv.catalog.shapes import text_config
from mlxkv.catalog.sizes import ModelPlan, need
from mlxkv.console import human_bytes, warn
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import session as files_of_sessions
from mlxkv.formats.agreement import DIAL
from mlxkv.formats.names import bound_of, parse_kv
from mlxkv.generate import prompt_cache
from mlxkv.generate.generation import prefill_step
from mlxkv.generate.stops import ReplyText
from mlxkv.generate.usage import usage, window_of
from mlxkv.loading.load import Loaded, load
from mlxkv.loading.outline import NotBuilt, outline
from mlxkv.loading.warmup import step_down, warm_up
from mlxkv.machine import USABLE, machine_memory
from mlxkv.patching import mlx_lm_compat
from mlxkv.patching.mark import forget_steps
from mlxkv.serve import sampling
from mlxkv.serve.grammar import Constraint, Grammars
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.ranks import Ranks
from mlxkv.serve.refusals import Refused, ending
from mlxkv.serve.request import Job, Start, Token
from mlxkv.serve.sampling import GREEDY, LogProbs
from mlxkv.serve.sessions import Disk, Memory, Sessions, cut_padding, shapes_of, used_memory
from mlxkv.untrusted import Unsound

PROMPTS = 8  # prompts prefilled together
SHORT = 64  # tokens of a request that any --kv-memory must fit
MEASURE_SECONDS = 0.25
IDLE_SECONDS = 0.1  # polling interval while idle
MEETING_SECONDS = 0.25  # target time between two meetings of the processes
MOST_STEPS = 64
LEAST_MEMORY = 64 << 20  # minimum bytes for caches without --kv-memory
# Tokens x heads x context per attention dispatch. macOS kills processes that occupy the GPU for seconds: reports start
# at 65,536 keys for 2,048 tokens and 32 heads, twice this number.
DISPATCH = 1 << 31
LEAST_CHUNK = 32  # tokens
STEP_SECONDS = 1.0  # longest pause of replies for a prefill chunk
CEILING = 0.9  # fraction of the machine's memory
# Minimum of MLX's buffer cache limit in bytes; by default it is unbounded.
FREED_MEMORY = 1 << 30


def _least_bytes(options: ServeOptions) -> int:
    """Return the bytes of the first model's caches with `SHORT` tokens, without slack, from its config.json alone; 0
    where that does not say."""
    try:
        layers = outline(config_of(options.models[0]))[0]
    except (NotBuilt, Unsound):
        return 0
    kv = options.kv if bound_of(options.kv) is None else DIAL[0]
    return need(ModelPlan("", layers, 0, ""), parse_kv(kv), SHORT).in_use


class Engine:
    """Loads the model and generates in its own thread. Other threads only read attributes.

    ready: set when the model is loaded. problem: the error that ended the thread for good, or None. is_ending:
    whether new requests are refused and sessions saved. is_batchable: whether requests are decoded together.
    jobs: active requests by the batch's uid. kv_allocated: bytes allocated for their caches, slack included.
    vocabulary: the model's vocabulary size. faults: failures of this thread. loaded, memory, sessions: set once it is
    ready without a problem.
    """

    loaded: Loaded
    memory: Memory
    sessions: Sessions

    def __init__(self, options: ServeOptions):
        self.options, self.faults = options, 0
        self.ready, self.is_ending = Event(), False
        self.problem: Exception | None = None
        self.vocabulary, self.is_batchable = 0, False
        self.packs: dict[str, str] = {}  # texts by name
        self.jobs: dict[int, Job] = {}
        self.kv_allocated = 0
        self.ranks = Ranks()
        self.requests: Queue[Job] = Queue()
        self._active: set[Job] = set()  # taken from the queue, reply not ended
        self._generator: BatchGenerator | SingleGenerator | None = None
        self._stop, self._measured, self._steps = False, 0.0, 1
        # Prefill tokens per second, 0 before the first chunk of a prompt; and tokens of the last chunk.
        self._pace, self._read = 0.0, 0
        self._thread = Thread(target=self._run)
        self._thread.start()

    def wait_until_ready(self) -> Loaded:
        """Wait until the model is loaded. Raises the loading error, if any."""
        self.ready.wait()
        if self.problem is not None:
            raise self.problem
        return self.loaded

    # -- start and end

    def _run(self) -> None:
        try:
            self.ranks.start(self._load)
            self._prepare()
        except Exception as error:
            self.problem = error
        finally:
            self.ready.set()
        try:
            while not self._stop and self.problem is None:
                try:
                    self._turn()
                except Exception as error:  # out of memory or a kernel fault: this batch is lost
                    self._fail(error)
        except Exception as error:  # the GPU raised again during cleanup
            self.problem = MachineError(f"[serve] generation failed for good: {error}")
        finally:
            self.is_ending = True
            self._tell(ending())  # before sessions are saved, which is slow
            # Arrays that outlive this thread's streams abort the process at exit (MLX 0.32).
            self._drop_generator()
            if self.problem is None:
                self.sessions.close()
            if hasattr(self, "loaded"):
                forget_steps(self.loaded.model)
            getattr(mx, "clear_streams", lambda: None)()

    def _load(self) -> str:
        """Load the model and prepare decoding, in the decoding thread. Returns the model's fingerprint."""
        o = self.options
        if o.memory_bytes is not None:
            self._check_room(_least_bytes(o) // self.ranks.size, o.memory_bytes)
        settings = (o.kv, o.kv_strict, o.dtype, o.calibration, False, self.ranks.group)
        further = {"weights": o.weights, "adapter_path": o.adapter_path}
        self.loaded = load(o.models[0], *settings, **further, memory=o.memory, context=o.context)
        warm_up(self.loaded)
        return self.loaded.fingerprint

    def _check_room(self, least: int, bound: int) -> None:
        """Raise UserError if --kv-memory holds no request of `SHORT` tokens."""
        if least > bound:
            raise UserError(
                f"[--kv-memory] no room for a single short request; got {self.options.kv_memory}; {SHORT} tokens need "
                f"{human_bytes(least)} of cache; choose more"
            )

    def _prepare(self) -> None:
        options, loaded = self.options, self.loaded
        self.tokenizer = loaded.tokenizer
        caches = make_prompt_cache(loaded.model)
        self.is_batchable = all(hasattr(cache, "merge") for cache in caches)
        # One token initializes the shapes of the caches; the logits show the vocabulary's size.
        logits = loaded.model(mx.array([[0]]), cache=caches)
        mx.eval(logits)
        self.vocabulary = logits.shape[-1]
        self.grammars = Grammars(self.tokenizer, self.vocabulary)
        self.logprobs = LogProbs(self.tokenizer)
        self._prefill_step = prefill_step()
        self._heads = text_config(loaded.config).get("num_attention_heads") or 32
        bound = options.memory_bytes
        if bound is None:
            spare = int(USABLE * machine_memory()) - used_memory()
            bound = max(LEAST_MEMORY, spare // 2)
        mx.set_cache_limit(max(FREED_MEMORY, bound // 2))
        self.memory = Memory(
            self.ranks.all_min(bound), shapes_of(caches), self._prefill_step, self.is_batchable
        )
        if options.kv_memory:
            self._check_room(self.memory.need(SHORT), self.memory.bound)
        folder, limit, disk = options.disk_folder, options.disk_bytes, None
        if folder and options.reuse:
            disk = self.ranks.run_on_all(lambda: Disk(folder, limit, loaded, self.ranks))
        self.sessions = Sessions(
            self.memory,
            lambda: make_prompt_cache(loaded.model),
            disk,
            options.reuse,
            self.ranks.all_max,
        )
        for name, file in options.packs.items():
            self.packs[name] = self._pin(file)

    def _pin(self, file: str) -> str:
        """Keep the cache of a pack beside the sessions of all clients, and return its text. Raises UserError."""
        saved = prompt_cache.read_session(files_of_sessions.file_named(file), self.loaded)
        if not saved.files or saved.raw:
            raise UserError(f"[--pack] no pack for chats; got {file!r}; mlxkv read makes one")
        self.sessions.pin(saved.tokens, saved.cache)
        if self.memory.need(SHORT) > self.memory.bound:
            raise UserError(
                f"[--pack] no room for a request beside it; got {file!r}; choose more --kv-memory"
            )
        return saved.messages[0]["content"]

    def _step_down(self, error: Exception) -> bool:
        """Disable kernels that may have caused the error. Returns whether there were any."""
        try:
            # Several processes end instead: the others may never reach the current collective call.
            warning = None if self.ranks.many else step_down(self.loaded, error)
        except Exception:  # the GPU may raise again
            logging.exception("kernels were not switched off")
            return False
        if warning is not None:
            warn(warning)
            self.sessions.forget()  # their caches refer to the kernels
        return warning is not None

    def _fail(self, error: Exception) -> None:
        """Send the error to all waiting clients, and reset to an empty batch. With several processes, end: they are out
        of step."""
        logging.exception("generation failed")
        self.faults += 1
        message = f"[serve] generation failed: {type(error).__name__}: {errors.reason(error)}"
        if self._step_down(error):
            message += "; the kernels that failed are switched off: ask again"
        self._tell(MachineError(message))
        self._drop_generator()
        self.memory.release_all()
        self.jobs.clear()
        self.kv_allocated = 0
        # A compiled sampler that raised while it was traced leaves a placeholder there (MLX 0.32).
        mx.random.seed(time.time_ns())
        mx.clear_cache()
        if self.ranks.many:
            self.problem = MachineError(f"[serve] generation failed: {error}")

    def _tell(self, error: Exception) -> None:
        """End active requests with an error, on shutdown queued ones, too."""
        while self.is_ending and not self.requests.empty():
            self._active.add(self.requests.get_nowait())
        for job in self._active:
            job.put(error)
        self._active.clear()

    def stop_and_join(self) -> None:
        self.ranks.end()
        self._stop = self._stop or not self.ranks.many
        while self._thread.is_alive():
            self._thread.join(0.1)
            self.ranks.watch(self.options.timeout)

    # -- the loop

    def _turn(self) -> None:
        """Begin the next request, or run steps until the next meeting."""
        job, cancelled, steps = self._meet()
        if cancelled:
            generator = self._generator_now()
            generator.remove(cancelled)
            for uid in cancelled:
                self._active.discard(self.remove(uid))
            self.kv_allocated = generator.prompt_cache_nbytes
        if job is not None:
            self._active.add(job)
            self._begin(job)
            return
        start = time.monotonic()
        for _ in range(steps):
            if not self.jobs:
                break
            self.step()
        seconds = max(1e-3, time.monotonic() - start)
        if self._read >= LEAST_CHUNK:  # shorter chunks are too noisy to measure
            self._pace = self._read * steps / seconds
        if self.ranks.many and self.jobs:
            self._steps = max(1, min(MOST_STEPS, int(steps * MEETING_SECONDS / seconds)))

    def _meet(self) -> tuple[Job | None, list[int], int]:
        """Agree on the next actions with all processes: return the request to begin, uids of cancelled requests,
        and the number of steps until the next meeting."""
        job_next = self._take() if self.ranks.rank == 0 else None
        cancelled = [uid for uid, job in self.jobs.items() if job.cancelled]
        if not self.ranks.many:
            return job_next, cancelled, 1
        state: list[Any] = [job_next and job_next.to_json(), cancelled, self._steps, self._pace]
        request, cancelled, steps, self._pace = self.ranks.share(state)
        self._stop = self._stop or self.ranks.ended
        if self.ranks.rank and request is not None:
            job_next = Job.from_json(*request)
        return job_next, cancelled, steps

    def _take(self) -> Job | None:
        """Return the next request if it can begin now; if idle, wait up to `IDLE_SECONDS` for one."""
        try:
            if not self.jobs:
                job = self.requests.get(timeout=IDLE_SECONDS)
            elif self.is_batchable:
                job = self.requests.get_nowait()
            else:
                return None
        except Empty:
            return None
        return None if job.cancelled else job

    def _begin(self, job: Job) -> None:
        """Add a request to the batch: reserve its memory, and fetch a cached prefix of its prompt."""
        request, prompt = job.request, job.prompt
        try:
            max_tokens = self._reserve(job, len(prompt.tokens))
        except Exception as error:
            self.memory.release(job)
            self._active.discard(job)
            job.put(error)
            return
        cache, job.cached_tokens = self.sessions.fetch(prompt.tokens, job.tenant)
        job.cache_tokens = job.cached_tokens
        goes_on = request.continue_final_message or not request.chat
        last = prompt.tokens[-1:] if goes_on else ()
        job.text = ReplyText(self.tokenizer, request.stop, last)
        processors = sampling.processors_of(request)
        # Last, so that no other processor overrides its mask.
        if constraint := job.constraint or self.constraint_of(job):
            processors.append(constraint)
        if request.logprobs:
            processors.append(job.note_logits)
        job.put(Start(len(prompt.tokens), job.cached_tokens))
        (uid,) = self._generator_now().insert_segments(
            [_without_start(prompt.segments, job.cached_tokens)],
            max_tokens=[max_tokens],
            caches=[cache],
            all_tokens=[prompt.tokens[: job.cached_tokens]],
            samplers=[sampling.sampler_of(request, self.tokenizer)],
            logits_processors=[processors],
            stop_sequences=[job.text],  # pyright: ignore[reportArgumentType] has the methods of mlx-lm's
        )
        self.jobs[uid] = job
        self._pace = 0.0  # its first part may have a longer context, and be slower
        self._steps = 1  # until the pace is known

    def _drop_generator(self) -> None:
        if self._generator is not None:
            self._generator.close()
        self._generator = None

    def _generator_now(self) -> BatchGenerator | SingleGenerator:
        model, step = self.loaded.model, self._prefill_step
        stream = mx.default_stream(mx.default_device())  # the stream of the collective calls
        if self._generator is None and not self.is_batchable:
            self._generator = SingleGenerator(model, step, stream)
        elif self._generator is None:
            with mlx_lm_compat.wired(self.options.wired_limit):
                self._generator = BatchGenerator(
                    model,
                    completion_batch_size=self.options.batch,
                    prefill_batch_size=PROMPTS,
                    prefill_step_size=step,
                    stream=stream,
                )
        return self._generator

    def _reserve(self, job: Job, count: int) -> int:
        """Reserve memory for a prompt of `count` tokens and its reply. Returns the reply's maximum length.
        Raises Refused if they do not fit."""
        max_tokens, limit = job.request.max_tokens, self.loaded.context
        if limit:
            max_tokens = min(max_tokens, limit - count)
        drops = job.request.chat and self.options.overflow == "drop"
        if job.request.shorten or drops:
            budget = self.memory.longest(count + max_tokens) - count
            max_tokens = budget if budget > 0 else max_tokens  # otherwise `promise` refuses
        self.memory.promise(job, count + max_tokens, job.is_operator)
        self._free_memory(self.memory.need(count + max_tokens), job.is_operator)
        return max_tokens

    def _free_memory(self, need: int, is_operator: bool) -> None:
        """Free memory if the reservations exceed this machine's: MLX's buffer cache, then stored sessions, the least
        recently used first. need: bytes of the last request. Raises Refused if that is not enough: macOS would swap or
        kill processes. is_operator: whether the error may name the server's memory use."""
        if self._excess() <= 0:
            return
        mx.clear_cache()
        if (excess := self._excess()) > 0:
            self.sessions.shrink(max(0, self.ranks.all_min(self.sessions.nbytes) - excess))
            mx.clear_cache()
        if self._excess() > 0:
            used = f" ({human_bytes(used_memory())})" if is_operator else ""
            reason = (
                f"[memory] {human_bytes(need)} more than the server takes{used} would be above "
                f"{CEILING:.0%} of this machine's memory; try again later, or ask for fewer tokens"
            )
            raise Refused(503, reason, "memory_busy", retry=10)

    def _excess(self) -> int:
        """Return the bytes by which reserved caches would exceed the ceiling, the maximum over all processes:
        they must take the same branch."""
        coming = max(0, self.memory.promised - self.kv_allocated)
        return self.ranks.all_max(used_memory() + coming - int(CEILING * machine_memory()))

    def step(self) -> None:
        """Prefill a chunk of the waiting prompts, and decode one token of each reply."""
        generator, jobs = self._generator_now(), self.jobs
        depths = [job.cache_tokens for job in jobs.values() if job.is_reading]
        count = min(len(depths), PROMPTS)
        most = self._prefill_step
        if len(depths) < len(jobs):  # replies wait for the chunk
            most = paced(most, self._pace)
        generator.prefill_step_size = chunk_of(most, count * self._heads, max(depths, default=0))
        progress, responses = generator.next()
        self.ranks.step(mlx_lm_compat.generation_batch(generator))
        if isinstance(generator, BatchGenerator):
            cut_padding(mlx_lm_compat.reading_caches(generator))
        self._read = 0
        for part in progress:
            job = jobs[part.uid]
            tokens = job.cached_tokens + part.progress[0]
            self._read = max(self._read, tokens - job.cache_tokens)
            job.cache_tokens = tokens
            job.is_reading = not part.end_of_prompt
            job.put(part.progress)
        ends = [part.uid for part in progress if part.end_of_segment and not part.end_of_prompt]
        for uid, (cache, tokens) in generator.extract_cache(ends).items():
            self.sessions.keep(tokens[:], cache, jobs[uid].tenant)
        pairs = [(jobs[response.uid], response) for response in responses]
        ended = [response.uid for response in responses if response.finish_reason is not None]
        for job, _ in pairs:
            job.cache_tokens += 1
        for uid in ended:
            self.remove(uid)
        if ended or time.monotonic() - self._measured > MEASURE_SECONDS:
            self._measured = time.monotonic()
            self.kv_allocated = generator.prompt_cache_nbytes
        for job, response in pairs:
            self._write(job, response)

    def _write(self, job: Job, response: Any) -> None:
        """Send a token of a reply to its client; store the caches if the reply ends."""
        text, reason = job.text.take(response.finish_reason)
        logprob = None
        if job.request.logprobs:
            logits, count = job.logits.popleft(), job.request.top_logprobs
            logprob = self.logprobs.entry(response.token, logits, count)
        token = Token(text, reason, logprob)
        if response.finish_reason is None:
            job.put(token)
            return
        self._active.discard(job)
        tokens, cache = response.all_tokens[:], response.prompt_cache
        job.tokens, job.usage = len(tokens), usage(cache)
        job.put(job.constraint and job.constraint.error or token)
        job.put(None)
        self.sessions.keep(tokens, cache, job.tenant)

    def remove(self, uid: int) -> Job | None:
        """Release the memory of a job that is no longer in the batch."""
        job = self.jobs.pop(uid, None)
        if job is not None:
            self.memory.release(job)
        return job

    # -- for other threads

    def constraint_of(self, job: Job) -> Constraint | None:
        """Return the constraint for the request's grammar, None without one."""
        grammar, thinks = job.request.grammar, job.prompt.state == "reasoning"
        return None if grammar is None else self.grammars.processor(grammar, thinks)

    def submit(self, job: Job) -> None:
        """Queue a request for the generation thread. Raises Refused if the thread has ended or is ending."""
        self.requests.put(job)
        if not self.is_healthy:
            raise ending()

    @property
    def has_ended(self) -> bool:
        """Return whether the generation thread has ended for good, or another process was asked to end. For the
        main thread, which polls it."""
        self.ranks.watch(self.options.timeout)
        return self.problem is not None or self.ranks.ended

    def kv_document(self, job: Job) -> dict:
        """Return the `kv` field of a finished reply."""
        measured = job.usage
        bits = measured.figures["bits_per_value"]
        return {
            "preset": self.loaded.kv_name,
            "tokens": job.tokens,
            "context": self.loaded.context,
            "cached_tokens": job.cached_tokens,
            "dropped_messages": job.dropped,
            "exact_tokens": window_of(self.loaded),
            "bytes": measured.kv_bytes,
            "bytes_fp16": measured.kv_bytes_fp16,
            "allocated_bytes": measured.allocated,
            "bits_per_value": bits,
            "ratio": round(16 / bits, 3) if bits else None,
            "note": measured.note,
        }

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self.problem is None and not self.is_ending


def chunk_of(step: int, heads: int, depth: int) -> int:
    """Return the prefill chunk size after `depth` tokens: `step`, or a smaller power of two that keeps
    tokens x heads x context within `DISPATCH`. heads: sum over all prompts in the prefill."""
    work = DISPATCH // max(1, heads)
    return _chunk(step, (isqrt(depth * depth + 4 * work) - depth) // 2)


def paced(step: int, pace: float) -> int:
    """Return the prefill chunk size while replies are decoded: `step`, or a smaller power of two that takes at most
    `STEP_SECONDS`. pace: tokens per second, 0 if unknown."""
    return _chunk(step, int(pace * STEP_SECONDS))


def _chunk(step: int, most: int) -> int:
    return step if most >= step else max(LEAST_CHUNK, 1 << max(0, most.bit_length() - 1))


def _without_start(segments: list[list[int]], count: int) -> list[list[int]]:
    """Return the segments without their first `count` tokens; at least one token remains."""
    first, *tail = segments
    while count >= len(first):
        count -= len(first)
        first, *tail = tail
    return [first[count:], *tail]


# -- one request at a time, for models whose caches are not batchable


class Alone(GenerationBatch):
    """A batch of one sequence, in its own caches."""

    def extract_cache(self, idx: int) -> list:
        return list(self.prompt_cache)


class SingleGenerator:
    """One request at a time, with the methods of mlx-lm's `BatchGenerator` that the engine calls. step: prefill
    chunk size in tokens."""

    def __init__(self, model: Any, step: int, stream: mx.Stream):
        self._model, self.prefill_step_size, self._stream = model, step, stream
        self._uid = 0
        self.close()

    def insert_segments(self, segments: list, *, caches: list, **settings: list) -> list[int]:
        self._uid += 1
        self._prompt = [token for segment in segments[0] for token in segment]
        self._done, self._cache, self._settings = 0, caches[0], settings
        return [self._uid]

    def next(self) -> tuple[list, list]:
        """Prefill a chunk of the prompt, or decode a token."""
        with mx.stream(self._stream):
            if self._generation_batch.uids:
                responses = self._generation_batch.next()
                if not self._generation_batch.uids:
                    self.close()
                return [], responses
            total = len(self._prompt)
            part = self._prompt[self._done : min(self._done + self.prefill_step_size, total - 1)]
            if part:
                self._model(mx.array(part)[None], cache=self._cache)
                mx.eval([layer.state for layer in self._cache])
                mx.clear_cache()
                self._settings["all_tokens"][0].extend(part)
            else:
                part, settings = self._prompt[-1:], dict(self._settings)
                self._generation_batch = Alone(
                    self._model,
                    [self._uid],
                    mx.array(part),
                    self._cache,
                    settings.pop("all_tokens"),
                    fallback_sampler=GREEDY,
                    **settings,
                )
            self._done += len(part)
            progress, ends = (self._done, total), self._done == total
            return [PromptProcessingBatch.Response(self._uid, progress, ends, ends)], []

    def extract_cache(self, uids: list[int]) -> dict:
        return {}

    def remove(self, uids: list[int]) -> None:
        self.close()

    def close(self) -> None:
        """Drop the request."""
        self._prompt, self._cache, self._settings = [], [], {}
        self._generation_batch = Alone.empty(self._model, GREEDY)

    @property
    def prompt_cache_nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._cache)
