"""Publish a calibration on the Hugging Face hub: the file under its standard name, and a card that says
which model it is for and how to use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxkv.console import human_bytes, note
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.models.calibration.fitting import FILE
from mlxkv.models.catalog.aliases import HUB, REPO
from mlxkv.models.catalog.hub import Words, faults

CARD = "README.md"
MARK = "<!-- written by mlxkv calibrate --push-to-hub -->"  # cards with it may be replaced


def check(repo: str | None, private: bool) -> None:
    """Raises UserError before the work for options that publishing would refuse after it."""
    if repo is None:
        if private:
            raise UserError("[--private] nothing is published; got no --push-to-hub OWNER/NAME")
        return
    if not REPO.fullmatch(repo):
        raise UserError(f"[--push-to-hub] not a name on the hub; got {repo!r}; write OWNER/NAME")
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError(
            "[--push-to-hub] the hub needs a token that may write; got none; run `hf auth login`, or "
            "set HF_TOKEN"
        )


def publish(made: Calibration, kept: Path, repo: str, private: bool) -> None:
    """Upload `made` to `repo`, which is created if need be, and print what was sent.

    kept: the file on this machine, which is not changed. A card that somebody else wrote is kept.
    Raises UserError or MachineError.
    """
    from huggingface_hub import HfApi

    api, made = HfApi(), public(made)
    words = Words(
        "--push-to-hub",
        "the hub knows no such owner, or your token may not write there",
        "the hub cannot be reached",
        f"nothing is lost: the calibration is in {kept}",
        "uploading failed",
    )
    with faults(repo, words), TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        artifact.write(file, made)
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo).private:  # an older, public repository
            raise UserError(
                f"[--private] this repository is public; got {repo}; choose another name, or leave "
                "--private out"
            )
        size = human_bytes(file.stat().st_size)
        sent = {"path_or_fileobj": file, "path_in_repo": FILE, "repo_id": repo}
        api.upload_file(**sent, commit_message=f"Calibration of {made.model} for mlxkv")
        others = api.file_exists(repo, CARD) and MARK not in _read(api.hf_hub_download(repo, CARD))
        if not others:
            text = card(made, repo).encode()
            sent = {"path_or_fileobj": text, "path_in_repo": CARD, "repo_id": repo}
            api.upload_file(**sent, commit_message="Card")
    note(f"published in {url}: {FILE}, {size}, digest {made.digest}")
    note(f"  it says: model {made.model}, {made.tokens} tokens of {made.text}")
    note(f"  {CARD}: {'not ours, left as it is' if others else 'written'}")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


def public(made: Calibration) -> Calibration:
    """`made` without folders of this machine in the names of its model and text."""
    names = [Path(name).name for name in made.text.split(", ")]
    local = made.model not in HUB and Path(made.model).expanduser().exists()
    model = Path(made.model).expanduser().resolve().name if local else made.model
    return replace(made, model=model, text=", ".join(names))


def card(made: Calibration, repo: str) -> str:
    """The text of the card in a repository with this calibration."""
    base = HUB.get(made.model, made.model if REPO.fullmatch(made.model) else None)
    front = ["library_name: mlx", "tags: [mlx, mlxkv, kv-cache]"]
    front = "\n".join([*front, f"base_model: {base}"] if base else front)
    rows = {
        "model": made.model,
        "kind of model": made.model_type,
        "fingerprint": made.fingerprint,
        "layers": len(made.layers),
        "eigenvectors of": made.target,
        "parts of the rotations": made.parts,
        "rotations": "one per layer" if made.per_layer else "one per kv head",
        "balanced transforms": "yes" if made.balanced else "no",
        "calibrated on": f"{made.tokens} tokens of {made.text}",
        "digest of the rotations": made.digest,
        "made by": f"mlxkv {made.version}",
    }
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items())
    centred = made.balanced and all(layer.keys.mean is not None for layer in made.layers.values())
    kv = "fill-2.25" if centred else "oscar-int2"
    return f"""---
{front}
---
{MARK}

# Calibration of {_cell(made.model)} for mlxkv

Rotations of keys and values (OSCAR, arXiv 2605.17757), and balanced transforms if the table says
so. With them mlxkv keeps the KV cache of this model in 2 to 4 bits per value. They fit only weights
with this fingerprint; mlxkv checks it.

| | |
|---|---|
{table}

## Use

    mlxkv chat --model {made.model} --kv {kv} --calibration {repo}

```python
from mlxkv.models import load

loaded = load("{made.model}", kv="{kv}", calibration="{repo}")
```
"""


def _cell(value: object) -> str:
    """`value` as text that cannot break a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
