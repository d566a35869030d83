"""Run `mlxkv calibrate`: fit transforms to a model, or learn maps, and write the result to a file."""

from __future__ import annotations

import time
from pathlib import Path

from mlxkv.calibrate.options import CalibrateOptions
from mlxkv.console import human_bytes, note, print_json, print_table, say, user_path
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import SIDES, Calibration
from mlxkv.formats.calibration.learned import Learned
from mlxkv.models import load
from mlxkv.models.calibration.learn import Outcomes, learn, steps
from mlxkv.models.calibration.measure import LEAST, on_text, progress_bar
from mlxkv.models.calibration.moments import Sample
from mlxkv.texts.sources import Text, calibration_tokens

LEARNED_COLUMNS = ["layer", "srft K", "error K", "gain K", "srft V", "error V", "gain V"]


def run(options: CalibrateOptions) -> None:
    """Read text, write the file, print a report."""
    check(options)  # before a model is loaded
    if options.learn is not None:
        run_learning(options)
    else:
        run_fitting(options)


def run_fitting(options: CalibrateOptions) -> None:
    """Fit rotations and balanced transforms."""
    out = options.out and user_path(options.out, "--out")
    loaded = load(options.model, "fp16", dtype=options.dtype)
    try:
        first = artifact.find(loaded.fingerprint, loaded.path)
    except UserError:  # a damaged one, which this may be made to replace
        first = None
    comes_with_model = first is not None and loaded.path in first.path.parents
    if comes_with_model and out is None:
        note(
            f"{loaded.name} comes with {first.path}, which commands use before the new file; name that one by "
            "--calibration"
        )
    text = _read(loaded, options)
    start = time.perf_counter()
    calibration = on_text(loaded.model, loaded, text)
    path = out or artifact.kept_path(calibration.fingerprint)
    seconds = time.perf_counter() - start
    artifact.write(path, calibration)
    report(calibration, path, seconds, options.json)
    if not options.json:
        named = "" if out is None and not comes_with_model else f" --calibration {path}"
        say(f"use it: mlxkv chat -m {options.model.strip()} --kv fill-3{named}")


def run_learning(options: CalibrateOptions) -> None:
    """Learn maps from the keys and values of the text (--learn)."""
    out = options.out and user_path(options.out, "--out")
    loaded = load(options.model, "fp16", dtype=options.dtype)
    text = _read(loaded, options)
    start = time.perf_counter()
    samples: dict[str, Sample] = {}
    calibration = on_text(loaded.model, loaded, text, samples=samples)
    learned = Learned(**options.learning)
    with progress_bar(steps(calibration, learned), "learning") as progress:
        calibration, outcomes = learn(calibration, samples, learned, progress)
    path = out or learned_path(calibration.fingerprint)
    artifact.write(path, calibration)
    report_learned(calibration, path, time.perf_counter() - start, outcomes, options.json)


def _read(loaded, options: CalibrateOptions) -> Text:
    files = [user_path(name, "--text") for name in options.text or ()]
    text = calibration_tokens(loaded, options.tokens, files)
    if LEAST <= len(text.tokens) < options.tokens:
        note(f"{text.name} has {len(text.tokens)} tokens, fewer than {options.tokens}")
    return text


def learned_path(fingerprint: str) -> Path:
    """Return where learned maps are kept: beside the user's own calibration of the model, which stays."""
    return artifact.kept_path(fingerprint, "-learned")


def check(options: CalibrateOptions) -> None:
    """Raises UserError for settings that do not go together."""
    if options.learn is not None:
        Learned(**options.learning).check()
    elif options.learning:
        name, value = next(iter(options.learning.items()))
        raise UserError(f"[--{name}] is for learned transforms; got {value}; add --learn scale")
    if options.tokens < LEAST:
        raise UserError(f"[--tokens] too little text; got {options.tokens}; choose {LEAST} or more")


def report(
    calibration: Calibration,
    path: Path,
    seconds: float,
    as_json: bool,
) -> None:
    """Print where the file is; with --json one document that has a row per layer."""
    rows = []
    for name, layer in calibration.layers.items():
        sides = {side: getattr(layer, side) for side in SIDES}
        rows.append(
            {
                "layer": name,
                "kv_heads": layer.kv_heads,
                "dims": [basis.values.shape[1] for basis in sides.values()],
                "condition": {side: basis.condition for side, basis in sides.items()},
                "floored": {side: basis.floored for side, basis in sides.items()},
                "balanced": {
                    side: basis.balance and basis.balance.condition for side, basis in sides.items()
                },
            }
        )
    size = path.stat().st_size
    if floored := sum(sum(row["floored"].values()) for row in rows):
        note(
            f"{floored} eigenvalues are below float32 resolution: raised to it, directions are free"
        )
    if as_json:
        about = {k: v for k, v in calibration.header().items() if k != "layers"}
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
    say(
        f"{path}: {calibration.tokens} tokens of {calibration.text}, {human_bytes(size)}, {seconds:.1f} s, digest "
        f"{calibration.digest}"
    )


def report_learned(
    calibration: Calibration, path: Path, seconds: float, outcomes: Outcomes, as_json: bool
) -> None:
    """Print a row per layer and where the file is; with --json one document."""
    if as_json:
        about = {k: v for k, v in calibration.header().items() if k != "layers"}
        rows = [
            {
                "layer": name,
                **{side: vars(outcome) | {"gain": outcome.gain} for side, outcome in sides.items()},
            }
            for name, sides in outcomes.items()
        ]
        about_file = {"path": str(path), "bytes": path.stat().st_size, "seconds": round(seconds, 3)}
        print_json({**about, **about_file, "layers": rows})
        return
    cells = []
    for name, sides in outcomes.items():
        numbers = (
            (outcome.held_srft, outcome.held, outcome.held_gain) for outcome in sides.values()
        )
        cells.append([name, *(f"{x:.4g}" for three in numbers for x in three)])
    learned = calibration.learned
    title = (
        f"{calibration.model}: {learned.label}, {learned.spec.label}, {learned.rows} rows a head"
    )
    print_table(LEARNED_COLUMNS, cells, title)
    print(
        "error: of codes, relative energy, on rows that nothing was learned from; srft: random SRFT"
    )
    say(f"{path}: {human_bytes(path.stat().st_size)}, {seconds:.1f} s, digest {calibration.digest}")
    say(f"use it: --kv learned-int{learned.bits} --calibration {path}")
