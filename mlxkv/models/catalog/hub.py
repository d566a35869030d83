"""Fetch from the Hugging Face hub, and turn its failures into one line that says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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


def _check_reference(repo: str) -> None:
    """Raise ValueError where the model's reference in the hub's cache is a pipe, at which the hub's library would wait
    for ever, or a folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    path = os.path.join(HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "refs", "main")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("refs/main is no file")


def _is_network(error: Exception) -> bool:
    # The HTTP library of huggingface_hub, and the class of its errors, changes with its version.
    return any(
        cls.__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
        for cls in type(error).__mro__
    )
