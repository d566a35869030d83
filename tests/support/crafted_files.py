"""Session files as somebody who means harm would write them: changed, and with the right checksum."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

DEEP = 100_000  # brackets
NAMES = [
    *("nn", "os", "__builtins__", "QuantizedKVCache", "CacheList", "CompressedKVCache", ""),
    "\x1b[31mred",
]
ODD = [
    *("", "5", "null", "{}", "NaN", "[1e999]", "[-1]", "[true]", "[9999999999]"),
    *("[" * DEEP, "\x1b[31mred\x07"),
]
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I32": 4, "U32": 4, "I64": 8}
Tensor = tuple[str, list[int], bytes]


class Crafted:
    """A file taken apart. metadata: by mlx-lm's numbered names. tensors: (type, shape, bytes) by name."""

    def __init__(self, data: bytes):
        length = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + length])
        self.metadata: dict[str, str] = head.pop("__metadata__")
        self.tensors: dict[str, Tensor] = {}
        for name, one in head.items():
            first, last = (8 + length + at for at in one["data_offsets"])
            self.tensors[name] = one["dtype"], one["shape"], data[first:last]

    def head(self) -> dict:
        out, at = {"__metadata__": self.metadata | {"0.mlxkv_checksum": "0" * 64}}, 0
        for name, (kind, shape, data) in self.tensors.items():
            out[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        return out

    def file(self, head: dict | str | None = None) -> bytes:
        """The bytes of the file with these, or another, header; its checksum is right."""
        text = json.dumps(self.head() if head is None else head) if type(head) is not str else head
        data = struct.pack("<Q", len(text.encode())) + text.encode()
        data += b"".join(one[2] for one in self.tensors.values())
        return signed(data)

    def set(
        self, name: str, kind: str | None = None, shape=None, data: bytes | None = None
    ) -> None:
        old = self.tensors[name]
        new = (kind, shape, data)
        self.tensors[name] = tuple(b if a is None else a for a, b in zip(new, old, strict=True))

    def number(self, name: str, value: int) -> None:
        kind = self.tensors[name][0]
        self.set(name, data=struct.pack("<q" if kind == "I64" else "<i", value))

    def say(self, name: str, **entries) -> None:
        """Change the header of a compressed cache; None takes an entry out."""
        said = json.loads(self.tensors[name][2]) | entries
        said = {key: value for key, value in said.items() if value is not None}
        self.text(name, json.dumps(said))

    def text(self, name: str, text: str) -> None:
        self.set(name, "U8", [len(text.encode())], text.encode())


def signed(data: bytes) -> bytes:
    at = data.find(b'.mlxkv_checksum": "') + len(b'.mlxkv_checksum": "')
    if at < 40:
        return data
    whole = data[:at] + b"0" * 64 + data[at + 64 :]
    return data[:at] + hashlib.sha256(whole).hexdigest().encode() + data[at + 64 :]


Edit = Callable[[Crafted], object]
Edits = Iterator[tuple[str, Edit]]


def put(name: str, kind: str | None = None, shape=None, data: bytes | None = None) -> Edit:
    """An edit of one tensor."""
    return lambda crafted: crafted.set(name, kind, shape, data)


def entry(name: str, text: str) -> Edit:
    """An edit of one entry of the metadata."""
    return lambda crafted: crafted.metadata.update({name: text})


def cases(good: bytes, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """Yield (name, file) of everything that must not be used. every: only every so many of them."""
    edits = [*_entries(good), *_kinds(good), *_tensors(good), *_numbers(good), *_said(good)]
    made = [*_cuts(good), *_heads(good), *((name, _changed(good, edit)) for name, edit in edits)]
    for name, make in made[::every]:
        yield name, make()


Made = Iterator[tuple[str, Callable[[], bytes]]]


def _changed(good: bytes, edit: Edit) -> Callable[[], bytes]:
    def make() -> bytes:
        crafted = Crafted(good)
        edit(crafted)
        return crafted.file()

    return make


def _cuts(good: bytes) -> Made:
    for at in (0, 7, 9, len(good) // 2, len(good) - 1):
        yield f"cut to {at} bytes", lambda at=at: good[:at]
    yield "a byte more", lambda: good + b"x"
    yield "a length beyond the file", lambda: b"\xff" * 8 + good[8:]
    yield "one bit changed", lambda: good[:-9] + bytes([good[-9] ^ 4]) + good[-8:]


def _heads(good: bytes) -> Made:
    whole = Crafted(good)
    for text in ("[" * DEEP, "[]", ""):
        yield f"header: {text[:4]!r}", lambda text=text: whole.file(text)

    def tensor(kind: str, shape: list[int], offsets: list) -> dict:
        return {"dtype": kind, "shape": shape, "data_offsets": offsets}

    first, nothing = next(iter(whole.tensors)), tensor("F32", [0], [0, 0])
    for name, change in {
        "metadata is a list": {"__metadata__": [1]},
        "metadata holds numbers": {"__metadata__": whole.metadata | {"0.tokens": 5}},
        "a tensor is a list": {first: []},
        "offsets are text": {first: tensor("F32", [1], ["0", "4"])},
        "offsets go back": {first: tensor("F32", [1], [8, 4])},
        "a shape is huge": {first: tensor("F32", [1 << 40, 1 << 40], [0, 4])},
        "a type is unknown": {first: tensor("Q9", [1], [0, 4])},
        "20,000 tensors": {f"0.x{i}": nothing for i in range(20_000)},
    }.items():
        yield f"header: {name}", lambda change=change: whole.file(whole.head() | change)


def _entries(good: bytes) -> Edits:
    whole = Crafted(good).metadata
    spared = ("0.mlxkv_checksum", "0.mlxkv_version", "0.trims")
    for name in whole:
        if name.startswith("0.") and name not in spared:
            yield f"{name} is missing", lambda c, name=name: c.metadata.pop(name)
    for name in ("tokens", "messages", "kv", "raw"):
        for text in ODD:
            if (name, text) not in {("messages", "[]"), ("messages", "")} or not text:
                yield f"{name}: {text[:12]!r}", entry(f"0.{name}", text)
    tokens, kv = (json.loads(whole[f"0.{name}"]) for name in ("tokens", "kv"))
    for changed in (tokens[:-1], [*tokens, 1], [], [*tokens[:-1], 1 << 30]):
        yield f"tokens .. {changed[-2:]}", entry("0.tokens", json.dumps(changed))
    said = [{"role": "user", "content": "a", "tool_calls": "b"}]
    yield "a message with more", entry("0.messages", json.dumps(said))
    for change in ({"page": 1e300}, {"sink": kv["sink"] + 1}, {"keys": {"quantizer": {}}}):
        yield f"kv: {change}", entry("0.kv", json.dumps(kv | change))


def _kinds(good: bytes) -> Edits:
    whole = Crafted(good).metadata
    kinds = {name: kind for name, kind in whole.items() if name.startswith("1.")}
    for place in list(kinds)[:2]:
        for kind in NAMES:
            if kind != kinds[place]:
                yield f"class {kind[:20]!r} for {kinds[place]}", entry(place, kind)
    yield "a class missing", lambda c: c.metadata.pop(f"1.{len(kinds) - 1}")
    yield "a class too many", entry(f"1.{len(kinds)}", "KVCache")


def _tensors(good: bytes) -> Edits:
    whole = Crafted(good)
    seen: set[tuple] = set()
    for name, (kind, shape, data) in whole.tensors.items():
        layer, _, part = name.partition(".")
        place = (whole.metadata[f"1.{layer}"], part)
        if place in seen:
            continue
        seen.add(place)
        yield f"{place} missing", lambda c, name=name: c.tensors.pop(name)
        if len(shape) < 3:
            continue
        half = [*shape[:2], shape[2] // 2, *shape[3:]]
        if part != "asked":  # of fewer heads: they choose other tokens
            cut = data[: prod(half) * SIZES[kind]]
            yield f"{place}: half the rows", put(name, shape=half, data=cut)
        yield f"{place}: twice the batch", put(name, shape=[2, *shape[1:]], data=data * 2)
        yield f"{place}: flat", put(name, shape=(prod(shape),))
        yield f"{place}: empty", put(name, shape=[0], data=b"")
        if kind in ("F16", "F32", "BF16"):
            infinity = b"\x00\x7c" * 2 if kind == "F16" else struct.pack("<f", float("inf"))
            for what, value in (("NaN", b"\xff" * 4), ("infinity", infinity)):
                yield f"{place}: {what}", put(name, data=data[: len(data) - 4] + value)
            yield f"{place}: integers", put(name, {2: "I16", 4: "I32"}[SIZES[kind]])


def _numbers(good: bytes) -> Edits:
    """Of mlx-lm's own caches: tokens, window, place of the next token."""
    whole = Crafted(good)
    flags = [name for name in whole.metadata if name.startswith("2.") and name[2:].endswith(".0")]
    seen = set()
    for flag in flags:
        name = whole.metadata[flag]
        place = (whole.metadata[f"1.{name.partition('.')[0]}"], name.partition(".")[2])
        if place in seen:
            continue
        seen.add(place)
        _, _, data = whole.tensors[name]
        value = int.from_bytes(data, "little", signed=True)
        others = {value + 1, -1, 1 << 30}
        if place != ("RotatingKVCache", "5"):  # a ring may begin anywhere
            others |= {value - 1, 0, value * 2} - {value}
        for other in sorted(others):
            yield f"{place} is {other}", lambda c, n=name, v=other: c.number(n, v)
        yield f"{place}: two numbers", put(name, shape=[2], data=data * 2)
        yield f"{place} is called a string", entry(f"{flag[:-1]}1", "string")


def _said(good: bytes) -> Edits:
    """The headers of compressed caches."""
    whole = Crafted(good)
    name = next((name for name in whole.tensors if name.endswith(".header")), None)
    if name is None:
        return

    def say(**entries) -> Edit:
        return lambda c: c.say(name, **entries)

    said = json.loads(whole.tensors[name][2])
    for text in [*ODD, "[]", '{"version":1e999}', '{"version":' + "[" * 5000]:
        yield f"cache header: {text[:12]!r}", lambda c, text=text: c.text(name, text)
    for key in ("version", "config", "offset", "pages"):
        yield f"cache header: no {key}", say(**{key: None})
        more = said[key] + 1 if key != "config" else 7
        for value in (-1, more, 1 << 40, "a", True):
            yield f"cache header: {key} {value!r}", say(**{key: value})
    for key, value in {"sink": 1, "page": 1 << 20, "recent": 0, "keep": 0.5}.items():
        if said["config"].get(key) != value:
            yield f"cache header: {key} {value}", say(config=said["config"] | {key: value})
    yield "cache header: 2 MiB", lambda c: c.text(name, "[" + " " * (2 << 20) + "]")


def odd_files(folder: Path, name: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """What may stand in place of a file: (what, a function that puts it there)."""
    import os
    import socket

    path = folder / name

    def bind() -> None:
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)
        with socket.socket(socket.AF_UNIX) as line:
            line.bind(name[:90])
        os.fchdir(here)
        os.close(here)

    yield "a named pipe", lambda: os.mkfifo(path)
    yield "a folder", lambda: path.mkdir()
    yield "a link to itself", lambda: path.symlink_to(path)
    yield "a link to nothing", lambda: path.symlink_to(folder / "none")
    yield "a link to a device", lambda: path.symlink_to("/dev/zero")
    yield "a link to a file", lambda: path.symlink_to(__file__)
    yield "a socket", bind
    yield "an empty file", lambda: path.write_bytes(b"")
    yield "a text", lambda: path.write_text("hello")
