"""Write the text on which the calibration of `tiny-chat` is made: dialogues of a seed of their own, and stories.

PYTHONPATH=.:training python -m chat.texts runs/calibration.txt
mlxkv calibrate --model tiny-chat --text runs/calibration.txt
"""

import sys
from pathlib import Path
from random import Random

from chat.dialogues import dialogue
from mlxkv.texts.worlds.chat import messages
from mlxkv.texts.worlds.documents import render
from mlxkv.texts.worlds.stories import stories

CHARS = 60_000


def text(seed: str = "calibration", chars: int = CHARS) -> str:
    """Return dialogues as the chat template writes them, every fourth piece a story."""
    rng, parts = Random(seed), []
    source = stories(Random(f"{seed}-stories"))
    while chars > 0:
        if len(parts) % 4 == 3:
            parts.append(next(source) + "\n")
        else:
            parts.append("".join(piece for piece, _ in render(messages(dialogue(rng)))))
        chars -= len(parts[-1])
    return "".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())
