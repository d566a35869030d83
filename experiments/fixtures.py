"""TINY, the path of the small trained model of tests/data, and a random model with its tokenizer."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from random_model import write_model  # noqa: E402
from small_models import COPIED, TINY  # noqa: E402


def write_qwen2(folder: Path) -> str:
    """Write a random model whose layers all see everything; return its path."""
    changes = {"model_type": "qwen2", "hidden_size": 256, "num_attention_heads": 4}
    write_model(folder, num_key_value_heads=2, vocab_size=3072, eos_token_id=[4, 2], **changes)
    for name in COPIED:
        shutil.copyfile(Path(TINY) / name, folder / name)
    return str(folder)
