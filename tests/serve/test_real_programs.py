"""Claude Code, Codex and OpenCode themselves, by `mlxkv launch`: each reads a file with its own tool.

They are not in the test extra, and look for news in the network: they run where MLXKV_PROGRAMS names the
folder they lie in.

    npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex opencode-ai
    MLXKV_PROGRAMS=FOLDER/node_modules/.bin python -m pytest tests/serve/test_real_programs.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_models import call, saying, write_thinker

from mlxkv.serve.http import app

FOLDER = os.environ.get("MLXKV_PROGRAMS", "")
ROOT = Path(__file__).parents[2]
WORD = "marmalade-7"
# How each is asked once, and the tool with which it reads a file.
ASKED = {
    "claude": (["-p"], "Read", lambda path: {"file_path": path}),
    "codex": (
        ["exec", "--skip-git-repo-check"],
        "exec_command",
        lambda path: {"cmd": f"cat {path}"},
    ),
    "opencode": (["run"], "read", lambda path: {"filePath": path}),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", ASKED)
def test_a_program_reads_a_file(program, tmp_path, monkeypatch):
    if not FOLDER or shutil.which(program, path=FOLDER) is None:
        pytest.skip(f"no {program}: MLXKV_PROGRAMS names no folder with it")
    work = tmp_path / "work"
    work.mkdir()
    (work / "note.txt").write_text(WORD)
    args, tool, arguments = ASKED[program]
    said, asked = [""], []

    def answer(body: bytes) -> None:
        """What the model says to this request: a call, then what the file says."""
        text = body.decode()
        asked.append(text)
        names = [
            one.get("name") or one["function"]["name"]
            for one in json.loads(text).get("tools", [])
            if one.get("name") or "function" in one
        ]
        if WORD in text:
            said[0] = f"It says {WORD}, I am told."
        elif tool in names:
            said[0] = "Let me look. " + call(
                {"name": tool, "arguments": arguments(str(work / "note.txt"))}
            )
        else:
            said[0] = "A file"  # a title for the conversation

    plain = app.body_of

    async def body_of(request, limit):
        body = await plain(request, limit)
        answer(body)
        return body

    monkeypatch.setattr(app, "body_of", body_of)
    folder = write_thinker(
        tmp_path / "caller", words=4000, num_hidden_layers=1, max_position_embeddings=1 << 17
    )
    env = {
        "HOME": str(tmp_path),
        "PATH": f"{FOLDER}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
    }
    with saying(folder, said, kv_memory="4GB", chunk=8192) as server:
        command = [sys.executable, "-m", "mlxkv", "launch", program, "--url", server.url, "--"]
        done = subprocess.run(
            [*command, *args, "What does note.txt say?"],
            env=env,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"It says {WORD}, I am told." in done.stdout
    assert any(WORD in text for text in asked) and WORD not in asked[0]
