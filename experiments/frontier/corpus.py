"""Read the held-out texts: FOLDER/SPLIT/KIND-N.txt, a file a text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

from mlxkv.errors import UserError
from mlxkv.eval.questions import planted
from mlxkv.eval.questions.document import Document
from mlxkv.eval.tasks.retrieval import MARGIN
from mlxkv.texts import sources

KL, RETRIEVAL = "kl", "retrieval"
CALIBRATION, TEST, HAYSTACK = "calibration", "test", "haystack"
SEED = "evidence-1"  # count it up when documents or questions change
QUESTIONS = ("single", "multi-query")  # of 8 each, a document has 16


@dataclass(frozen=True)
class Held:
    """folder: with the splits. Where it is None, texts are stories, which the small models of the tests know."""

    folder: Path | None

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        if self.folder is None:
            return {}
        return {
            split: sorted((self.folder / split).glob("*.txt"), key=_order)
            for split in (CALIBRATION, TEST, HAYSTACK)
        }

    def names(self, split: str) -> list[str]:
        """Return the names of the texts of a split: KIND-N. Raises UserError if there are none."""
        if self.folder is None:
            return [f"stories-{i + 1}" for i in range(STORIES)]
        if not self.files[split]:
            raise UserError(
                f"[--texts] no texts; got {self.folder / split}; put KIND-N.txt there, UTF-8"
            )
        return [file.stem for file in self.files[split]]

    def tokens(self, loaded, split: str, name: str, count: int) -> list[int]:
        """Return the first `count` tokens of a text. Raises UserError if it has fewer."""
        if self.folder is None:
            return sources.story_tokens(loaded, count, seed=f"{split}-{name}")
        return sources.evaluation_tokens(loaded, count, [self._file(split, name)]).tokens

    def calibration(self, loaded, count: int) -> sources.Text:
        """Return tokens of the calibration texts: a stretch of each, so that none is all of it."""
        if self.folder is None:
            return sources.calibration_tokens(loaded, count)
        self.names(CALIBRATION)
        files = self.files[CALIBRATION]
        tokens: list[int] = []
        for left, file in zip(range(len(files), 0, -1), files, strict=True):
            share = -(-(count - len(tokens)) // left)
            tokens += sources.calibration_tokens(loaded, share, [file]).tokens
        return sources.Text(f"{len(files)} held-out calibration texts", tokens)

    def document(self, loaded, index: int, context: int, questions: int) -> Document:
        """Return document `index` of about `context` tokens, with `questions` of each kind: facts of the
        small worlds between the sentences of haystack texts."""

        def measure(text: str) -> int:
            return len(loaded.tokenizer.encode(text, add_special_tokens=False))

        rng = Random(f"{SEED}-{context}-{index}")
        return planted.document(rng, context - MARGIN, questions, measure, self.haystack(index))

    def haystack(self, index: int) -> str | None:
        """Return the text of document `index`, longer than it will be; None: generated stories."""
        if self.folder is None:
            return None
        self.names(HAYSTACK)
        files = self.files[HAYSTACK]
        first = index % len(files)
        turned = [*files[first:], *files[:first]]  # a short text is continued by the next one
        return "\n\n".join(file.read_text(encoding="utf-8") for file in turned)

    def document_name(self, index: int) -> str:
        """Return the name of document `index`: of the haystack text that it starts with."""
        if self.folder is None:
            return f"stories-{index + 1}"
        names = self.names(HAYSTACK)
        name = names[index % len(names)]
        return name if index < len(names) else f"{name}+{index // len(names)}"

    def _file(self, split: str, name: str) -> Path:
        return self.folder / split / f"{name}.txt"


STORIES = 8  # texts of a split for the small models of the tests


def _order(file: Path) -> tuple[int, str]:
    """First of each kind first, so that any beginning of the list has all kinds."""
    found = re.search(r"-(\d+)$", file.stem)
    return int(found[1]) if found else 0, file.stem
