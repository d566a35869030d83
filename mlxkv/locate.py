"""Where a model's config.json and weights lie: embedded, a local folder, the hub's cache or the hub.

No framework is imported here, and no weights are read: `fit` and `models` need names and sizes only.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

from mlxkv.errors import UserError
from mlxkv.models.aliases import resolve


@dataclass(frozen=True)
class Place:
    """A model that was found. `weights`: bytes of its weights, None when only config.json is known."""

    name: str
    config: Path
    weights: int | None


def hub_cache() -> dict[str, int]:
    """Models in the hub's cache folder with their size on disk in bytes."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # half-loaded repositories are no concern of ours
            repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return {}
    sizes = {repo.repo_id: repo.size_on_disk for repo in repos if repo.repo_type == "model"}
    return dict(sorted(sizes.items()))


def locate(model: str) -> Place:
    """Finds a model by alias, embedded name, folder or hub name."""
    source = resolve(model)
    if source.folder is not None:
        return _local(source.name, source.folder)
    return _hub(source.repo)


def _local(name: str, folder: Path) -> Place:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Place(name, folder / "config.json", weights or None)


def _hub(name: str) -> Place:
    """The hub's cache first; a download of config.json and the index (kilobytes) if need be."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if isinstance(config, str):
        place = _local(name, Path(config).parent)
        if place.weights:
            return place
    config = _download(name, "config.json")
    try:
        index = json.loads(_download(name, "model.safetensors.index.json").read_bytes())
        weights = int(index["metadata"]["total_size"])
    except (UserError, ValueError, KeyError, TypeError):
        weights = None  # a small model has one file and no index
    return Place(name, config, weights)


def _download(name: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except RepositoryNotFoundError:
        raise UserError(
            f"[--model] no such model on the hub (or it asks for a login: hf auth login); got {name!r}"
        ) from None
    except EntryNotFoundError:
        raise UserError(f"[--model] {name} has no {file} on the hub") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"[--model] cannot reach the hub for {name} ({type(error).__name__}); "
            "go online once, or pass --config config.json or a local folder"
        ) from None
