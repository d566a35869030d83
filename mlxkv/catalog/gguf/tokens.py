"""Convert the tokenizer of a GGUF file to transformers' files: tokenizer.json and tokenizer_config.json.

transformers reads GGUF tokenizers itself, but only with torch, without SmolLM2's splitting of digits, and adds no
first token. Here the vocabulary goes into the `tokenizers` library, and the pre-tokenizer, which the file only names,
is written out. Its patterns are from the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.catalog.gguf.header import OTHER_FILE
from mlxkv.untrusted import Unsound

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # types of tokens
ADDED = (CONTROL, USER)  # matched before text is split
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
USUAL = {"unknown": 0, "bos": 1, "eos": 2}  # SentencePiece's, as assumed by llama.cpp
TEMPLATE = 1 << 20  # characters of a chat template
# Tokens that end a turn, in chat templates and in llama.cpp's list.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>")
ENDS += ("<|endoftext|>", "<|end|>", "<|end_of_turn|>", "<EOT>")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _WORDS + r"\p{N}" + _OTHERS
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _OTHERS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in ("*+", "+*")]
_CASED_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = "|".join(_CASED) + r"|\p{N}" + _CASED_OTHERS
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = "|".join(upper + _SUFFIX for upper in _CASED) + r"|\p{N}{1,3}" + _CASED_OTHERS
GPT2, DIGITS = "gpt-2", "digits"  # the pattern of the ByteLevel step; each digit alone before it
# Patterns by the pre-tokenizer's name in the file. llama.cpp's other names belong to other architectures.
SPLITS = dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), QWEN2)
SPLITS |= dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), LLAMA3)
SPLITS |= dict.fromkeys(("midm-2.0", "smaug-bpe", "dbrx"), LLAMA3)
SPLITS |= {"tekken": TEKKEN} | dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O)
SPLITS |= dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), DIGITS)
SPLITS |= dict.fromkeys(("exaone", "minerva-7b"), DIGITS)
SPLITS |= dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "gigachat", "trillion"), GPT2)
# Whole words in the vocabulary precede merges; a first token is added unless the file forbids it.
WHOLE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
COMPOSED = ("qwen2",)  # its own tokenizer normalizes text to NFC


def vocabulary(metadata: dict[str, Any]) -> list[str]:
    """Return the tokens by number. Raises Unsound for an unsupported tokenizer or inconsistent values."""
    tokens, kinds = _values(metadata, "tokens"), _values(metadata, "token_type")
    model, split = _values(metadata, "model"), _split(metadata)
    if model not in ("gpt2", "llama"):
        label = model[:60] if isinstance(model, str) else "none"
        raise Unsound(
            f"has the tokenizer {label!r}, which is not read; those are gpt2 and llama", OTHER_FILE
        )
    if model == "gpt2" and split not in SPLITS:
        label = split[:60] if isinstance(split, str) else "no name"
        raise Unsound(
            f"splits text by {label!r}, which is not read; those are {', '.join(SPLITS)}",
            OTHER_FILE,
        )
    if not (isinstance(tokens, list) and tokens):
        raise Unsound("has no tokens")
    if not (isinstance(kinds, array) and len(kinds) == len(tokens)):
        raise Unsound("has no type for each of its tokens")
    required, form = ("merges", list) if model == "gpt2" else ("scores", array)
    values = _values(metadata, required)
    if not isinstance(values, form) or (form is array and len(values) != len(tokens)):
        raise Unsound(f"has no sound {required} of its tokens")
    if form is list and not all(" " in merge[1:] for merge in values):
        raise Unsound("has merges that are no pairs")
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = _values(metadata, f"{name}_token_id")
        if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
            raise Unsound(f"has a {name} token that is none of its tokens")
    ends = _values(metadata, "eos_token_ids")
    if ends is not None and not (
        isinstance(ends, array) and all(type(i) is int and 0 <= i < len(tokens) for i in ends)
    ):
        raise Unsound("has eos tokens that are none of its tokens")
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str) or len(template) > TEMPLATE:
        raise Unsound(f"has a chat template that is no text of up to {TEMPLATE} characters")
    return tokens


def _values(metadata: dict[str, Any], name: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}")


def special(metadata: dict[str, Any], name: str) -> int | None:
    """Return the number of a special token. If a SentencePiece vocabulary names none, use the default."""
    number, usual = _values(metadata, f"{name}_token_id"), USUAL.get(name)
    if number is None and usual is not None and _values(metadata, "model") == "llama":
        kinds = _values(metadata, "token_type")
        return usual if usual < len(kinds) and kinds[usual] in (UNKNOWN, CONTROL) else None
    return number


def _split(metadata: dict[str, Any]) -> Any:
    """Return the name of the pre-tokenizer; in older files without one, it follows from the architecture."""
    named = _values(metadata, "pre")
    qwen = metadata.get("general.architecture") in ("qwen2", "qwen3")
    return "qwen2" if named in (None, "default") and qwen else named


def end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Return the tokens that end a reply: those named in the file, and known control tokens that end turns."""
    tokens, kinds = _values(metadata, "tokens"), _values(metadata, "token_type")
    named = {special(metadata, name) for name in ("eos", "eot", "eom")}
    named.update(_values(metadata, "eos_token_ids") or ())  # ollama's
    control = {i for i, x in enumerate(tokens) if x in ENDS and kinds[i] in ADDED}
    return sorted(i for i in named | control if i is not None)


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from metadata checked by `vocabulary`."""
    from tokenizers import AddedToken, processors

    tokens, kinds = _values(metadata, "tokens"), _values(metadata, "token_type")
    bytes_model = _values(metadata, "model") == "gpt2"
    tokenizer = _byte_level(metadata) if bytes_model else _sentencepiece(metadata)
    added = [(x, kind) for x, kind in zip(tokens, kinds, strict=True) if x and kind in ADDED]
    tokenizer.add_tokens(
        [AddedToken(x, special=kind == CONTROL, normalized=False) for x, kind in added]
    )
    numbers = {name: special(metadata, name) for name in SPECIAL}
    first = _values(metadata, "add_bos_token")
    if first is None:
        first = not bytes_model or _split(metadata) in WHOLE
    if first and (number := numbers["bos"]) is not None:
        bos = tokens[number]
        tokenizer.post_processor = processors.TemplateProcessing(
            [bos, "$A"], [bos, "$A", "$B:1"], [(bos, number)]
        )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    about |= {SPECIAL[name]: tokens[i] for name, i in numbers.items() if i is not None}
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        about["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    """Build byte-level BPE, as in GPT-2: the merges are in the file."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _split(metadata)
    pattern = SPLITS[split]
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(False, use_regex=pattern in (GPT2, DIGITS))
    ]
    if pattern == DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pattern != GPT2:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    vocab = {token: i for i, token in enumerate(_values(metadata, "tokens"))}
    pairs = []
    for merge in _values(metadata, "merges"):
        at = merge.index(" ", 1)
        head, tail = merge[:at], merge[at + 1 :]
        if head in vocab and tail in vocab and head + tail in vocab:
            pairs.append((head, tail))
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=split in WHOLE))
    if split in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """Build BPE over characters, as in SentencePiece: merges follow from the vocabulary, best score first.

    User tokens, including runs of spaces, are matched before text is normalized and do not take part in merges.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    kinds, scores = _values(metadata, "token_type"), _values(metadata, "scores")
    tokens = _values(metadata, "tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != NORMAL or " " in token:  # texts contain no spaces when merges are applied
            continue
        for cut in range(1, len(token)):
            if (head := token[:cut]) in vocab and (tail := token[cut:]) in vocab:
                merges.append((-scores[i], vocab[head], vocab[tail], (head, tail)))
    pairs = [pair for *_, pair in sorted(merges)]
    unknown = special(metadata, "unknown")
    unknown = None if unknown is None else tokens[unknown]
    model = models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = _values(metadata, "add_space_prefix")
    if prefix is None or prefix:
        start = normalizers.Prepend("▁")
        tokenizer.normalizer = normalizers.Sequence([start, tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
