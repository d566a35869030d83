"""Fetch from the Hugging Face hub, and turn its failures into one line that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxkv.errors import MachineError, UserError

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


@dataclass(frozen=True)
class Words:
    """The words of error lines. where: in brackets. absent, offline, failed: what is wrong. way_out: what
    else to do."""

    where: str
    absent: str
    offline: str
    way_out: str
    failed: str = "fetching failed"


MODEL = Words(
    "load",
    "no such folder here and no such model on the hub",
    "the hub cannot be reached and this model is not on this machine",
    "choose a model folder on this machine, or run mlxkv models get smollm2, which needs no hub",
)


def fetch(repo: str, patterns: list[str] = PATTERNS) -> Path:
    """Return the local folder of `owner/name` with the files that match `patterns`, downloading them if
    they are not there.

    Raises UserError if the hub cannot be reached or refuses the model, MachineError if the disk is
    full.
    """
    from huggingface_hub import snapshot_download

    with faults(repo, MODEL):
        return Path(snapshot_download(repo, allow_patterns=patterns))


def fetch_file(repo: str, name: str, words: Words) -> Path:
    """Return the path of one file of `owner/name`, downloading it if it is not there. Raises as `fetch`."""
    from huggingface_hub import hf_hub_download

    with faults(repo, words, name):
        return Path(hf_hub_download(repo, name))


@contextmanager
def faults(repo: str, words: Words, file: str = "the file") -> Iterator[None]:
    """Raise faults of the hub, the network and the disk as UserError or MachineError, one line each."""
    import huggingface_hub.errors as hub

    where, way_out = words.where, words.way_out
    try:
        yield
    except hub.GatedRepoError:
        raise UserError(
            f"[{where}] the hub asks you to accept a licence first; got {repo}; "
            f"accept it at https://huggingface.co/{repo}, then run `hf auth login`"
        ) from None
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError):
        raise UserError(
            f"[{where}] {words.absent}; got {repo!r}; check the name, or run `hf auth login` if it is "
            f"private; {way_out}"
        ) from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        raise UserError(
            f"[{where}] {words.offline}; got {repo}; check the network (is HF_HUB_OFFLINE set?), or "
            f"{way_out}"
        ) from None
    except hub.EntryNotFoundError:
        raise UserError(f"[{where}] {repo} on the hub has no {file}; got none; {way_out}") from None
    except hub.HfHubHTTPError as error:
        raise UserError(
            f"[{where}] the hub refused ({first_line(error)}); got {repo}; try again, or {way_out}"
        ) from None
    except OSError as error:
        if error.errno in FULL_DISK:
            raise MachineError(
                f"[{where}] the disk is full; got {repo}; free some space and run it again"
            ) from None
        raise UserError(
            f"[{where}] {words.failed} ({first_line(error)}); got {repo}; try again, or {way_out}"
        ) from None
    except Exception as error:
        if not _is_network(error):
            raise
        raise UserError(
            f"[{where}] the hub cannot be reached ({type(error).__name__}); got {repo}; check the "
            f"network, or {way_out}"
        ) from None


def _is_network(error: Exception) -> bool:
    # The HTTP library of huggingface_hub, and the class of its errors, changes with its version.
    return any(
        cls.__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
        for cls in type(error).__mro__
    )


def first_line(error: Exception) -> str:
    """The first line of an error, or its class, at most 120 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
