"""Model folders of somebody who means harm: configurations, indexes, tokenizers, templates, odd files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.attack._folders import Case, edit, replace, tried, whole
from experiments.attack.frame import Attempt, command
from experiments.fixtures import TINY
from mlxkv.models.catalog.folder import INDEX
from mlxkv.models.catalog.numbers import BOUNDS

RAW = "\x1b]0;owned\x07\x1b[31mred"
DEEP = {
    "lists": "[" * 100_000,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "900 objects": '{"a":' * 900 + "1" + "}" * 900,
}
NUMBERS = [0, -1, 1, 1_000_000, 1 << 31, 1 << 40, 1 << 63, 10**4000, 0.5, 1e308, True, "8", [], {}]
WORDS = ["NaN", "Infinity", "1e999", "-1e999"]
TYPES = [
    "cache",
    "base",
    "switch_layers",
    "__init__",
    "rope_utils",
    "",
    "../llama",
    "os",
    "a" * 5000,
]
TYPES += ["llama.os", "mlx_lm", RAW, "\0", "é", "llama "]
JSONS = ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
JSONS += ["special_tokens_map.json", "added_tokens.json", "vocab.json"]
WEIGHTS = "model.safetensors"
TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "product": "{{ 'a' * 10000000000 }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "format": "{{ '%09999999999d' % 1 }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "list": "{% for i in [0] * 3000000000 %}{% endfor %}",
    "only for some": "{% if messages | length > 0 %}{{ 'a' * 99999999999 }}{% endif %}",
}
NAMES = {"of another model": "fit together", "many tensors of nothing": "config.json"}
REFUSING = {
    "raises": "{{ raise_exception('" + RAW + "') }}",
    "syntax": "{% if %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "undefined": "{{ nobody.home }}",
    "zero": "{{ 1 // 0 }}",
    "import": "{% include '/etc/passwd' %}",
    "globals": "{{ cycler.__init__.__globals__.os.system('id') }}",
    "range": "{{ range(100000000) | list }}",
}


def attempts(short: bool) -> Iterator[Attempt]:
    with TemporaryDirectory() as name:
        cases = list(_cases(Path(name)))
        if short:  # every tenth of the table, and what did not hold once
            chosen = [case for case in cases if case.name in ONCE]
            cases = chosen + [case for case in cases[::10] if case not in chosen]
        yield from tried(cases)
        yield from _commands(Path(name), short)


ONCE = {
    *("config num_hidden_layers=1000000", "config vocab_size=1099511627776", "config head_dim=0"),
    *("config num_key_value_heads=0", "config num_attention_heads=0", "config sliding_window=0"),
    *("config sliding_window=-1", "config sliding_window_pattern=0", "model_type 'cache'"),
    *("config.json nested objects", "tokenizer.json nested lists", "config.json is a pipe"),
    *("model.safetensors is a pipe", "index value []", "index numbers and texts"),
    *("template nested loops", "template doubling", "template product"),
}


def _cases(base: Path) -> Iterator[Case]:
    def made(name: str, change: Callable[[Path], None], model=TINY, names="", harmless=False):
        folder = whole(base / str(len(list(base.iterdir()))), model)
        change(folder)
        return Case(name, folder, names, harmless)

    yield made("nothing wrong", lambda folder: None, harmless=True)
    for field in (*BOUNDS, "sliding_window"):
        for value in NUMBERS:
            yield made(
                f"config {field}={str(value)[:20]}",
                lambda folder, f=field, v=value: edit(folder, "config.json", **{f: v}),
                names="config",
                harmless=True,
            )
    for field in ("rope_theta", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"):
        for word in WORDS:
            yield made(
                f"config {field} {word}",
                lambda folder, f=field, w=word: _with_word(folder, f, w),
                names="config",
                harmless=field != "num_hidden_layers",
            )
    for kind in TYPES:
        yield made(
            f"model_type {kind[:20]!r}",
            lambda folder, kind=kind: edit(folder, "config.json", model_type=kind),
            names="model_type",
        )
    odd = [3, "x", [], [3], {"a": 3}, {"factor": 1e308}, {"rope_type": RAW, "factor": 2}]
    for field in ("architectures", "text_config", "rope_scaling", "quantization", "layer_types"):
        for value in odd:
            yield made(
                f"config {field}={str(value)[:20]}",
                lambda folder, f=field, v=value: edit(folder, "config.json", **{f: v}),
                names="config" if field != "architectures" else "model_type",
                harmless=True,
            )
    for value in (RAW, ["a"], 3, {"a": 1}):
        yield made(
            f"model_file {str(value)[:10]!r}",
            lambda folder, v=value: edit(folder, "config.json", model_file=v),
            names="code of its own",
        )
    yield made(
        "torch_dtype escapes",
        lambda folder: edit(folder, "config.json", torch_dtype=RAW),
        harmless=True,
    )
    for name in JSONS:
        for kind, text in DEEP.items():
            yield made(
                f"{name} nested {kind}",
                lambda folder, n=name, t=text: replace(folder, n, t),
                names=name,
            )
        for kind, text in {"half": '{"a', "not UTF-8": b"\xff\xfe", "a list": "[]"}.items():
            yield made(
                f"{name} {kind}", lambda folder, n=name, t=text: replace(folder, n, t), names=name
            )
    for name in (*JSONS, WEIGHTS, "chat_template.jinja", "tokenizer.model", "merges.txt"):
        for kind, change in ODD.items():
            yield made(
                f"{name} is {kind}",
                lambda folder, n=name, c=change: c(folder, n),
                names=name,
                # Where a file may be absent, a folder of its name is none.
                harmless=kind == "a folder" and name not in ("config.json", WEIGHTS),
            )
    for value in ([], {}, None, 3, True, RAW, "../../etc/passwd", "/etc/passwd", "a" * 5000):
        yield made(
            f"index value {str(value)[:20]}",
            lambda folder, v=value: replace(folder, INDEX, {"weight_map": {"a": v}}),
        )
    yield made(
        "index numbers and texts",
        lambda folder: replace(folder, INDEX, {"weight_map": {"a": 3, "b": "x", "c": 4}}),
        names=INDEX,
    )
    for name, data in _weights().items():
        yield made(
            f"weights {name}",
            lambda folder, data=data: replace(folder, WEIGHTS, data),
            names=NAMES.get(name, WEIGHTS),
        )
    for name, text in (TEMPLATES | REFUSING).items():
        yield made(
            f"template {name}",
            lambda folder, text=text: _with_template(folder, text),
            names="chat template",
            harmless=name in ("undefined", "zero", "recursion"),
        )
    for field in ("chat_template_type", "tool_parser_type", "tokenizer_class", "auto_map"):
        for value in (RAW, "..os", 3, [], {"a": 1}, "__init__"):
            yield made(
                f"tokenizer_config {field}={str(value)[:10]!r}",
                lambda folder, f=field, v=value: edit(folder, "tokenizer_config.json", **{f: v}),
                harmless=True,
            )
    for field in ("model", "pre_tokenizer", "decoder", "added_tokens", "normalizer", "padding"):
        for value in (3, [], {"type": RAW}, [{"id": 1 << 40, "content": "x"}]):
            yield made(
                f"tokenizer {field}={str(value)[:20]}",
                lambda folder, f=field, v=value: edit(folder, "tokenizer.json", **{f: v}),
                harmless=True,
            )


def _with_word(folder: Path, field: str, word: str) -> None:
    data = json.loads((folder / "config.json").read_text()) | {field: 12345}
    replace(folder, "config.json", json.dumps(data).replace("12345", word))


def _with_template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder, "tokenizer_config.json", chat_template=text)


def _pipe(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def _link(folder: Path, name: str, target: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


def _folder(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()


ODD = {
    "a pipe": _pipe,
    "a folder": _folder,
    "a loop": lambda folder, name: _link(folder, name, name),
    "a device": lambda folder, name: _link(folder, name, "/dev/zero"),
}


def _weights() -> dict[str, bytes]:
    def packed(head, data=b"", length=None) -> bytes:
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    def tensor(shape, offsets, dtype="F32") -> dict:
        return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

    return {
        "empty": b"",
        "header of 2^62 bytes": packed({}, length=1 << 62),
        "header nested": packed(b"[" * 200_000),
        "header a list": packed([]),
        "offsets of text": packed(tensor([1], ["0", "4"]), b"1234"),
        "offsets 1e999": packed(json.dumps(tensor([1], [0, 4])).replace("4", "1e999").encode()),
        "shape of 2^80": packed(tensor([1 << 40, 1 << 40], [0, 4]), b"1234"),
        "shape negative": packed(tensor([-1, -1], [0, 4]), b"1234"),
        "dtype escapes": packed(tensor([1], [0, 4], RAW), b"1234"),
        "promises 2^50 bytes": packed(tensor([1 << 48], [0, 1 << 50]), b"1234"),
        "of another model": packed(tensor([1], [0, 4]), b"1234"),
        "many tensors of nothing": packed(
            {str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(140_000)}
        ),
    }


def _commands(base: Path, short: bool) -> Iterator[Attempt]:
    """A few of them by the commands: what the terminal shows is one plain line."""
    odd = whole(base / "raw", TINY)
    edit(odd, "config.json", model_file=RAW)
    deep = whole(base / "deep", TINY)
    replace(deep, "config.json", DEEP["lists"])
    ran = command("chat", "--model", str(odd), "--prompt", "Hi")
    yield Attempt("chat: model_file escapes", ran.one_line, ran.note)
    if short:
        return
    for name in ("serve", "eval", "calibrate"):
        ran = command(name, "--model", str(deep))
        yield Attempt(f"{name}: config.json nested", ran.one_line, ran.note)
    sizes = ({"num_hidden_layers": 1 << 40}, {"num_attention_heads": 0, "head_dim": None})
    for changes in (*sizes, {"layer_types": [3]}, {"hidden_size": "x"}, {"text_config": [1]}):
        config = whole(base / f"fit{len(list(base.iterdir()))}", TINY)
        edit(config, "config.json", **changes)
        ran = command("fit", "--config", str(config))
        yield Attempt(f"fit: {changes}", ran.one_line or ran.code == 0, ran.note)
    for text in (DEEP["objects"], '{"model_type": "llama", "num_hidden_layers": 1e999}'):
        file = base / "config-of-fit.json"
        file.write_text(text)
        ran = command("fit", "--config", str(file))
        yield Attempt(f"fit: {text[:20]}", ran.one_line, ran.note)
