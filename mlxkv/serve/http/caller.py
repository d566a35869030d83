"""The engine as mlx-lm's handler uses it for one request: it gives up when the client has left or the
time is over, and tells failures in a way that mlx-lm's handler lets through."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from queue import Empty, Queue

from mlx_lm import server

from mlxkv.errors import MachineError
from mlxkv.serve.engine import Engine
from mlxkv.serve.job import Arguments, Job
from mlxkv.serve.refusals import Refused, ending, fault

WAIT_SECONDS = 0.25


class Answer(BaseException):
    """Carries an error to the client past mlx-lm's handler, which answers any Exception with 404."""

    def __init__(self, refused: Refused):
        super().__init__(refused.message)
        self.refused = refused


class Left(BaseException):
    """The client has hung up. No Exception, for the same reason."""


class Caller:
    """continues: whether the last message is the start of the reply. grammar: that it follows, or None.
    shorten: whether it may be shorter where memory has no room. started: when the
    request began to arrive, by `time.monotonic`. gone: whether the client has hung up. reason: why the reply
    ended, "stop" or "length". stop: ends the reply; does nothing before there is one."""

    def __init__(
        self,
        engine: Engine,
        started: float,
        gone: Callable[[], bool],
        tenant: str = "",
        continues: bool = False,
        grammar: str | None = None,
        shorten: bool = False,
    ):
        self.engine, self.started, self._gone = engine, started, gone
        self.continues, self.grammar, self.shorten = continues, grammar, shorten
        self.reason = "stop"
        self.job = Job(tenant=tenant)
        self.context: server.GenerationContext | None = None

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def generate(self, request, args: server.GenerationArguments, progress_callback=None):
        """Hand a request to the generation thread, and wait until it takes it up.

        Returns its context and an iterator of tokens. Raises Left and Answer, and what
        `progress_callback` raises.
        """

        def progress(done: int, total: int) -> None:
            self._check()
            if progress_callback is not None:
                progress_callback(done, total)

        if self.engine.over:
            raise Answer(ending())
        args = Arguments(
            **vars(args),
            job=self.job,
            continues=self.continues,
            grammar=self.grammar,
            shorten=self.shorten,
        )
        try:
            # With this object in the engine's place, for `_await_response`.
            context, responses = server.ResponseGenerator.generate(self, request, args, progress)
        except ConnectionError as error:
            raise Left(str(error)) from None
        except Refused as refused:
            raise Answer(refused) from None
        except Exception as error:
            raise Answer(fault(error)) from None
        self.context = context
        if context.tool_parser is not None:
            context.tool_parser = partial(_tool_calls, context.tool_parser)
        return context, self._counted(responses)

    def _await_response(self, line: Queue):
        """Wait for the generation thread. mlx-lm's (0.32) does not look after the client meanwhile."""
        while True:
            try:
                return line.get(timeout=WAIT_SECONDS)
            except Empty:
                if self.engine.over and line.empty():  # it came too late to be told
                    raise ending() from None
                if not self.engine.generation_available() and line.empty():
                    raise MachineError("[serve] the generation thread has ended") from None
                self._check()

    def _counted(self, responses):
        count, first = 0, None
        try:
            for response in responses:
                self._check()
                count += 1
                first = first or time.monotonic() - self.started
                if response.finish_reason is not None:
                    self.reason = response.finish_reason
                    # At a "stop", mlx-lm's handler drops what could have become markup, and is the text's end.
                    response.finish_reason = "length"
                yield response
        except (Refused, ConnectionError, TimeoutError):
            raise
        except Exception as error:
            raise Answer(fault(error)) from None
        finally:
            metrics = self.engine.metrics
            metrics.add(
                prompt_tokens=len(self.context.prompt),
                cached_tokens=self.cached_tokens,
                generated_tokens=count,
            )
            metrics.took(first, time.monotonic() - self.started)

    def _check(self) -> None:
        """Raises Answer when the time is over, ConnectionAbortedError when the client has left."""
        limit = self.engine.options.timeout
        late = time.monotonic() > self.started + limit
        if not late and not self._gone():
            return
        self.job.given_up = True
        if late:
            raise Answer(Refused(504, f"[--timeout] took more than {limit:g} s", "timeout"))
        raise ConnectionAbortedError("the client has left")

    @property
    def cached_tokens(self) -> int:
        return max(0, self.context.prompt_cache_count)  # -1 before the cache was looked for

    @property
    def stop_word(self) -> str | None:
        """The stop word that ended the reply, or None."""
        return self.job.text.word if self.job.text is not None else None

    def numbers(self) -> dict:
        """The `kv` field of a reply that has ended."""
        return self.engine.numbers(self.job, self.cached_tokens)

    def stop(self) -> None:
        if self.context is not None:
            self.context.stop()


def _tool_calls(parse, text: str, tools) -> list[dict]:
    """The calls that `parse` reads in a model's text. Raises ValueError: mlx-lm then drops the call."""
    try:
        found = parse(text, tools)
    except RecursionError as error:  # JSON of a model that never closes its brackets
        raise ValueError(str(error)) from None
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        named = isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]
        if not named or not isinstance(call.get("arguments"), dict):
            raise ValueError(f"a call needs a name and arguments; got {text.strip()[:80]!r}")
    return calls
