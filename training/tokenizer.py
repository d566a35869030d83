"""The tokenizer: byte-level BPE with 3072 entries, digits one by one, and chat turn tokens.

python training/tokenizer.py OUT_FOLDER        # trains on the generator's text, two minutes
"""

import json
import re
import sys
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxkv.texts.worlds import documents

VOCAB_SIZE = 3072
SPECIALS = ["<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
PAD, BOS, EOS, START, END = range(5)
# Qwen2's own pattern: transformers gives it to every qwen2 model, whatever tokenizer.json says.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same pattern for Python's re, on ASCII text.
PATTERN_ASCII = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = message['content'] | trim + '\\n\\n' -%}
{%- elif message['role'] == 'user' -%}
{{- '<start_of_turn>user\\n' + ns.system + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- set ns.system = '' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<start_of_turn>model\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- else -%}
{{- raise_exception('roles are system, user, assistant; got ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train byte-level BPE on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def config() -> dict:
    """Return tokenizer_config.json as transformers and mlx-lm read it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<end_of_turn>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }


class FastEncoder:
    """Encode ASCII text to the ids of the tokenizer, several times faster by caching words."""

    def __init__(self, tokenizer: Tokenizer):
        self.parts = re.compile(f"({'|'.join(map(re.escape, SPECIALS))})").split
        self.words = re.compile(PATTERN_ASCII).findall

        class Cache(dict):
            def __missing__(self, word: str) -> list[int]:
                ids = tokenizer.encode(word, add_special_tokens=False).ids
                if len(self) < 1_000_000:
                    self[word] = ids
                return ids

        self.ids = Cache()

    def __call__(self, text: str) -> list[int]:
        words: list[str] = []
        for n, part in enumerate(self.parts(text)):
            words += (part,) if n % 2 else self.words(part)
        return list(chain.from_iterable(map(self.ids.__getitem__, words)))


def corpus(chars: int = 12_000_000) -> Iterable[str]:
    """Yield training text for the tokenizer, without the special tokens."""
    special = re.compile("|".join(map(re.escape, SPECIALS)))
    for length, share in ((512, 0.7), (2048, 0.3)):
        left = chars * share
        for pieces in documents(Random(f"train-tokenizer-{length}"), length):
            text = special.sub("\n", "".join(piece for piece, _ in pieces))
            left -= len(text)
            yield text
            if left < 0:
                break


def save(folder: Path, texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a tokenizer on the texts and write its two files to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(texts, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n")
    return tokenizer


def main(folder: str) -> None:
    tokenizer = save(Path(folder), corpus())
    sample = "".join(text for text in islice(corpus(), 200))
    print(f"{tokenizer.get_vocab_size()} entries")
    print(f"{len(sample) / len(tokenizer.encode(sample).ids):.2f} characters a token")


if __name__ == "__main__":
    main(*sys.argv[1:])
