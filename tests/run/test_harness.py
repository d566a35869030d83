"""lm-eval, the harness of published benchmarks, by mlx-lm's own command: `mlxkv run --kv 3 -- mlx_lm.evaluate`.

A task of ours over two lines, without a network.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlx_lm import generate
from mlx_lm.utils import load
from patience import PATIENCE
from small_models import TINY

ROOT = Path(__file__).parents[2]
LONG = "The harbour of Amsel lies east of the mill. " * 30 + "The harbour of Amsel"
DATA = """dataset_path: json
dataset_kwargs: {data_files: {test: lines.jsonl}}
test_split: test
doc_to_text: "{{text}}"
"""
WRITTEN = f"""task: written
{DATA}
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOSEN = f"""task: chosen
{DATA}
output_type: multiple_choice
doc_to_choice: "{{{{[answer, other]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("lm_eval") is None, reason='needs lm-eval: pip install "mlx-lm[evaluate]"'
    ),
]


@pytest.fixture
def folder(tmp_path):
    """A folder with the tasks, whose right answer to the first line is what the model writes by itself, and to the
    second is not."""
    model, tokenizer = load(str(TINY))
    text = generate(model, tokenizer, LONG, max_tokens=8).partition("\n")[0]
    lines = [
        {"text": LONG, "answer": text, "other": " purple elephants sing loudly"},
        {"text": LONG, "answer": " purple elephants sing loudly", "other": text},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "written.yaml").write_text(WRITTEN)
    (tmp_path / "chosen.yaml").write_text(CHOSEN)
    return tmp_path


def test_a_task_of_ours_is_scored_with_compressed_caches(folder, monkeypatch):
    words = ["-m", "mlxkv", "run", "--kv", "3", "--", "mlx_lm.evaluate", "--model", TINY]
    words += ["--tasks", "written.yaml", "chosen.yaml", "--output-dir", "out"]
    words += ["--no-apply-chat-template"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])))
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.setenv("MLXKV_COMPILE", "0")
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "out").iterdir()
    results = json.loads(file.read_text())
    assert results["written"]["exact_match,none"] == results["chosen"]["acc,none"] == 0.5
    assert "layers 1, 3, 5, 7 (full attention): fill-3" in done.stderr
    assert "[mlxkv] --kv fill-3: longest cache " in done.stderr
    assert "nothing compressed yet" not in done.stderr
