"""Short names for models: the embedded ones, and common ones on the hub.

No framework is imported here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from mlxkv.console import user_path
from mlxkv.errors import UserError
from mlxkv.models.catalog.gguf.header import is_gguf
from mlxkv.models.catalog.weights.plant import KINDS

HERE = Path(__file__).resolve().parents[1] / "embedded"
# What people talk to where they name none, in chat, demo, serve and `load`; commands that measure take tiny.
CHAT, KV = "tiny-chat", "int4"


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a folder or a GGUF file on this machine, or `owner/name` on the Hugging Face hub.

    planted: what is planted in the weights while loading, to make caches harder to compress: a kind of
        `catalog.weights.plant`, "" for nothing.
    """

    name: str
    folder: Path | None = None
    repo: str | None = None
    planted: str = ""

    @property
    def decoded(self) -> bool:
        """Whether its weights are stored in few bits and computed with in 16 (`catalog.weights.stored`)."""
        return self.folder is not None and self.folder.resolve() in DECODED


DECODED = (HERE / "tiny", HERE / "tiny-qwen")
EMBEDDED: dict[str, Source] = {
    "tiny": Source("tiny", folder=HERE / "tiny"),
    "tiny-chat": Source("tiny-chat", folder=HERE / "tiny-chat"),
    "tiny-hard": Source("tiny-hard", folder=HERE / "tiny", planted="reciprocal"),
    "tiny-keys": Source("tiny-keys", folder=HERE / "tiny", planted="keys"),
    "tiny-massive": Source("tiny-massive", folder=HERE / "tiny", planted="massive"),
    "tiny-qwen": Source("tiny-qwen", folder=HERE / "tiny-qwen"),
    "tiny-qwen-hard": Source("tiny-qwen-hard", folder=HERE / "tiny-qwen", planted="reciprocal"),
    "tiny-qwen-keys": Source("tiny-qwen-keys", folder=HERE / "tiny-qwen", planted="keys"),
    "tiny-qwen-offset": Source("tiny-qwen-offset", folder=HERE / "tiny-qwen", planted="offset"),
    "tiny-qwen-massive": Source("tiny-qwen-massive", folder=HERE / "tiny-qwen", planted="massive"),
}
# Measured in docs, with a calibration in the package, as tiny-chat has. The others' are made on the spot and kept.
SHIPPED = ("tiny", "tiny-hard", "tiny-qwen", "tiny-qwen-hard")

HUB: dict[str, str] = {
    "gemma-3-1b": "mlx-community/gemma-3-1b-it-4bit",
    "gemma-3-4b": "mlx-community/gemma-3-4b-it-4bit",
    "gemma-3n-e2b": "mlx-community/gemma-3n-E2B-it-lm-4bit",
    "gpt-oss-20b": "mlx-community/gpt-oss-20b-MXFP4-Q8",
    "llama-3.1-8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama-3.2-1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama-3.2-3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "mistral-7b": "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    "phi-4-mini": "mlx-community/Phi-4-mini-instruct-4bit",
    "qwen2.5-1.5b": "mlx-community/Qwen2.5-1.5B-Instruct-4bit",
    "qwen2.5-7b": "mlx-community/Qwen2.5-7B-Instruct-4bit",
    "qwen3-0.6b": "mlx-community/Qwen3-0.6B-4bit",
    "qwen3-4b": "mlx-community/Qwen3-4B-4bit",
    "qwen3-8b": "mlx-community/Qwen3-8B-4bit",
    "smollm2-1.7b": "mlx-community/SmolLM2-1.7B-Instruct-4bit",
    "smollm3-3b": "mlx-community/SmolLM3-3B-4bit",
}

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def complete_model(incomplete: str) -> list[str]:
    """Names for a shell that completes `--model`."""
    return [name for name in (*EMBEDDED, *HUB) if name.startswith(incomplete)]


def resolve(name: str) -> Source:
    """Find the source of `name`: an alias, a folder or a GGUF file on this machine, or `owner/name` on the hub.

    An alias wins over a folder of the same name; write `./tiny` for the folder. FOLDER+KIND plants what
    `catalog.weights.plant` calls KIND. Raises UserError for anything else.
    """
    text = name.strip()
    if text in EMBEDDED:
        return EMBEDDED[text]
    if text in HUB:
        return Source(text, repo=HUB[text])
    folder = user_path(text, "--model")
    if text and (folder.is_dir() or is_gguf(folder)):
        return Source(text, folder=folder)
    plain, plus, kind = text.rpartition("+")
    if plus and kind in KINDS and user_path(plain, "--model").is_dir():
        return Source(text, folder=user_path(plain, "--model"), planted=kind)
    if folder.is_file():
        raise UserError(
            f"[--model] a model is a folder in the hub's format, or a GGUF file; got the file {text}; "
            "name its folder"
        )
    if REPO.fullmatch(text):
        return Source(text, repo=text)
    choices = [*EMBEDDED, *HUB]
    close = get_close_matches(text.lower(), choices, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(
        f"[--model] no such model; got {text[:60]!r}; {hint}choose from {', '.join(choices)}, a folder, "
        "a GGUF file, or owner/name on the hub"
    )
