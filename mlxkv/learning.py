"""`mlxkv calibrate --learn`: scales and rotations that Adam fits to the codes, kept in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlxkv import artifact
from mlxkv.artifact import SIDES, Calibration
from mlxkv.calibrate import LEAST, WINDOW, Sample, bos_of, calibrate, progress_bar
from mlxkv.config import parse_kv
from mlxkv.console import human_bytes, note, print_json, print_table
from mlxkv.eval.texts import Text, calibration_tokens
from mlxkv.learn import Outcomes, learn, steps
from mlxkv.learned import Learned
from mlxkv.models import load

if TYPE_CHECKING:
    from mlxkv.calibrating import Options

COLUMNS = (
    "layer",
    *(f"{x} {side[0].upper()}" for side in SIDES for x in ("srft", "error", "gain")),
)


def run(options: Options) -> None:
    """Read text, learn, write the file, show what came out. `calibrating.check` has passed."""
    loaded = load(options.model, "fp16", dtype=options.dtype)
    files = [Path(name).expanduser() for name in options.text]
    text = calibration_tokens(loaded, options.tokens, files)
    if LEAST <= len(text.tokens) < options.tokens:
        note(f"{text.name} has {len(text.tokens)} tokens, fewer than {options.tokens}")
    start = time.perf_counter()
    made, samples = read(loaded, text, options.per_layer)
    learned = Learned(**options.settings)
    with progress_bar(steps(made, learned), "learning") as progress:
        made, outcomes = learn(made, samples, learned, progress)
    path = Path(options.out).expanduser() if options.out else kept_path(made.fingerprint)
    artifact.write(path, made)
    report(made, path, time.perf_counter() - start, outcomes, options.json)


def read(loaded, text: Text, per_layer: bool = False) -> tuple[Calibration, dict[str, Sample]]:
    """The usual calibration, and the sample of each layer that the same pass kept."""
    samples: dict[str, Sample] = {}
    with progress_bar(len(text.tokens)) as progress:
        made = calibrate(
            loaded.model,
            text.tokens,
            text=text.name,
            per_layer=per_layer,
            window=min(WINDOW, loaded.context or WINDOW),
            bos=bos_of(loaded.tokenizer),
            progress=progress,
            samples=samples,
        )
    return made, samples


def kept_path(fingerprint: str) -> Path:
    """Beside the user's own calibration of the model, which stays what it is."""
    return artifact.folder() / f"{fingerprint}-learned.safetensors"


def report(
    made: Calibration, path: Path, seconds: float, outcomes: Outcomes, as_json: bool
) -> None:
    """A row per layer, and where the file is; with --json one document."""
    if as_json:
        about = {k: v for k, v in made.header().items() if k != "layers"}
        rows = [
            {"layer": name, **{side: vars(one) | {"gain": one.gain} for side, one in sides.items()}}
            for name, sides in outcomes.items()
        ]
        said = {"path": str(path), "bytes": path.stat().st_size, "seconds": round(seconds, 3)}
        print_json({**about, **said, "layers": rows})
        return
    cells = []
    for name, sides in outcomes.items():
        numbers = ((one.held_srft, one.held, one.held_gain) for one in sides.values())
        cells.append([name, *(f"{x:.4g}" for three in numbers for x in three)])
    learned = made.learned
    title = f"{made.model}: {learned.label}, {learned.spec.label}, {learned.rows} rows a head"
    print_table(COLUMNS, cells, title)
    print(
        "error: of codes, relative energy, on rows that nothing was learned from; srft: random SRFT"
    )
    print(f"{path}: {human_bytes(path.stat().st_size)}, {seconds:.1f} s, digest {made.digest}")
    preset = f"learned-int{learned.bits}"
    if (own := parse_kv(preset).keys.quantizer.group) != learned.group:
        note(f"{preset} has groups of {own}; these maps were learned for groups of {learned.group}")
    print(f"use it: --kv {preset} --calibration {path}")
