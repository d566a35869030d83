"""Servers whose model says what a test has written down: no embedded model calls tools, and none thinks.

The sampler is scripted; templates, parsers, caches and all that reads and writes requests are real.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from random_models import write_model
from serving import serving

from mlxkv.corpora import corpus
from mlxkv.serve import sampling
from mlxkv.serve.run import Server

# mlx-lm finds its parser by the words of the template.
TEMPLATE = (
    "{% if tools %}<s>tools {{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>\n{"name": {{ tool_call.name | tojson }}, '
    '"arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "The weather of some days.", "parameters": SCHEMA}
WEATHER = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}


def call(*functions: dict) -> str:
    """What a model writes to call tools."""
    return "".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in functions)


def write_thinker(folder: Path, words: int = 0, template: str = TEMPLATE, **changes) -> Path:
    """A random model whose tokenizer knows <think> and </think>, and whose template calls tools. words: tokens
    of several letters, so that long prompts have fewer tokens than bytes."""
    write_model(folder, template=template, vocab_size=260 + words, **changes)
    path = folder / "tokenizer.json"
    if words:
        _learn(path, words)
    tokenizer = json.loads(path.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": 258 + words + i, "content": word, "special": False, **plain}
        for i, word in enumerate(("<think>", "</think>"))
    ]
    path.write_text(json.dumps(tokenizer))
    return folder


def _learn(path: Path, words: int) -> None:
    """Give a tokenizer of bytes merges, learned from the corpus."""
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers

    tokenizer = Tokenizer.from_file(str(path))
    trainer = trainers.BpeTrainer(
        vocab_size=256 + words,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.interleaved("evaluation"), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.save(str(path))


@contextmanager
def saying(folder: Path, said: list[str], **options) -> Iterator[Server]:
    """A server whose next reply is `said[0]`; other servers of the process sample as ever."""
    plain = sampling.sampler_of

    def scripted(args, tokenizer):
        if tokenizer is not server.engine.tokenizer:
            return plain(args, tokenizer)
        left = [*tokenizer.encode(said[0], add_special_tokens=False), tokenizer.eos_token_id]
        return lambda logprobs: mx.array([left.pop(0) if left else tokenizer.eos_token_id])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "sampler_of", scripted)
        with serving(folder, **options) as server:
            yield server
