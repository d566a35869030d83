"""The identity of a model: a hash over its configuration, its tokenizer and some bytes of every tensor."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from mlxkv.models.catalog.folder import TOKENIZER_FILES, Folder

PIECES, PIECE = 1 << 14, 1 << 12  # of all tensors together, at least one each; bytes of one
MOST = 16  # pieces of one tensor


def fingerprint(folder: Folder) -> str:
    """16 hex digits that identify a model; .1 s to 2 s for any size.

    Hashed: the configuration, the tokenizer, and of every tensor its name, type, shape and up to 16 pieces of
    4 KiB, evenly spread, both ends among them; 64 MiB of a large model. Of a GGUF file all of its header stands
    for configuration and tokenizer. Names of files and how tensors are dealt to them do not count. A model that
    differs between the pieces only is not told apart: this tells models apart that were made apart, it is no seal.
    """
    digest = hashlib.sha256(_configuration(folder))
    digest.update(b"plain")
    for file in filter(Path.is_file, (folder.path / name for name in TOKENIZER_FILES)):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while part := stream.read(1 << 20):
                digest.update(part)
    tensors = sorted(
        (name, i, tensor)
        for i, header in enumerate(folder.headers)
        for name, tensor in header.tensors.items()
    )
    pieces = max(1, min(MOST, PIECES // max(1, len(tensors))))
    streams = [os.open(file, os.O_RDONLY) for file in folder.weights]
    try:
        for name, i, tensor in tensors:
            digest.update(f"{name!r} {tensor.dtype} {tensor.shape}\n".encode())
            for start, size in _pieces(*tensor.span, pieces):
                digest.update(os.pread(streams[i], size, start))
    finally:
        for stream in streams:
            os.close(stream)
    return digest.hexdigest()[:16]


def _configuration(folder: Folder) -> bytes:
    if folder.is_gguf:
        with folder.path.open("rb") as stream:
            return stream.read(folder.headers[0].start)
    return json.dumps(folder.config, sort_keys=True).encode()


def _pieces(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """(start, bytes) of `count` pieces between two places, or of all that lies between if that is no more."""
    if last - first <= count * PIECE:
        return [(first, last - first)]
    if count == 1:
        return [((first + last - PIECE) // 2, PIECE)]
    span = last - first - PIECE
    return [(first + span * i // (count - 1), PIECE) for i in range(count)]
