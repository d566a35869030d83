"""Chat sessions on disk: files of mlx-lm's `save_prompt_cache`, with the metadata of `formats.session`."""

from __future__ import annotations

import io
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, save_prompt_cache

from mlxkv import files
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import codes_of
from mlxkv.catalog.shapes import text_config
from mlxkv.errors import MachineError, UserError
from mlxkv.formats import session, state
from mlxkv.formats.records import NAMES
from mlxkv.formats.session import Saved
from mlxkv.patching import mlx_lm_compat
from mlxkv.patching.fold import match_fold
from mlxkv.patching.mark import register_caches
from mlxkv.patching.trees import flat, leaves


def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
    """Load a prompt cache, compressed or not, from a file of mlx-lm's `save_prompt_cache`: arguments and result are
    those of mlx-lm's function of this name, which finds our classes only once a model is attached."""
    register_caches()
    return mlx_cache.load_prompt_cache(file_name, return_metadata)


def save(name: str, saved: Saved, loaded) -> Path:
    """Write a session atomically to a private file, replacing a link. Returns its path. Raises UserError,
    MachineError."""
    if not name.strip():
        raise UserError("[/save] no file name; write /save FILE")
    if not saved.tokens:
        raise UserError("[/save] nothing to save yet: the session is empty")
    return write(session.path_for(name, "/save"), saved, loaded, "/save")


def write(path: Path, saved: Saved, loaded, where: str) -> Path:
    """Write a session or a pack, as `save` does. where: in brackets before errors."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"[{where}] no such folder; got {str(path.parent)!r}")
    try:
        with files.written(path) as file:
            write_session(file, saved, loaded)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise MachineError(
            f"[{where}] could not write {str(path)!r}: {reason}; nothing was changed"
        ) from None
    return path


def write_session(file: BinaryIO, saved: Saved, loaded) -> None:
    """Write a session to an empty file, open for writing and reading. Raises OSError, RuntimeError."""
    entries = session.entries(
        saved,
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        kv_name=loaded.kv_name,
        kv=loaded.kv,
        mlx_lm=version("mlx-lm"),
    )
    entries["trims"] = json.dumps(can_trim_prompt_cache(saved.cache))
    save_prompt_cache(file, saved.cache, entries)  # pyright: ignore[reportArgumentType]  # mlx accepts files
    session.fill_checksum(file)


def load(name: str, loaded) -> Saved:
    """Read a session for this model and preset. Raises UserError for any other file."""
    return read_session(session.file_named(name), loaded)


def read_session(path: Path, loaded, follow: bool = True) -> Saved:
    """Read a session from a file, which may be a link only if `follow`. Raises UserError."""
    head = session.read_header(path, follow)
    if path.suffix not in session.ENDINGS:
        raise head.wrong("is not a session saved by mlxkv chat")
    mlx_lm = version("mlx-lm")
    session.check_session(head, loaded.name, loaded.fingerprint, loaded.kv_name, loaded.kv, mlx_lm)
    saved = session.saved_of(head, None, text_config(loaded.config).get("vocab_size"))
    like = make_prompt_cache(loaded.model)
    if head.kinds != [type(cache).__name__ for cache in like]:  # the file chooses them
        raise head.wrong("has other caches than this model")
    try:
        with _Safetensors(io.FileIO(path)) as file:  # which MLX reads when it needs the numbers
            saved.cache = load_prompt_cache(cast(str, file))
            match_fold(loaded.model, saved.cache)
            loaded.model(mx.array([[0]]), cache=like)  # only for shapes: computes nothing
            for (_, restored), (_, fresh) in zip(leaves(saved.cache), leaves(like), strict=True):
                check_path(restored, fresh, len(saved.tokens))
            mx.eval([layer.state for layer in saved.cache])
    except UserError as error:
        raise head.wrong(f"cannot be used: {error}") from None
    except Exception as error:  # foreign files may make MLX and mlx-lm raise any error
        reason = session.printable(str(error))
        raise head.wrong(
            f"cannot be read by mlx-lm {mlx_lm} ({type(error).__name__}: {reason})"
        ) from None
    return saved


class _Safetensors(io.BufferedReader):
    """A file that MLX reads as safetensors, whatever its ending."""

    @property
    def name(self) -> str:
        return f"session{session.ENDING}"


def about(path: Path) -> tuple[list[int], bool]:
    """Return the tokens of a saved session, and whether its caches can be trimmed, from the header alone. Raises
    UserError for other files and for links."""
    head = session.read_header(path, follow=False)
    return session.tokens_of(head), head.entries.get("trims") != "false"


# -- Caches read from a file: kinds, shapes, counts and numbers.
#
# Shapes are checked first, which is free (MLX is lazy): arrays of a wrong shape are never read.


# Attributes that define an mlx-lm cache.
FIXED = ("keep", "max_size", "chunk_size", "group_size", "bits")


def check_path(cache, like, tokens: int) -> None:
    """Raise UserError or ValueError unless `cache` matches `like`, a cache after one token of this model, at `tokens`
    tokens."""
    if type(cache) is not type(like):
        raise ValueError(f"a {type(cache).__name__}, not a {type(like).__name__}")
    if getattr(cache, "offset", tokens) != tokens:
        raise ValueError(f"a cache of another number of tokens than the {tokens} of the file")
    numbers = (_compressed if isinstance(cache, CompressedKVCache) else _plain)(cache, like)
    sound = [mx.isfinite(x).all() for x in numbers if mx.issubdtype(x.dtype, mx.floating)]
    if sound and not mx.all(mx.stack(sound)).item():
        raise ValueError("numbers that are not finite")


def _compressed(cache: CompressedKVCache, like: CompressedKVCache) -> list[mx.array]:
    """Check everything but the float values; return the arrays of these, including those inside page records."""
    state.check_config(cache.config, like.config)
    assert like.recent is not None
    keys, values = like.recent
    dims, heads = (keys.shape[3], values.shape[3]), keys.shape[1]
    token = (1, heads, 1, dims[0]), (1, heads, 1, dims[1])
    tree, quantized, maps, page, bases = cache.state, cache.store, like.layer_maps, {}, {}
    runs = [] if quantized is None else getattr(quantized, "runs", [quantized])
    if any(run.count for run in runs):
        store = like.page_store(dims, keys.dtype)
        k, v = (mx.zeros((1, heads, like.config.page, dim)) for dim in dims)
        store.append((k, v), 1)
        page = store.state
    if maps is not None:
        bases = {name: (1, heads, *getattr(maps, name).down.shape[-2:]) for name in NAMES}
    state.check_shapes(tree, like.config, token, page, [run.count for run in runs], bases)
    parts = [codes_of(run) for run in runs if run.count]
    exact_arrays = {
        name: x for name, x in tree.get("pages", {}).items() if name.startswith("basis")
    }
    exact_arrays |= {name: x for name, x in tree.items() if name not in ("header", "pages")}
    exact = [x for _, x in flat(exact_arrays)]
    _check_floats(exact)
    return exact + [x for _, x in flat(parts)]


def _plain(cache, like) -> list[mx.array]:
    """Check one of mlx-lm's own caches in the same way."""
    arrays_read, expected = (dict(tree_flatten(member.state)) for member in (cache, like))
    if set(arrays_read) != set(expected):
        raise ValueError("parts of a cache missing, or too many")
    grows, arrays = hasattr(like, "offset"), []
    for name, array in expected.items():
        if type(arrays_read[name]) is not type(array):
            raise ValueError("parts of a cache of other types")
        if isinstance(array, mx.array):
            arrays.append(arrays_read[name])
            read, made = arrays[-1].shape, array.shape
            if grows:  # by tokens
                read, made = (*read[:-2], *read[-1:]), (*made[:-2], *made[-1:])
            if read != made:
                raise ValueError(f"numbers of shape {arrays[-1].shape}, not {array.shape}")
            if mx.issubdtype(array.dtype, mx.floating):
                _check_floats(arrays[-1:])
    if any(getattr(cache, name, None) != getattr(like, name, None) for name in FIXED):
        raise ValueError("a cache with other settings")
    if isinstance(getattr(like, "keys", None), mx.array) and isinstance(like.offset, int):
        rows, start = cache.keys.shape[2], getattr(cache, "start_position", 0)
        if cache.values.shape[2] != rows or not 0 <= start <= cache.offset:
            raise ValueError("keys and values of other tokens")
        size = getattr(cache, "max_size", None)
        index = None if size is None else mlx_lm_compat.ring_index(cache)
        state.check_rows(rows, cache.offset - start, getattr(cache, "keep", 0), size, index)
    return arrays


def _check_floats(arrays: list[mx.array]) -> None:
    if not all(mx.issubdtype(x.dtype, mx.floating) for x in arrays):
        raise ValueError("windows that are no floating-point numbers")
