"""`mlxkv calibrate`: the rotations of the oscar presets, fitted to a model and kept in a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mlxkv import artifact, publishing, rotation
from mlxkv.artifact import SIDES, Calibration
from mlxkv.calibrate import (
    LEAST,
    TARGETS,
    TOKENS,
    WINDOW,
    WITHOUT_TEXT,
    bos_of,
    calibrate,
    passes,
    progress_bar,
)
from mlxkv.console import human_bytes, note, print_json, print_table
from mlxkv.errors import UserError
from mlxkv.eval.texts import Text, calibration_tokens
from mlxkv.models import load

COLUMNS = ("layer", "kv heads", "dims", "condition K", "condition V", "floored", "seconds")


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    model: str = "tiny"
    text: tuple[str, ...] = ()
    tokens: int = TOKENS
    per_layer: bool = False
    target: str = "attention"
    parts: str = rotation.PARTS
    out: str | None = None
    dtype: str | None = None
    json: bool = False
    push_to_hub: str | None = None
    private: bool = False


def run(options: Options) -> None:
    """Read text, write the file, show what came out."""
    check(options)  # before a model is loaded
    publishing.check(options.push_to_hub, options.private)
    loaded = load(options.model, "fp16", dtype=options.dtype)
    text = Text("none", [])
    if options.target not in WITHOUT_TEXT:
        files = [Path(name).expanduser() for name in options.text]
        text = calibration_tokens(loaded, options.tokens, files)
        if LEAST <= len(text.tokens) < options.tokens:
            note(f"{text.name} has {len(text.tokens)} tokens, fewer than {options.tokens}")
    timing: dict[str, float] = {}
    start = time.perf_counter()
    with progress_bar(len(text.tokens) * passes(options.target)) as progress:
        made = calibrate(
            loaded.model,
            text.tokens,
            text=text.name,
            target=options.target,
            parts=options.parts,
            per_layer=options.per_layer,
            window=min(WINDOW, loaded.context or WINDOW),
            bos=bos_of(loaded.tokenizer),
            progress=progress,
            timing=timing,
        )
    seconds = time.perf_counter() - start
    path = Path(options.out).expanduser() if options.out else artifact.kept_path(made.fingerprint)
    artifact.write(path, made)
    report(made, path, seconds, timing, options.json)
    if options.push_to_hub is not None:
        publishing.publish(made, path, options.push_to_hub, options.private)
    used = artifact.find(made.fingerprint, loaded.path)
    if options.out is None and used.path != path:
        note(
            f"{loaded.name} came with {used.path}, which goes first; use this one by --calibration"
        )


def check(options: Options) -> None:
    """Raises UserError for settings that do not go together."""
    if options.target not in TARGETS:
        choices = ", ".join(TARGETS)
        raise UserError(f"[--target] unknown; got {options.target!r}; choose from {choices}")
    usual = (options.target, options.parts, options.per_layer) == ("attention", "uhp", False)
    if options.out is None and not usual:
        raise UserError(
            "[calibrate] an ablation is not kept as the model's own calibration; got no -o; name a "
            "file with -o FILE"
        )
    if options.tokens < LEAST:
        raise UserError(f"[--tokens] too little text; got {options.tokens}; choose {LEAST} or more")


def report(
    made: Calibration, path: Path, seconds: float, timing: dict[str, float], as_json: bool
) -> None:
    """A row per layer, and where the file is; with --json one document."""
    rows = []
    for name, layer in made.layers.items():
        sides = {side: getattr(layer, side) for side in SIDES}
        rows.append(
            {
                "layer": name,
                "kv_heads": layer.kv_heads,
                "dims": [basis.values.shape[1] for basis in sides.values()],
                "condition": {side: basis.condition for side, basis in sides.items()},
                "floored": {side: basis.floored for side, basis in sides.items()},
                "seconds": round(timing[name], 4),
            }
        )
    size = path.stat().st_size
    if floored := sum(sum(row["floored"].values()) for row in rows):
        note(
            f"{floored} eigenvalues are below float32 resolution: raised to it, directions are free"
        )
    if as_json:
        about = {k: v for k, v in made.header().items() if k != "layers"}
        print_json(
            {
                **about,
                "path": str(path),
                "bytes": size,
                "seconds": round(seconds, 3),
                "layers": rows,
            }
        )
        return
    cells = [
        [
            row["layer"],
            row["kv_heads"],
            " / ".join(map(str, dict.fromkeys(row["dims"]))),
            *(f"{row['condition'][side]:.3g}" for side in SIDES),
            sum(row["floored"].values()),
            f"{row['seconds']:.2f}",
        ]
        for row in rows
    ]
    shared = "per layer" if made.per_layer else "per kv head"
    title = f"{made.model}: {made.tokens} tokens of {made.text}, target {made.target}, {shared}"
    print_table(COLUMNS, cells, title)
    print(f"{path}: {human_bytes(size)}, {seconds:.1f} s, digest {made.digest}")
    print("condition: largest over smallest eigenvalue, the worst kv head")
