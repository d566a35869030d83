"""Calibrations and weights with something wrong in them: headers, numbers, escapes, pipes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import load_file, save

from experiments.attack._folders import Case, replace, tried, whole
from experiments.attack.frame import Attempt, command
from experiments.fixtures import QWEN, TINY
from mlxkv.console import one_line
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import Basis
from mlxkv.formats.calibration.balance import Balance

RAW = "\x1b]0;owned\x07\x1b[31mred"
FILE = Path(QWEN) / "mlxkv-calibration.safetensors"
WEIGHTS = "model.safetensors"
VALUES = ["x", RAW, -1, 0.5, True, None, [], {}, 1 << 70, 10**4000]
WORDS = ["1e999", "NaN", "Infinity", "-1e999"]


def attempts(short: bool) -> Iterator[Attempt]:
    with TemporaryDirectory() as name:
        base = Path(name)
        for i, (what, write) in enumerate(_calibrations()):
            if short and i % 4 and "floored" not in what:
                continue
            file = base / f"{i}.safetensors"
            write(file)
            yield _read(what, file)
        yield from _commands(base, short)
        yield from tried(_weights(base, short))


def _read(what: str, file: Path) -> Attempt:
    """A file, read in this process: one line that names it."""
    try:
        artifact.read(file)
    except UserError as error:
        line = str(error)
        held = (
            what != "nothing wrong"
            and line.startswith(f"[calibration] {file}")
            and len(line) < 1000
        )
        return Attempt(f"calibration: {what}", held, one_line(error)[:160])
    except Exception as error:
        return Attempt(f"calibration: {what}", False, one_line(repr(error))[:160])
    return Attempt(f"calibration: {what}", what == "nothing wrong", "it was read")


def _parts() -> tuple[dict, dict]:
    """Header and tensors of a calibration of one layer, with small maps of no meaning."""
    rng = np.random.default_rng(3)
    sides = {}
    for side in artifact.SIDES:
        vectors, _ = np.linalg.qr(rng.standard_normal((2, 16, 16)))
        values = np.sort(rng.random((2, 16)), 1).astype(np.float32) + np.float32(0.1)
        down = np.broadcast_to(np.eye(16, dtype=np.float32), (2, 16, 16)).copy()
        sides[side] = Basis(values, vectors.astype(np.float32), 0, {}, Balance(down, values, 0))
    about = ("f" * 16, "some", "llama", "attention", "uhp", False, 9, "text", "d")
    made = artifact.Calibration(*about, {"3": artifact.Layer(2, **sides)})
    return made.header(), made._tensors()


def _calibrations() -> Iterator[tuple[str, Callable[[Path], object]]]:
    header, tensors = _parts()
    layer = next(iter(header["layers"]))
    text = json.dumps(header)
    data = save(tensors, {"mlxkv": text})
    yield "nothing wrong", lambda file: file.write_bytes(data)

    def with_text(new: str) -> Callable[[Path], object]:
        return lambda file: file.write_bytes(save(tensors, {"mlxkv": new}))

    def with_tensors(**changes) -> Callable[[Path], object]:
        kept = {name: x for name, x in (tensors | changes).items() if x is not None}
        return lambda file: file.write_bytes(save(kept, {"mlxkv": text}))

    for field in header:
        for value in VALUES:
            if type(value) is not type(header[field]) or field in ("format", "digest"):
                yield f"{field}={str(value)[:10]!r}", with_text(json.dumps(header | {field: value}))
        for word in WORDS:
            changed = json.dumps(header | {field: "@"}).replace('"@"', word)
            yield f"{field} {word}", with_text(changed)
        left = {name: value for name, value in header.items() if name != field}
        yield f"{field} missing", with_text(json.dumps(left))
    for field in ("floored", "lacking", "kv_heads", "clips"):
        for value in (*VALUES, [RAW, RAW], [{RAW: 2}, {}], [{"int2 g64": 2}, {}], [-1, 0]):
            layers = header["layers"] | {layer: header["layers"][layer] | {field: value}}
            if field == "clips" and value in (None, [], {}):
                continue  # none were searched
            if field == "lacking" and not value:
                continue  # no balanced transform
            changed = json.dumps(header | {"layers": layers})
            yield f"{field} of a layer={str(value)[:10]!r}", with_text(changed)
        for word in WORDS:
            layers = header["layers"] | {layer: header["layers"][layer] | {field: ["@", "@"]}}
            changed = json.dumps(header | {"layers": layers}).replace('"@"', word)
            yield f"{field} of a layer {word}", with_text(changed)
    for name, new in {
        "nested lists": "[" * 100_000,
        "nested objects": '{"a":' * 100_000,
        "a list": "[]",
        "half": text[: len(text) // 2],
        "empty": "",
        "NUL": "\0",
        "names of layers": text.replace(f'"{layer}": ', f'"{RAW}": '.replace("\x1b", "\\u001b")),
    }.items():
        yield f"header {name}", with_text(new.replace("\x07", "\\u0007"))
    first = next(iter(tensors))
    for name, x in {
        "missing": None,
        "NaN": np.full_like(tensors[first], np.nan),
        "half": tensors[first][:, : tensors[first].shape[1] // 2],
        "of integers": tensors[first].astype(np.int32),
        "of no dims": np.array(3, np.float32),
        "empty": tensors[first][:0],
        "zeros": np.zeros_like(tensors[first]),
    }.items():
        yield f"{first} {name}", with_tensors(**{first: x})
    for cut in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        yield f"{cut} bytes", lambda file, cut=cut: file.write_bytes(data[:cut])
    yield "bytes too many", lambda file: file.write_bytes(data + b"x")
    yield "a pipe", os.mkfifo
    yield "a folder in its place", lambda file: (file / artifact.NAME).mkdir(parents=True)
    yield "a loop of links", lambda file: file.symlink_to(file.name)
    yield "a device", lambda file: file.symlink_to("/dev/zero")
    yield "2 GB without contents", _sparse
    yield "not there", lambda file: None


def _sparse(file: Path) -> None:
    size = 2 << 30
    head = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        out.truncate(8 + len(head) + size)


def _commands(base: Path, short: bool) -> Iterator[Attempt]:
    """By the command: what the terminal shows."""
    header, tensors = _parts()
    header |= {"model": RAW, "fingerprint": RAW}
    file = base / "raw.safetensors"
    file.write_bytes(save(tensors, {"mlxkv": json.dumps(header)}))
    pipe = base / "pipe.safetensors"
    os.mkfifo(pipe)
    chat = ("chat", "--model", QWEN, "--kv", "oscar-int2", "--prompt", "Hi")
    for name, path in {"escapes in the model's name": file, "a pipe": pipe}.items():
        ran = command(*chat, "--calibration", str(path))
        yield Attempt(f"chat --calibration: {name}", ran.one_line, ran.note)
        if short:
            return


def _weights(base: Path, short: bool) -> Iterator[Case]:
    """Weights whose numbers are wrong; headers are the part of `hostile_model`."""
    source = Path(TINY) / WEIGHTS
    weights = load_file(source)
    name = "model.layers.3.mlp.down_proj.weight"
    assert name in weights
    for what, value in {"NaN": np.nan, "infinity": np.inf}.items():
        folder = whole(base / f"weights {what}")
        weights[name] = weights[name].copy()
        weights[name][3, 5] = value
        replace(folder, WEIGHTS, save(weights, {"format": "mlx"}))
        yield Case(f"weights: {what}", folder, "weights hold NaN")
    if short:
        return
    folder = whole(base / "calibration beside the weights", QWEN)
    os.mkfifo(folder / FILE.name)
    yield Case("a pipe as the calibration beside the weights", folder, FILE.name)
