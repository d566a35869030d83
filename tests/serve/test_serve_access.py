"""Who may ask: keys, the addresses that guess them, targets, preflights."""

import json
from socket import gethostname
from types import SimpleNamespace

import pytest
from serving import complete, get, send, serving
from small_models import TINY
from starlette.datastructures import Headers

from mlxkv.cli import serve
from mlxkv.errors import UserError
from mlxkv.serve.http import app
from mlxkv.serve.http.app import Keys, given_key
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.refusals import Refused


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, which tests move. That of `app` alone: the loop of another server in this process
    would wait for hours."""
    now = [1000.0]
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def tried(keys: Keys, given: str, peer: str = "10.0.0.1", known=("secret", "other")) -> int:
    """The status of an attempt; 200 if the key is right."""
    try:
        keys.check(given, known, peer)
    except Refused as refused:
        assert refused.status in (401, 429) and "secret" not in refused.message
        assert (refused.retry is None) == (refused.status == 401)
        return refused.status
    return 200


def test_guesses_are_slowed_down(clock):
    keys = Keys()
    found = [tried(keys, f"guess {i}") for i in range(100)]
    assert found == [401] * app.FREE + [429] * (100 - app.FREE)
    assert tried(keys, "secret") == 429  # or guesses would be compared
    assert tried(keys, "secret", "10.0.0.2") == 200
    clock[0] += 1.01
    assert [tried(keys, "a"), tried(keys, "b")] == [401, 429]
    clock[0] += 60
    assert tried(keys, "secret") == 200
    assert keys.wrong == app.FREE + 1


def test_guesses_do_not_lock_a_long_key_out(clock):
    """Of others at the same address, behind a proxy for one."""
    keys, long = Keys(), "k" * app.LONG
    known = (long, long[:-1])
    for i in range(40):
        assert tried(keys, f"guess {i}", known=known) == (401 if i < app.FREE else 429)
        assert tried(keys, long, known=known) == 200
    found = [tried(keys, given, known=known) for given in (long[:-1], long + "k", "")]
    assert found == [429, 429, 401] and keys.wrong == app.FREE


def test_a_key_is_compared_whole(clock):
    keys = Keys()
    assert [tried(keys, given) for given in ("secret", "other")] == [200, 200]
    assert {tried(keys, given) for given in ("secretx", "secre", "SECRET", "secret other")} == {401}


def test_no_key_is_no_guess(clock):
    keys = Keys()
    assert {tried(keys, "") for _ in range(50)} == {401}
    assert tried(keys, "secret") == 200 and not keys._debts


def test_memory_of_guesses_is_bounded(clock):
    keys = Keys()
    for i in range(5000):
        tried(keys, "guess", f"10.{i >> 8}.{i & 255}.1")
        clock[0] += 0.01
    assert len(keys._debts) == app.ADDRESSES and keys.wrong == 5000
    assert "10.19.135.1" in keys._debts and "10.0.0.1" not in keys._debts  # the latest of 5000


def test_what_counts_as_one_address():
    for one, other, same in (
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("10.0.0.1", "10.0.0.2", False),
    ):
        assert (app._network(one) == app._network(other)) == same, (one, other)


def test_the_key_in_a_header():
    for field, key in (
        ("Bearer a b", "a b"),
        ("bearer a", "a"),
        ("a", "a"),
        ("Basic a", "Basic a"),
        ("Bearer ", ""),
    ):
        assert given_key(Headers({"Authorization": field})) == key
    assert given_key(Headers({})) == "" and given_key(Headers({"x-api-key": "a"})) == "a"
    assert given_key(Headers({"x-api-key": "a", "Authorization": "b"})) == "b"


def test_pages_and_names_that_reach_a_local_server(subtests):
    for host, origin, is_let_in in (
        ("localhost:8080", None, True),
        ("LocalHost:8080", None, True),
        ("[::1]:8080", None, True),
        ("127.0.0.1", "http://127.0.0.1", True),
        ("localhost:8080", "http://evil.example", False),
        ("localhost:8080", "http://localhost:1", False),
        ("localhost:8080", "http://localhost:8080.evil.example", False),
        ("localhost:8080", "http://localhost:80801", False),
        ("localhost:8080", "http://app.example", True),
        ("localhost:8080", "http://app.example.evil.example", False),
        ("localhost:8080", "http://app.exampl", False),
        ("localhost:8080", "", False),
        ("evil.example", None, False),  # a page's own name, made to point here
        ("localhost.evil.example", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("evil.example.localhost", None, False),
        ("", None, False),
    ):
        headers = Headers({"Host": host} | ({} if origin is None else {"Origin": origin}))
        options = ServeOptions(allow_origin=["http://app.example"])
        with subtests.test(host, origin=origin):
            if is_let_in:
                app.check_host(headers, options)
                continue
            with pytest.raises(Refused) as refused:
                app.check_host(headers, options)
            assert refused.value.status == 403
    headers = {"Host": "localhost:8080", "Sec-Fetch-Site": "cross-site"}
    app.check_host(Headers(headers), ServeOptions(), "GET")  # a link
    app.check_host(Headers(headers), ServeOptions(allow_origin=["*"]), "POST")
    app.check_host(Headers(headers | {"Sec-Fetch-Site": "none"}), ServeOptions(), "POST")
    with pytest.raises(Refused, match="another site"):
        app.check_host(Headers(headers), ServeOptions(), "POST")


def test_keys_come_from_options_and_the_environment(monkeypatch):
    assert ServeOptions(api_key="a b").api_keys == ("a b",)
    assert ServeOptions(api_key=["a", "b"]).api_keys == ("a", "b")
    assert ServeOptions(api_key=[]).api_keys == ServeOptions().api_keys == ()
    with pytest.raises(UserError, match="got no --api-key"):
        ServeOptions(host="0.0.0.0", api_key=[])
    for host in ("localhost.example", "127.0.0.1.example", "10.0.0.1", "::"):
        with pytest.raises(UserError, match="no --api-key"):
            ServeOptions(host=host)
    seen = []
    monkeypatch.setattr("mlxkv.serve.run.run_server", seen.append)
    monkeypatch.setenv("MLXKV_API_KEY", "x\ny")
    serve(model=TINY, api_key=None)
    serve(model=TINY, api_key=["z"])
    assert [options.api_keys for options in seen] == [("x", "y"), ("z",)]
    monkeypatch.setenv("MLXKV_API_KEY", "ab ")
    with pytest.raises(UserError, match=r"^\[--api-key\] must be of printable"):
        serve(model=TINY, api_key=None)


def test_keys_that_no_client_can_send_are_refused_at_the_start(subtests):
    """An empty one, too: `--api-key "$KEY"` with no such variable must not start a server that is open."""
    ends = ("ab ", " ab", "ab\n", "\tab", "a\x00b", "a\nb", "a\x7fb")
    for keys in ("", " ", "\u00e9", ["a", ""], *ends):
        with subtests.test(keys), pytest.raises(UserError, match=r"^\[--api-key\] must") as found:
            serve(model=TINY, api_key=keys)
        assert "\n" not in str(found.value) and "\x00" not in str(found.value)


def test_an_mlx_lm_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr("mlxkv.cli.metadata.version", lambda name: "0.31.3")
    with pytest.raises(UserError, match=r"needs mlx-lm 0.32.*got 0.31.3"):
        serve(model=TINY, api_key=None)


def test_a_container_reaches_a_server_for_others(model_folder):
    """By the name that Docker gives this machine, and with the key: other names are refused only without one."""
    docker = {"Host": "host.docker.internal:8642"}
    with serving(model_folder, host="0.0.0.0", api_key="secret") as server:
        assert send(server, "GET", "/v1/models", headers=docker)[0] == 401
        docker["Authorization"] = "Bearer secret"
        assert server.url == f"http://{gethostname()}:{server.server_address[1]}"
        status, _, said = send(server, "POST", "/v1/embeddings", {"input": "a"}, docker)
        assert status == 404 and "got /v1/embeddings; chats go to /v1/chat" in said.decode()
        (model,) = get(server, "/v1/models", **docker)["data"]
        asked = {"model": model["id"], "messages": [{"role": "user", "content": "a"}]}
        path = "/v1/chat/completions"
        assert send(server, "POST", path, asked | {"max_tokens": 1}, docker)[0] == 200
    with serving(model_folder, api_key="secret") as server:
        status, _, said = send(server, "GET", "/v1/models", headers=docker)
        assert (
            status == 403 and "--host 0.0.0.0 --api-key KEY" in json.loads(said)["error"]["message"]
        )


def test_over_http(model_folder, monkeypatch):
    origin = "http://app.example"
    with serving(model_folder, api_key="secret", allow_origin=[origin]) as server:
        key = {"Authorization": "Bearer secret"}
        asked = {"Origin": origin, "Access-Control-Request-Headers": "authorization"}
        asked["Access-Control-Request-Method"] = "POST"
        status, headers, _ = send(server, "OPTIONS", "/v1/completions", headers=asked)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == origin
        assert "authorization" in headers["Access-Control-Allow-Headers"]
        assert "POST" in headers["Access-Control-Allow-Methods"]
        status, headers, _ = send(
            server, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, asked | key
        )
        assert status == 200 and headers["Access-Control-Allow-Origin"] == origin
        asked["Origin"] = "http://evil.example"
        status, headers, said = send(server, "OPTIONS", "/v1/completions", headers=asked)
        words = "[Origin] http://evil.example may not ask; see --allow-origin"
        assert json.loads(said)["error"]["message"] == words
        assert status == 400 and "Access-Control-Allow-Origin" not in headers
        status, headers, _ = send(server, "GET", "/health", headers={"Origin": asked["Origin"]})
        assert status == 403 and "Access-Control-Allow-Origin" not in headers
        # A body is not read before the key was seen.
        length = {"Content-Length": str(4 << 20)}
        assert send(server, "POST", "/v1/completions", None, length)[0] == 401
        found = [
            send(server, "GET", "/v1/kv", headers={"Authorization": f"Bearer {i}"})[0]
            for i in range(30)
        ]
        assert found[: app.FREE] == [401] * app.FREE and 429 in found[app.FREE :]
        assert send(server, "HEAD", "/health")[2] == b""
        monkeypatch.setattr(app, "FREE", 1000)
        assert get(server, "/v1/kv", **key)["kv"] == "int4"
        text = send(server, "GET", "/metrics", headers=key)[2].decode()
        assert "mlxkv_wrong_keys 1" in text
        with pytest.raises(AssertionError, match="401|missing"):
            complete(server, "a", 1)
