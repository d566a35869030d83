"""`mlxkv run` with mlx-lm's own programs, as they are, and with programs that end in every way."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import PATIENCE
from small_models import TINY

ROOT = Path(__file__).parents[2]
BYTES = r"longest cache ([\d,]+) tokens(?: of \d sequences)? in ([\d.]+) ([KMG]iB), in 16 bits ([\d.]+) ([KMG]iB)"
SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LONG = "The harbour of Amsel lies east of the mill. " * 40
MLX_LM = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """Programs multiply as fast as tests do, and find this source tree in whatever folder they run."""
    paths = (str(ROOT), os.environ["PYTHONPATH"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("MLXKV_COMPILE", "0")


def call(*words, stdin: str = "", **options) -> subprocess.CompletedProcess:
    words = [str(word) for word in words]
    return subprocess.run(
        words, input=stdin, capture_output=True, text=True, timeout=PATIENCE, **options
    )


def run(*words, **options) -> subprocess.CompletedProcess:
    return call(sys.executable, "-m", "mlxkv", "run", *words, **options)


def held(stderr: str) -> tuple[int, float, float]:
    """Tokens, bytes and bytes in 16 bits of the longest cache, as the last line says them."""
    found = re.search(BYTES, stderr)
    assert found, stderr
    tokens = int(found[1].replace(",", ""))
    return tokens, float(found[2]) * SIZES[found[3]], float(found[4]) * SIZES[found[5]]


def compressed(stderr: str, label: str = "int4, 4.5") -> bool:
    tokens, stored, plain = held(stderr)
    kinds = f"layers 1, 3, 5, 7 (full attention): {label} bits per value"
    return kinds in stderr and stored < plain


def text_of(stdout: str) -> str:
    """What mlx_lm.generate wrote between its lines."""
    return stdout.split("=" * 10)[1]


def test_generate_writes_what_it_writes_alone_and_caches_are_compressed():
    """The calibration that int2 needs lies beside the model: none is made."""
    words = "mlx_lm.generate", "--model", TINY, "--max-tokens", 8, "--prompt", LONG
    alone = call(MLX_LM / words[0], *words[1:])
    plain, packed = run("--kv", "fp16", "--", *words), run("--kv", "int2", "--", *words)
    assert alone.returncode == plain.returncode == packed.returncode == 0, packed.stderr
    assert text_of(plain.stdout) == text_of(alone.stdout)
    assert "in full precision as asked for" in plain.stderr
    for line in packed.stdout.splitlines():  # nothing of ours on stdout
        assert "mlxkv" not in line and "layers" not in line
    assert packed.stderr.count("layers 1, 3, 5, 7") == 1 and compressed(packed.stderr, "int2, 2.25")
    assert "calibrat" not in packed.stderr
    tokens, stored, plain_bytes = held(packed.stderr)
    assert tokens > 500 and stored < 0.7 * plain_bytes  # windows are exact


def test_chat_reads_stdin():
    done = run("--", "mlx_lm.chat", "--model", TINY, "--max-tokens", 24, stdin="Hello\nq\n")
    assert done.returncode == 0 and "How can I help you?" in done.stdout
    assert "int4, 4.5 bits per value" in done.stderr
    assert "nothing compressed yet: exact up to 192 tokens" in done.stderr


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port: int, messages: list[dict]) -> dict:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return json.load(reply)


def served(log: Path, *words) -> tuple[list[dict], list[int]]:
    """Replies of a server to the turns of a chat (asked again, edited, another question), and how many tokens it
    finds again in each. log: a file for its stderr."""
    port, replies = free_port(), []
    system = {"role": "system", "content": LONG[:900]}
    questions = "Who went out?", "Who went out?", "Who went home?", "Where is the mill?"
    with (
        log.open("w") as err,
        subprocess.Popen([*words, "--port", str(port)], stderr=err) as process,
    ):
        try:
            end = time.monotonic() + PATIENCE
            while "Starting httpd" not in log.read_text():
                assert time.monotonic() < end and process.poll() is None, log.read_text()
                time.sleep(0.1)
            for question in questions:
                replies.append(ask(port, [system, {"role": "user", "content": question}]))
        finally:
            process.terminate()
    details = [reply["usage"].get("prompt_tokens_details") or {} for reply in replies]
    return replies, [one.get("cached_tokens") or 0 for one in details]


def test_a_server_finds_again_what_it_finds_in_full_precision(tmp_path):
    """And its report comes from a thread."""
    words, log = ("mlx_lm.server", "--model", TINY), tmp_path / "stderr"
    _, alone = served(tmp_path / "alone", MLX_LM / words[0], *words[1:])
    replies, ours = served(log, sys.executable, "-m", "mlxkv", "run", "--kv", "int4", "--", *words)
    assert ours == alone and min(alone[1:]) > 100
    for reply in replies:
        assert reply["choices"][0]["message"]["content"]
        assert reply["usage"]["prompt_tokens"] > 200
    assert log.read_text().count("[mlxkv] --kv int4: ") == 1
    assert "int4, 4.5 bits per value" in log.read_text()


def test_a_saved_prompt_is_read_before_the_model_is_loaded(tmp_path):
    file = tmp_path / "prompt.safetensors"
    words = (
        "mlx_lm.cache_prompt",
        "--model",
        TINY,
        "--prompt-cache-file",
        file,
        "--prompt",
        LONG[:900],
    )
    done = run("--kv", "int4", "--", *words)
    assert done.returncode == 0 and file.exists(), done.stderr
    words = "mlx_lm.generate", "--prompt-cache-file", file, "--max-tokens", 8, "--prompt", "Who?"
    done = run("--kv", "int8", "--", *words)
    assert done.returncode == 0 and text_of(done.stdout).strip(), done.stderr
    assert "Traceback" not in done.stderr


def test_mlx_vlm_generates_with_compressed_caches(tmp_path):
    if not find_spec("mlx_vlm"):
        pytest.skip("no mlx-vlm here")
    model = tmp_path / "model"  # its loader reads a calibration beside it as weights
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("mlxkv*"))
    words = "mlx_vlm.generate", "--model", model, "--max-tokens", 8, "--prompt", LONG[:1125]
    done = run("--kv", "int4", "--", *words)
    assert done.returncode == 0 and compressed(done.stderr), done.stderr


ENDS = """
import sys
how = sys.argv[1]
if how == "code": sys.exit(7)
if how == "words": sys.exit("enough")
if how == "raise": raise ValueError("mine")
if how == "module": raise ModuleNotFoundError("No module named 'gone'", name="gone")
if how == "lm-eval": raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
if how == "argv": print(sys.argv[1:], sys.stdin.read(), sys.stdout.errors, __name__)
if how == "signal": import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)
"""


@pytest.fixture
def ends(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    return script


def test_the_exit_code_is_the_programs(ends):
    assert run(ends, "code").returncode == 7
    words = run("--kv", "int2", "--", "python", ends, "words")
    assert (words.returncode, words.stderr) == (1, "enough\n")


def test_what_a_program_sees_and_raises_is_its_own(ends):
    words = ends, "argv", "--kv", "-m", "--", "x"
    done, alone = run("--", *words, stdin="typed"), call(sys.executable, *words, stdin="typed")
    assert "['argv', '--kv', '-m', '--', 'x'] typed" in alone.stdout
    assert (done.stdout, done.stderr) == (alone.stdout, "")
    failed = run(ends, "raise")
    assert failed.returncode == 1 and failed.stderr.startswith("Traceback")
    assert "mine" in failed.stderr and "runpy" not in failed.stderr and "mlxkv" not in failed.stderr
    missing = run(ends, "module")
    assert missing.returncode == 1 and missing.stderr.startswith("Traceback")
    assert "gone" in missing.stderr and "mlxkv" not in missing.stderr
    harness = run(ends, "lm-eval")
    assert harness.returncode == 2 and harness.stderr.startswith("[run] ")
    assert "pip install 'mlx-lm[evaluate]'" in harness.stderr
    stopped = run(ends, "signal")
    assert stopped.returncode == 128 + signal.SIGINT and "Traceback" not in stopped.stderr


# MLX aborts a process that ends after a thread of its own loaded a model, without mlxkv as well.
LOADS = """
import os, sys, threading
from mlx_lm import load
def work():
    model, tokenizer = load(sys.argv[1])
    print(type(model.make_cache()[1]).__name__)
thread = threading.Thread(target=work); thread.start(); thread.join(); print("goes on", flush=True); os._exit(0)
"""


def test_strict_ends_a_program_that_loads_in_a_thread(tmp_path):
    """`learned` presets need a calibration of their own, which no model comes with."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    done = run("--kv", "learned-int2", "--strict", "--", script, TINY)
    assert (done.returncode, done.stdout) == (2, "") and "[mlxkv] refused: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
