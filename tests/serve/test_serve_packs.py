"""A server begins chats behind packs: for every client, and with the tokens that the whole text has."""

import pytest
from serving import get, post, send, serving

from mlxkv.cli import main
from mlxkv.errors import UserError
from mlxkv.serve.options import ServeOptions

FACTS = "The blue door opens with the copper key. " * 20
KEYS = ["operator", "guest"]
QUESTION = [{"role": "user", "content": "Which key?"}]


@pytest.fixture(scope="module")
def packed(model_folder, tmp_path_factory):
    """(name and file of a pack, its text)"""
    folder = tmp_path_factory.mktemp("packs")
    (folder / "facts.md").write_text(FACTS)
    words = ["read", str(folder / "facts.md"), "-m", str(model_folder), "-o", str(folder / "facts")]
    assert main(words) == 0
    return f"facts={folder / 'facts.kvpack'}", f"# facts.md\n\n{FACTS.strip()}"


@pytest.fixture(scope="module")
def server(model_folder, packed):
    with serving(model_folder, pack=[packed[0]], api_key=KEYS) as running:
        yield running


def ask(
    server, model: str, messages: list, key: str = "guest", path="/v1/chat/completions"
) -> dict:
    body = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0}
    return post(server, path, {"Authorization": f"Bearer {key}"}, **body)


def cached(reply: dict) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_models_list_it(server):
    names = [each["id"] for each in get(server, "/v1/models", Authorization="Bearer guest")["data"]]
    assert names == [server.loaded_model.name, "facts"]


@pytest.mark.parametrize("key", KEYS)
def test_a_chat_begins_behind_it(server, packed, key):
    reply = ask(server, "facts", QUESTION, key)
    assert cached(reply) > 700 and reply["usage"]["prompt_tokens"] - cached(reply) < 40
    assert reply["model"] == "facts", "the name that was asked for"
    spelled = ask(
        server, server.loaded_model.name, [{"role": "system", "content": packed[1]}, *QUESTION], key
    )
    assert spelled["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert spelled["choices"][0]["message"] == reply["choices"][0]["message"]
    assert spelled["model"] == server.loaded_model.name


def test_the_clients_own_system_message_follows_it(server, packed):
    own = {"role": "system", "content": "Be brief."}
    reply = ask(server, "facts", [own, *QUESTION])
    assert cached(reply) > 700
    spelled = {"role": "system", "content": f"{packed[1]}\n\nBe brief."}
    other = ask(server, server.loaded_model.name, [spelled, *QUESTION])
    assert other["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"]


def test_other_apis_begin_behind_it(server):
    headers = {"Authorization": "Bearer guest"}
    body = {"model": "facts", "max_tokens": 4}
    reply = post(server, "/v1/messages", headers, messages=QUESTION, **body)
    assert reply["usage"]["cache_read_input_tokens"] > 700
    reply = post(
        server, "/v1/responses", headers, model="facts", input="Which key?", max_output_tokens=4
    )
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] > 700


def test_plain_text_is_refused(server):
    headers = {"Authorization": "Bearer guest"}
    body = {"model": "facts", "prompt": "Which"}
    status, _, body = send(server, "POST", "/v1/completions", body, headers)
    assert status == 400 and "a pack begins chats" in str(body)


def test_no_session_pushes_it_out(server):
    sessions = server.engine.sessions
    sessions.shrink(0)
    assert not sessions.entries and len(sessions.pinned) == 1
    assert cached(ask(server, "facts", QUESTION)) > 700


def test_a_fault_of_kernels_leaves_its_text(model_folder, packed):
    with serving(model_folder, pack=[packed[0]]) as running:
        bound, (pinned,) = running.engine.memory.bound, running.engine.sessions.pinned
        running.engine.sessions.forget()
        assert running.engine.memory.bound == bound + pinned.nbytes
        body = {"model": "facts", "messages": QUESTION, "max_tokens": 2}
        assert cached(post(running, "/v1/chat/completions", **body)) == 0
        assert cached(post(running, "/v1/chat/completions", **body)) > 700


def test_requests_share_a_batch_with_others(server):
    from concurrent.futures import ThreadPoolExecutor

    alone = ask(server, "facts", QUESTION)["choices"][0]["message"]
    with ThreadPoolExecutor(4) as pool:
        names = ["facts", server.loaded_model.name] * 2
        replies = list(pool.map(lambda name: ask(server, name, QUESTION), names))
    assert [each["choices"][0]["message"] for each in replies[::2]] == [alone] * 2


def test_its_memory_is_taken_from_the_others(model_folder, packed):
    with serving(model_folder) as running:
        whole = running.engine.memory.bound
    with serving(model_folder, pack=[packed[0]]) as running:
        (pinned,) = running.engine.sessions.pinned
        assert pinned.nbytes > 0 and running.engine.memory.bound <= whole
    with pytest.raises(UserError, match=r"\[--pack\] no room"):
        with serving(model_folder, pack=[packed[0]], kv_memory="300KB"):
            pass


def test_wrong_packs_are_refused(model_folder, packed, tmp_path):
    for given in ("facts", "=x", "facts="):
        with pytest.raises(UserError, match=r"\[--pack\]"):
            ServeOptions(model=[str(model_folder)], pack=[given])
    with pytest.raises(UserError, match="once"):
        ServeOptions(pack=[packed[0], packed[0]])
    with pytest.raises(UserError, match="was saved with another cache"):
        with serving(model_folder, "int8", pack=[packed[0]]):
            pass
    with pytest.raises(UserError, match="no such file"):
        with serving(model_folder, pack=[f"x={tmp_path / 'x.kvpack'}"]):
            pass
    with pytest.raises(UserError, match="two have one name"):
        with serving(model_folder, pack=[f"{model_folder.name}={packed[0].partition('=')[2]}"]):
            pass
