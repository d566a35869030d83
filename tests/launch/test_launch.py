"""`mlxkv launch` with programs that note how they were started."""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from random_models import write_model
from serving import serving, until

from mlxkv import launch as launching
from mlxkv.cli import main
from mlxkv.launch import TOOLS
from mlxkv.options import PARENT

ROOT = Path(__file__).parents[2]
# Asks the server that it was pointed at, as the real one would, and notes what it was given.
FAKE = """#!{python}
import json, os, sys
from urllib.request import ProxyHandler, Request, build_opener
env = dict(os.environ)
url = env.get("ANTHROPIC_BASE_URL") or {url!r}
key = env.get("ANTHROPIC_AUTH_TOKEN") or env["MLXKV_API_KEY"]
if "opencode" in sys.argv[0]:
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    url = config["provider"]["mlxkv"]["options"]["baseURL"].removesuffix("/v1")
if "codex" in sys.argv[0]:
    (url,) = [x.split("=", 1)[1] for x in sys.argv if "base_url" in x]
    url = json.loads(url).removesuffix("/v1")
ask = Request(url + "/v1/models", headers={{"Authorization": "Bearer " + key}})
with build_opener(ProxyHandler({{}})).open(ask) as response:
    models = [one["id"] for one in json.load(response)["data"]]
with open({out!r}, "w") as file:
    json.dump({{"env": env, "args": sys.argv[1:], "models": models, "url": url}}, file)
sys.exit({code})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes executables of these names; calling the result reads what the last one noted."""
    folder, out = tmp_path / "bin", tmp_path / "noted.json"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("MLXKV_API_KEY", raising=False)

    def make(name: str, code: int = 0):
        path = folder / name
        path.write_text(FAKE.format(python=sys.executable, url="", out=str(out), code=code))
        path.chmod(0o755)
        return lambda: json.loads(out.read_text())

    return make


@pytest.fixture(scope="module")
def running(model_folder):
    with serving(model_folder, api_key=["secret"]) as server:
        yield server


@pytest.mark.parametrize("tool", TOOLS)
def test_a_program_finds_the_server(tool, fake, running, monkeypatch, capfd):
    noted = fake(TOOLS[tool].program, code=3)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "elsewhere")
    args = ["launch", tool, "--url", running.url + "/v1", "--api-key", "secret"]
    assert main([*args, "--", "-p", "hi there", "--model", "x"]) == 3
    found = noted()
    env = found["env"]
    assert found["models"] == ["random"] and found["url"] == running.url
    warned = capfd.readouterr().err
    assert f"{tool} needs 32,000 tokens or more; random has room for 2,048 here" in warned
    assert f"{tool} calls tools; the chat template of random has none" in warned
    assert found["args"][-4:] == ["-p", "hi there", "--model", "x"]
    assert ("ANTHROPIC_API_KEY" in env) == (tool != "claude")
    if tool == "claude":
        names = [name for name in env if name.startswith("ANTHROPIC") and "MODEL" in name]
        assert [env[name] for name in names] == 4 * ["random"]
        assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "2048"
        assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "512"


def test_a_dry_run_starts_nothing_and_shows_no_key(fake, running, tmp_path, capfd):
    fake("codex", code=9)
    args = ["launch", "codex", "--url", running.url, "--api-key", "secret"]
    assert main([*args, "--dry-run", "--", "a b"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "export MLXKV_API_KEY=..." in lines and "secret" not in "".join(lines)
    assert lines[-1].startswith("codex -c ") and lines[-1].endswith(" 'a b'")
    assert main(["launch", "opencode", "-m", "qwen3-4b", "--kv", "int8", "--dry-run"]) == 0
    out = capfd.readouterr()
    assert out.out.splitlines()[0] == "mlxkv serve --model qwen3-4b --kv int8 --port 8642"
    assert '"model": "mlxkv/qwen3-4b"' in out.out and "npm install -g opencode-ai" in out.err
    assert '"context": 32768' in out.out and "tokens or more" not in out.err
    short = write_model(tmp_path / "short", max_position_embeddings=4096)
    assert main(["launch", "claude", "-m", str(short), "--dry-run"]) == 0
    out = capfd.readouterr()
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW=4096" in out.out
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=1024" in out.out
    assert "claude needs 32,000 tokens or more; short has room for 4,096 here" in out.err
    (tmp_path / "m😀").mkdir()
    assert main(["launch", "codex", "-m", str(tmp_path / "m😀"), "--dry-run"]) == 0
    assert "-c 'model=\"m😀\"'" in capfd.readouterr().out  # TOML has no pairs of escapes


NOBODY = "[--url] no server of mlxkv answers"
BAD = [
    (["nope"], 2, "[launch] no such program; got 'nope'; choose from claude, opencode, codex"),
    (["codex"], 1, "[launch] codex is not installed; npm install -g @openai/codex"),
    *(
        (["claude", "--url", url], 2, "[--url] must begin with http:// or https://, and a host")
        for url in ("ftp://x", "http://", "http://[::1", "http://[x]:1", "http://a:99999")
    ),
    (["claude", "--url", "http://127.0.0.1:9"], 1, NOBODY),
    (["claude", "--url", "http://x", "-m", "tiny"], 2, "[--url] its server has a model already"),
    (["claude", "--kv", "int8"], 2, "[--model] needed to start a server"),
    (["claude", "-m", "nonsense"], 2, "nonsense"),
    (["claude", "-m", "tiny", "--serve", "'"], 2, "[--serve] No closing quotation"),
    (["claude"], 2, "[--model] needed to start a server; got none"),
]


def test_bad_input_is_one_line(fake, monkeypatch, capfd, subtests):
    fake("claude")
    monkeypatch.setattr(launching, "USUAL", "http://127.0.0.1:9")
    for args, code, said in BAD:
        with subtests.test(args=args):
            assert main(["launch", *args]) == code
            (line,) = capfd.readouterr().err.splitlines()
            assert said in line


DEEP = "[" * 100_000
ANSWERS = {
    "an infinite length": ('{"model": "m", "longest_tokens": 1e999}', 1, "no server of mlxkv"),
    "no length": ('{"model": "m", "longest_tokens": -1}', 1, "no server of mlxkv"),
    "a deep answer": (DEEP, 1, "no server of mlxkv"),
    "a list": ("[]", 1, "no server of mlxkv"),
    "a list for a name": ('{"model": ["m"], "longest_tokens": 9}', 1, "no server of mlxkv"),
    "a variable": ('{"model": "a{env:HOME}", "longest_tokens": 9}', 2, "[--model] its name"),
    "a file": ('{"model": "{file:~/.ssh/id}", "longest_tokens": 9}', 2, "[--model] its name"),
    "half of a pair": ('{"model": "a\\ud800", "longest_tokens": 9}', 2, "[--model] its name"),
    "a zero": ('{"model": "a\\u0000b", "longest_tokens": 9}', 2, "[--model] its name"),
    "a line": ('{"model": "a\\nb", "longest_tokens": 9}', 2, "[--model] its name"),
    "elsewhere": (None, 1, "no server of mlxkv"),
}


@pytest.fixture
def answering():
    """A server that answers what `text` says, or leads elsewhere where that is None; `keys` are what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            here.keys.append((self.path, self.headers["Authorization"]))
            self.send_response(302 if here.text is None else 200)
            if here.text is None:
                self.send_header("Location", f"http://localhost:{here.server_port}/elsewhere")
            self.end_headers()
            self.wfile.write((here.text or "").encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as here:
        here.keys, here.text = [], ""
        thread = Thread(target=here.serve_forever)
        thread.start()
        yield here
        here.shutdown()
        thread.join()


def test_what_a_server_may_answer(answering, fake, capfd, subtests):
    fake("opencode", code=9)
    for name, (answering.text, code, said) in ANSWERS.items():
        with subtests.test(name):
            url = f"http://127.0.0.1:{answering.server_port}"
            assert main(["launch", "opencode", "--url", url, "--api-key", "secret"]) == code
            (line,) = capfd.readouterr().err.splitlines()
            assert said in line
    assert {path for path, _ in answering.keys} == {"/v1/kv"}


def test_a_wrong_key_is_told(fake, running, capfd):
    fake("claude")
    assert main(["launch", "claude", "--url", running.url, "--api-key", "wrong"]) == 2
    assert "[--api-key]" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_of_its_own_lives_as_long(fake, model_folder, monkeypatch, capfd):
    """With a key that nobody else has, on a port of its own; ended when the program has."""
    noted = fake("claude", code=5)
    started, parents, plain = [], [], subprocess.Popen

    def watched(*args, env, **more):
        started.append(plain(*args, env=env, **more))
        parents.append(env.get(PARENT))
        return started[-1]

    monkeypatch.setattr(launching.subprocess, "Popen", watched)
    assert main(["launch", "claude", "-m", str(model_folder), "--serve", "--kv-memory 64MB"]) == 5
    found = noted()
    assert found["models"] == ["random"] and len(found["env"]["ANTHROPIC_AUTH_TOKEN"]) > 20
    server, _ = started
    assert server.returncode == 0
    assert parents[0] == str(os.getpid())  # whose end, even by SIGKILL, is its end
    assert launching.ask(found["url"], found["env"]["ANTHROPIC_AUTH_TOKEN"]) is None
    # One that cannot start is told in its own words.
    assert main(["launch", "claude", "-m", str(model_folder), "--serve", "--batch 0"]) == 1
    assert "[--batch] must be at least 1" in capfd.readouterr().err


@pytest.mark.slow
def test_ctrl_c_is_for_the_program(fake, running, tmp_path):
    """It may go on; SIGTERM ends it, and with it the launcher."""
    fake("claude")
    said = tmp_path / "said"
    (tmp_path / "bin" / "claude").write_text(
        f"#!{sys.executable}\nimport os, signal, time\n"
        f"out = os.open({str(said)!r}, os.O_CREAT | os.O_WRONLY)\n"  # a file object is not reentrant
        "signal.signal(signal.SIGINT, lambda *_: os.write(out, b'int\\n'))\n"
        "os.write(out, b'ready\\n')\n"
        "while True: time.sleep(0.05)\n"
    )
    command = [sys.executable, "-m", "mlxkv", "launch", "claude", "--url", running.url]
    env = os.environ | {"PYTHONPATH": str(ROOT), "MLXKV_API_KEY": "secret"}
    launched = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        until(lambda: said.exists() and "ready" in said.read_text())
        os.killpg(launched.pid, signal.SIGINT)  # as a terminal sends it
        until(lambda: "int" in said.read_text())
        assert launched.poll() is None
        launched.send_signal(signal.SIGTERM)
        assert launched.wait(60) == 128 + signal.SIGTERM
    finally:
        launched.poll() is None and os.killpg(launched.pid, signal.SIGKILL)
