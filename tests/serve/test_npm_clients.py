"""The APIs through the clients of npm, where MLXKV_NODE_MODULES names a folder that has them.

npm install --prefix FOLDER @anthropic-ai/sdk openai
MLXKV_NODE_MODULES=FOLDER/node_modules python -m pytest tests/serve/test_npm_clients.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from saying import call, saying, write_thinker

MODULES = os.environ.get("MLXKV_NODE_MODULES", "")
SCRIPT = Path(__file__).parents[1] / "support" / "clients" / "ask.cjs"
ARGUMENTS = {"city": "Oslo", "days": 2}


@pytest.mark.skipif(
    not MODULES or shutil.which("node") is None,
    reason="MLXKV_NODE_MODULES names no folder with the clients, or there is no node",
)
def test_the_clients_of_npm_read_what_the_model_said(tmp_path):
    said = ["<think>Look.</think>Yes. " + call({"name": "weather", "arguments": ARGUMENTS})]
    with saying(write_thinker(tmp_path / "caller"), said) as server:
        done = subprocess.run(
            ["node", str(SCRIPT), MODULES, server.url], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)

    message = found["anthropic"]
    assert [one["type"] for one in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == ARGUMENTS and message["stop"] == "tool_use"
    assert message["text"].strip() == "Yes." and message["content"][0]["thinking"] == "Look."
    usage = message["usage"]
    assert message["counted"] == usage["input_tokens"] + usage["cache_read_input_tokens"]

    response = found["openai"]
    assert [one["type"] for one in response["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(response["output"][2]["arguments"]) == ARGUMENTS
    assert response["text"].strip() == "Yes." and response["status"] == "completed"
    assert (
        response["kinds"][0] == "response.created" and response["kinds"][-1] == "response.completed"
    )
