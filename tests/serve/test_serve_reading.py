"""What takes long to read is read elsewhere: streams of other clients go on, and there is an end to it."""

import asyncio
import json
import os
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Thread

import pytest
from serving import PROCESS_WORKER, complete, get, refused, send, until
from serving import serving as serving_by

from mlxkv.serve import reading
from mlxkv.serve.refusals import Refused

serving = partial(serving_by, worker=PROCESS_WORKER)
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
MEGABYTE = 1_000_000
OWN_SECONDS = 0.5  # of processor time, of the server's process and of its client here
BOMB = {"allOf": [{"type": "string", "pattern": f"[a-z]{{{i},}}"} for i in range(1, 41)]}


def chat(text: str = "Hi", **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1} | more


def calls(count: int, arguments: str = "{}") -> dict:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call] * count},
    ]
    return {"messages": messages}


PAIRS = {f"k{i}": i for i in range(100_000)}
HEAVY = {
    "a word": (CHAT, chat("a" * MEGABYTE)),
    "digits": (CHAT, chat("1234567890" * (MEGABYTE // 10))),
    "words to count": (COUNT, chat("so much " * (MEGABYTE // 8))),
    "special tokens": (CHAT, chat("<s>" * (MEGABYTE // 3))),
    "fields": (CHAT, chat(**PAIRS)),
    "pairs": (CHAT, chat(metadata=PAIRS)),
    "pairs of a call": (CHAT, calls(1, json.dumps(PAIRS))),
    "calls": (CHAT, calls(15_000)),
    "messages": (CHAT, {"messages": chat()["messages"] * 30_000}),
    "parts": ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]}),
    "stop words": (CHAT, chat(stop=["a"] * 90_000)),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(model_folder):
    with serving(model_folder) as running:
        yield running


@pytest.mark.slow
def test_heavy_requests_are_read_in_another_process(server, subtests):
    refused(server, 400, prompt="a" * (reading.LARGE + 1))  # which has started now
    for name, (path, body) in HEAVY.items():
        data = json.dumps({"model": "random", "max_tokens": 1} | body).encode()
        with subtests.test(name):
            start = time.process_time()
            status, _, answer = send(server, "POST", path, data)
            assert time.process_time() - start < OWN_SECONDS
            assert status in (200, 400), answer[:200]


def test_a_tokenizer_that_no_other_process_can_have_reads_here(server, monkeypatch):
    tokenizer = server.engine.tokenizer
    monkeypatch.setattr(tokenizer, "_odd", lambda: 0, raising=False)
    reader = reading.Reader(tokenizer, {}, server.loaded_model.model_info)
    data = json.dumps({"model": "random", "prompt": "abc", "max_tokens": 1}).encode()
    result = asyncio.run(reader.read("/v1/completions", data, None))
    assert result.prompt.tokens == tokenizer.encode("abc")
    with pytest.raises(Refused, match=r"^\[body\] not JSON"):
        asyncio.run(reader.read("/v1/completions", b"{", None))
    assert not reader.workers


def test_what_is_read_while_a_model_is_closed_is_told(server):
    reader = reading.Reader(server.engine.tokenizer, {}, server.loaded_model.model_info)

    async def waits():
        task = asyncio.create_task(reader.read("/v1/completions", b"{}", None))
        await asyncio.sleep(0.01)  # its process is not ready before
        await asyncio.to_thread(reader.close)
        await task

    with pytest.raises(Refused, match="is ending"):
        asyncio.run(waits())
    with pytest.raises(Refused, match="is ending"):
        asyncio.run(reader.read("/v1/completions", b"{}", None))


@pytest.mark.parametrize("moment", ("before the question", "while it waits"))
def test_a_pool_that_shuts_down_under_a_question_is_an_ending(moment, monkeypatch):
    """`close` may come between the start of a process and its question, or cancel a question that waits."""
    worker, pool = reading.Worker(), ThreadPoolExecutor(1)
    monkeypatch.setattr(worker, "start", lambda: pool)
    worker._has_ended = True
    if moment == "before the question":
        pool.shutdown()
    else:
        monkeypatch.setattr(pool, "submit", lambda *_: cancelled())
    with pytest.raises(Refused, match="is ending"):
        worker.read(1.0)
    pool.shutdown()


def cancelled() -> Future:
    future = Future()
    assert future.cancel()
    return future


def test_small_requests_come_before_large_ones_that_wait():
    queue, read = reading.WorkerQueue(), []

    async def ask(size: int) -> None:
        async with queue.acquire(size):
            await asyncio.sleep(0)
            read.append(size)

    async def main() -> None:
        tasks = [asyncio.create_task(ask(size)) for size in (9, 5, 3, 4, 1)]
        await asyncio.sleep(0)  # the first is read, the others wait
        tasks[2].cancel()
        while 1 not in read:
            await asyncio.sleep(0)
        tasks[3].cancel()  # it was given its turn, and has not seen it
        await asyncio.gather(*tasks, return_exceptions=True)
        await ask(2)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert read == [9, 1, 5, 2] and not queue.busy


async def in_turn(
    queue, asked: list[tuple], looped: tuple[tuple, ...], seconds: float = 20
) -> list[tuple]:
    """Who had a turn until all of `asked`, (key, size), had theirs, beside clients that ask again and again."""
    turns = []

    async def ask(key: str | None, size: int) -> None:
        async with queue.acquire(size, key):
            await asyncio.sleep(0)
            turns.append((key, size))

    async def loop(key: str | None, size: int) -> None:
        while True:
            await ask(key, size)

    async with asyncio.timeout(seconds):
        others = [asyncio.create_task(loop(*each)) for each in looped]
        await asyncio.sleep(0)
        await asyncio.gather(*(ask(*each) for each in asked))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert not queue.busy and not queue._waiting
    return turns


@pytest.mark.parametrize("keys", [1, 2, 9])
def test_nobody_waits_for_ever_for_smaller_requests(keys):
    """A large request of one key beside two clients of each key, which never stop."""
    smaller = tuple((f"{i % keys}", 60) for i in range(2 * keys))
    turns = asyncio.run(in_turn(reading.WorkerQueue(), [("0", 66)], smaller))
    # the two clients of its key were there before it
    assert turns.index(("0", 66)) <= 3 * reading.EVERY * keys


def test_who_waits_longest_comes_next_of_its_key():
    small = (("a", 1),) * 3
    asked = [("a", 5), ("a", 9), ("a", 7)]
    turns = [
        acquire
        for acquire in asyncio.run(in_turn(reading.WorkerQueue(), asked, small))
        if acquire in asked
    ]
    assert turns == asked


def test_another_key_waits_for_nobodys_many_requests():
    """Forty requests of a key are there before a larger one of another."""
    crowd = [("a", 1)] * 40
    turns = asyncio.run(in_turn(reading.WorkerQueue(), [*crowd, ("b", 99)], ()))
    assert turns.index(("b", 99)) <= 2


def test_clients_that_leave_count_for_nothing():
    queue = reading.WorkerQueue()

    async def wait(key: str) -> None:
        async with queue.acquire(1, key):
            pass

    async def main() -> list[tuple]:
        async with queue.acquire(0, "a"):
            tasks = [asyncio.create_task(wait(key)) for key in "abcdefgh" * 9]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            last = asyncio.create_task(in_turn(queue, [("z", 9)], ()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await last

    assert asyncio.run(main()) == [("z", 9)]


def test_each_api_key_has_its_turns(model_folder, monkeypatch):
    seen, plain = [], reading.WorkerQueue.acquire
    monkeypatch.setattr(
        reading.WorkerQueue, "acquire", lambda *args: seen.append(args[2]) or plain(*args)
    )
    with serving(model_folder, api_key=["first", "second"]) as server:
        for key in ("second", "first"):
            headers = {"Authorization": f"Bearer {key}"}
            for path in ("/v1/completions", COUNT):
                send(server, "POST", path, chat(prompt="a"), headers)
    assert seen == ["second", "second", "first", "first"]


def test_a_reader_that_was_stopped_is_no_fault_of_the_client(server, monkeypatch):
    """By a signal, or on a machine that swaps; by the system's lack of memory."""
    refused(server, 400, prompt="")  # it runs
    monkeypatch.setattr(reading, "PATIENCE", 2.0 - reading.SECONDS)
    monkeypatch.setattr(reading, "LARGE", 0)  # the second one reads
    worker, queue = server.loaded_model.reader.workers[1], server.loaded_model.reader.queues[1]
    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
        worker.start().submit(int).result(60)
        with ThreadPoolExecutor(1) as pool:
            worker.start().submit(time.sleep, 1)
            job = pool.submit(send, server, "POST", "/v1/completions", {"prompt": "a"})
            until(lambda: queue.busy)
            time.sleep(0.1)
            os.kill(worker._context.process.pid, number)
            status, headers, data = job.result()
        error = json.loads(data)["error"]
        assert (status, error["code"]) == (503, "busy") and headers["Retry-After"], error
    monkeypatch.undo()
    assert complete(server, "a", 1)
    idle = server.loaded_model.reader.workers[0]._context.process
    os.kill(idle.pid, signal.SIGKILL)
    until(lambda: not idle.is_alive())
    assert complete(server, "a", 1)


@pytest.mark.parametrize("where", ["format", "property"])
def test_a_schema_that_explodes_is_refused(server, monkeypatch, where):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(reading, "SECONDS", 1)
    schema = BOMB if where == "format" else {"type": "object", "properties": {"a": BOMB}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    start = time.process_time()
    error = refused(server, 400, CHAT, **chat(response_format=form))
    assert time.process_time() - start < OWN_SECONDS
    assert error["code"] == "too_complex" and "1 s of processor time" in error["message"]
    monkeypatch.undo()
    assert complete(server, "a", 1) and get(server, "/health") == {"status": "ok"}


def test_a_template_that_takes_too_much_memory_is_named_as_that(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "doubling")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    doubling = "{% set ns.x = ns.x + ns.x %}"
    settings["chat_template"] = (
        "{% set ns = namespace(x='a' * 1024) %}{% if messages[0].content == 'more' %}"
        f"{{% for _ in range(40) %}}{doubling}{{% endfor %}}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(folder) as server:
        error = refused(server, 400, CHAT, **chat("more"))
        assert error["code"] == "too_complex" and "1024 MiB to read" in error["message"]
        assert send(server, "POST", CHAT, chat("less"))[0] == 200


def test_schemas_hold_no_other_request_up(server):
    pytest.importorskip("llguidance")
    asked = chat(response_format={"type": "json_schema", "json_schema": {"schema": BOMB}})
    attack = Thread(target=refused, args=(server, 400, CHAT), kwargs=asked)
    attack.start()
    until(lambda: any(queue.busy for queue in server.loaded_model.reader.queues))
    for _ in range(3):  # the first may come before the schema is reached
        complete(server, "a", 1)
    assert attack.is_alive()
    attack.join()
