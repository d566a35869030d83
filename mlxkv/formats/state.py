"""What caches check, and the header of a saved one: JSON in bytes beside its tensors.

No framework is imported here: both tracks write and read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mlxkv import untrusted
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES

VERSION = 2
LONGEST = 1 << 20  # bytes of a header
PARTS = {"header", "live", "sink", "last", "pages", "basis", "asked", "rotary"}  # of a state
Shape = tuple[int, ...]
# Of caches that observe queries.
COUNTS = ("since", "dropped", "fixed", "pinned", "settled", "chunk")


def header(
    config: CacheConfig,
    offset: int,
    pages: int,
    calibration: tuple[str, str] | None = None,
    folded: bool = False,
    **extra,
) -> bytes:
    """Return the header of a cache. offset: tokens read. calibration: (digest, layer). folded: whether values are
    stored as weights that apply the value map leave them. extra: entries of a kind of cache."""
    data = {"version": VERSION, "config": config.as_dict(), "offset": offset, "pages": pages}
    if calibration is not None:
        data |= {"calibration": list(calibration), "folded": folded}
    return json.dumps(data | extra).encode()


def read_header(data: bytes) -> tuple[dict, CacheConfig]:
    """Invert `header`. Raises UserError for anything else, and for other versions."""
    try:
        out = untrusted.parse(data)
        version = untrusted.whole(out["version"], "version")
        for name in ("offset", "pages", *(name for name in COUNTS if name in out)):
            untrusted.whole(out[name], name, most=1 << 31)
    except (KeyError, TypeError, ValueError):
        raise unreadable() from None
    if version != VERSION:
        raise UserError(
            f"[CompressedKVCache] state of another format version; got {version}; "
            f"choose a file of version {VERSION}"
        )
    return out, CacheConfig.from_dict(out["config"])


def check_config(saved: CacheConfig, config: CacheConfig) -> None:
    """Raise UserError for rotary keys beside latents of other bits, ValueError for another difference between a saved
    cache and the model's own."""
    # int4, int3 and int2 stored rotary keys exactly at first.
    if (
        saved.values != config.values
        and saved.of_latents == replace(config, rotary=saved.rotary).of_latents
    ):
        raise UserError(
            f"[--kv] rotary keys of {saved.rotary} bits; got a preset that stores {config.rotary}; choose "
            f"dataclasses.replace(parse_kv(NAME), rotary={saved.rotary}) in Python"
        )
    if json.dumps(saved.as_dict()) != json.dumps(config.as_dict()):
        raise ValueError("another configuration of the cache")


def check_calibrated(config: CacheConfig, layer_maps) -> None:
    """Raise UserError for a calibrated cache without maps."""
    if config.calibrated and layer_maps is None:
        raise UserError(
            "[CompressedKVCache] this configuration needs the rotations of a calibration; got "
            "none; attach it to a model, or choose a preset without calibration"
        )


def check_batch(have: int, new: int, cache: str = "CompressedKVCache") -> None:
    """Raise UserError unless new tokens are of the batch that the cache holds."""
    if have != new:
        raise UserError(f"[{cache}] the cache holds a batch of {have}; got {new}")


def tree(header, recent, sink, pages, more: dict, last=None) -> dict:
    """Return the tree to save: header, windows (keys, values), exact tokens of the last page and state of the store,
    if present, and entries of the kind of cache."""
    out: dict = {"header": header}
    for name, pair in (("live", recent), ("sink", sink), ("last", last)):
        if pair is not None:
            out[name] = dict(zip(NAMES, pair, strict=True))
    return out | ({} if pages is None else {"pages": pages}) | more


def check_shapes(
    tree: dict,
    config: CacheConfig,
    token: tuple[Shape, Shape],
    page: dict,
    counts: Sequence[int],
    bases: dict[str, tuple[int, ...]],
) -> None:
    """Raise ValueError unless every tensor of `tree` has the shape that this configuration implies.

    token: of the keys and the values of one token, [1, G, 1, D]. page: the state of one page. counts: pages
    of each run. bases: of the basis of each side that has one.
    """
    for name in ("live", "sink", "last"):
        if (pair := window(tree, name)) is not None:
            rows = pair[0].shape[2]
            count = {"live": rows, "sink": config.sink, "last": config.page}[name]
            # With the last tokens of a prompt, or a short one as a whole.
            if name == "sink" and config.pinned:
                count = min(rows, config.sink + config.pinned)
            for x, shape in zip(pair, token, strict=True):
                check_shape(name, x, (*shape[:2], count, *shape[3:]))
    if "rotary" in tree:  # of the tokens in pages of latents
        _, (*first, _, dims) = token
        check_shape("rotary", tree["rotary"], (*first, sum(counts) * config.page, dims))
    pages = tree.get("pages", {})
    for i, count in enumerate(counts):
        if count:
            _check_pages(pages.get(f"run{i}", pages), page, count)
    if not set(tree) <= PARTS or ("last" in tree and not sum(counts)):
        raise ValueError("parts that no cache has")
    following = {name for name in NAMES if getattr(config, name).is_online}
    for sides in (tree.get("basis"), *(pages.get(f"basis{i}") for i in range(len(counts)))):
        if sides and set(sides) != following:
            raise ValueError("a basis of another side")
        for side, basis in (sides or {}).items():
            check_shape("basis", basis, bases[side])
    if "asked" in tree:  # [1, G, H / G, w, D]
        (_, heads, _, dims), queries = token[0], tree["asked"]
        check_shape("asked", queries, (1, heads, *queries.shape[2:4], dims))


def _check_pages(pages: dict, page: dict, count: int) -> None:
    if set(pages) != set(page):
        raise ValueError(f"pages of {len(pages)} parts, not {len(page)}")
    for name, part in page.items():
        if isinstance(part, dict):
            _check_pages(pages[name], part, count)
        else:
            check_shape(
                name, pages[name], (*part.shape[:2], part.shape[2] * count, *part.shape[3:])
            )
            types = [str(x.dtype) for x in (pages[name], part)]
            if types[0] != types[1] and not all("float" in name for name in types):
                raise ValueError(f"{name} of type {types[0]}")


def check_shape(name: str, x, shape: Shape) -> None:
    """Raise ValueError unless a tensor has this shape."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} of shape {tuple(x.shape)}, not {tuple(shape)}")


def check_rows(
    rows: int, offset: int, keep: int = 0, size: int | None = None, place: int | None = None
) -> None:
    """Raise ValueError unless an mlx-lm cache with `rows` rows may have read `offset` tokens.

    size: of its window, in a rotating cache, with `keep` first ones. place: of the next token.
    """
    complete = rows >= (offset if size is None else min(offset, size - 1))
    if size is None or offset <= rows:
        sound = place in (None, offset)
    else:  # a window that has moved on: a ring whose next token goes to `place`, or in order
        sound = place is not None and (keep <= place <= rows if rows == size else place == rows)
    if not complete or not sound or offset < 0:
        raise ValueError(f"{rows} tokens in a cache of {offset}")


def window(saved: dict, name: str):
    """(keys, values) of a window in `tree`, or None."""
    return (saved[name]["keys"], saved[name]["values"]) if name in saved else None


def unreadable() -> UserError:
    return UserError(
        "[CompressedKVCache] not the state of a compressed cache; got no readable header"
    )


def cut(error: Exception) -> UserError:
    """Return the UserError for a state whose tensors do not match its header."""
    return UserError(f"[CompressedKVCache] a state with parts missing or cut ({error})")


def calibration_of(data: dict) -> tuple[str, str]:
    """(digest, layer) of a calibrated cache. Raises UserError."""
    match data.get("calibration"):
        case [str(digest), str(layer)]:
            return digest, layer
    raise UserError("[CompressedKVCache] a state that names no calibration; got a calibrated cache")
