"""Run `mlxkv calibrate`: fit transforms to a model, search clips or learn maps, and write the result to a
file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxkv.calibrate.options import CalibrateOptions
from mlxkv.calibration import clips
from mlxkv.calibration.fitting import read_calibration
from mlxkv.calibration.learn import Outcomes, learn, steps
from mlxkv.calibration.measure import LEAST, WINDOW, on_text
from mlxkv.calibration.moments import Sample
from mlxkv.console import human_bytes, note, print_table, progress, say, say_whole, user_path
from mlxkv.corpora.sources import Text, calibration_tokens, start_of
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import SIDES, Calibration
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.loading.load import load
from mlxkv.patching.mark import origin_of

SEARCHED = "oscar-int2"
LEARNED_COLUMNS = ["layer", "srft K", "error K", "gain K", "srft V", "error V", "gain V"]


def run_calibrate(options: CalibrateOptions) -> None:
    """Read text, write the file, print a report."""
    check_options(options)  # before a model is loaded
    if options.learn is not None:
        run_learning(options)
    else:
        run_fitting(options)


def run_fitting(options: CalibrateOptions) -> None:
    """Fit rotations and balanced transforms, or read them from a file, then search clips if requested."""
    base = read_calibration(options.calibration) if options.calibration else None
    out = options.out and user_path(options.out, "--out")
    loaded = load(options.model, "fp16", dtype=options.dtype, adapter_path=options.adapter_path)
    origin = origin_of(loaded.model)
    assert origin is not None  # `load` has set it
    try:
        first = artifact.find(loaded.fingerprint, origin.folder)
    except UserError:  # a damaged file, which this run may replace
        first = None
    found = None if first is None else first.path
    comes_with_model = found is not None and origin.folder in found.parents
    if comes_with_model and out is None:
        note(
            f"{loaded.name} comes with {found}, which commands use before the new file; name that one by "
            "--calibration"
        )
    text = _read(loaded, options)
    start = time.perf_counter()
    calibration = base or on_text(loaded.model, loaded, text)
    path = out or artifact.kept_path(calibration.fingerprint)
    calibration, trials = _with_kept_clips(calibration, path), {}
    if searched := searched_presets(options):
        reading = {"window": min(WINDOW, loaded.context or WINDOW), "start": start_of(loaded)}
        with progress("searching clips", len(text.tokens) * len(searched)) as told:
            for name, config in searched.items():
                calibration, trials[name] = clips.search(
                    loaded.model, calibration, config, text.tokens, progress=told, **reading
                )
    seconds = time.perf_counter() - start
    artifact.write_calibration(path, calibration)
    report(calibration, path, seconds, trials)
    advice = "" if loaded.dtype == mx.float32 else "; --dtype float32 may reach further"
    artifact.tell_reach(replace(calibration, path=path), loaded.context, advice)
    named = "" if out is None and not comes_with_model else f" --calibration {path}"
    say_whole(f"use it: mlxkv chat -m {options.model.strip()} --kv fill-3{named}")


def run_learning(options: CalibrateOptions) -> None:
    """Learn maps from the keys and values of the text (--learn)."""
    out = options.out and user_path(options.out, "--out")
    loaded = load(options.model, "fp16", dtype=options.dtype, adapter_path=options.adapter_path)
    text = _read(loaded, options)
    start = time.perf_counter()
    samples: dict[str, Sample] = {}
    calibration = on_text(loaded.model, loaded, text, samples=samples)
    learned = Learned(**options.learning)
    with progress("learning", steps(calibration, learned)) as told:
        calibration, outcomes = learn(calibration, samples, learned, told)
    path = out or learned_path(calibration.fingerprint)
    artifact.write_calibration(path, calibration)
    report_learned(calibration, path, time.perf_counter() - start, outcomes)


def _read(loaded, options: CalibrateOptions) -> Text:
    files = [user_path(name, "--text") for name in options.text or ()]
    text = calibration_tokens(loaded, options.tokens, files)
    if LEAST <= len(text.tokens) < options.tokens:
        note(f"{text.name} has {len(text.tokens)} tokens, fewer than {options.tokens}")
    return text


def learned_path(fingerprint: str) -> Path:
    """Return the path of learned maps: next to the user's own calibration of the model, which is kept."""
    return artifact.kept_path(fingerprint, "-learned")


def searched_presets(options: CalibrateOptions) -> dict[str, CacheConfig]:
    """Return the presets for which clips are searched, by name."""
    names = [name.strip() for name in (options.kv or SEARCHED).split(",")]
    return {name: parse_kv(name) for name in names} if options.search_clip else {}


def check_options(options: CalibrateOptions) -> None:
    """Raise UserError for incompatible settings."""
    _check_learning(options)
    for option, value in (("--kv", options.kv), ("--calibration", options.calibration)):
        if value is not None and not options.search_clip:
            raise UserError(
                f"[{option}] is for --search-clip; got {value}; leave it out: one calibration serves every preset"
            )
    for name, config in searched_presets(options).items():
        if reason := clips.why_not(config):
            raise UserError(f"[--kv] got {name}; {reason}")
    if options.tokens < LEAST:
        raise UserError(f"[--tokens] too little text; got {options.tokens}; choose {LEAST} or more")


def _check_learning(options: CalibrateOptions) -> None:
    if options.learn is None:
        if options.learning:
            name, value = next(iter(options.learning.items()))
            raise UserError(f"[--{name}] is for learned transforms; got {value}; add --learn scale")
        return
    Learned(**options.learning).check()
    if options.search_clip:
        raise UserError(
            f"[--learn] got {options.learn} with --search-clip, which is for other transforms; leave "
            "one of them out"
        )


def _with_kept_clips(calibration: Calibration, path: Path) -> Calibration:
    """Return `calibration` with the clips of the file it replaces, if the transforms are equal."""
    try:
        old = artifact.read_calibration(path)
    except UserError:  # missing or damaged
        return calibration
    if old.fingerprint != calibration.fingerprint:
        return calibration
    calibration, dropped = calibration.with_clips_of(old)
    if dropped:
        note(f"{path} had clips for other rotations; they are gone")
    return calibration


def report(
    calibration: Calibration, path: Path, seconds: float, trials: dict[str, dict[str, clips.Trial]]
) -> None:
    """Print the path of the file and the tried clips."""
    layers = calibration.layers.values()
    if floored := sum(getattr(layer, side).floored for layer in layers for side in SIDES):
        note(
            f"{floored} eigenvalues are below float32 resolution: raised to it, directions are free"
        )
    size = path.stat().st_size
    say(
        f"{path}: {calibration.tokens} tokens of {calibration.text}, {human_bytes(size)}, {seconds:.1f} s, digest "
        f"{calibration.digest}"
    )
    for kv, outcomes in trials.items():
        _report_clips(kv, outcomes)


def _report_clips(kv: str, outcomes: dict[str, clips.Trial]) -> None:
    """Print the preset's clip and the chosen one per layer and side, with their errors."""
    rows = []
    choices = {side: clips.choose(outcomes, side) for side in SIDES}
    for name, trial in outcomes.items():
        row = [name]
        for side in SIDES:
            if not (errors := trial.errors(side)):
                row += ["kept", ""]
                continue
            usual, best = next(iter(errors)), choices[side][name]  # the preset's own is tried first
            row += [f"{usual:g} -> {best:g}", f"{errors[usual]:.2g} -> {errors[best]:.2g}"]
        rows.append(row)
    print_table(("layer", "clip K", "error", "clip V", "error"), rows, f"{kv}: clips")
    say("error: of the attention output, relative energy, one side stored and the other exact")


def report_learned(
    calibration: Calibration, path: Path, seconds: float, outcomes: Outcomes
) -> None:
    """Print a row per layer and the path of the file."""
    cells = []
    for name, sides in outcomes.items():
        numbers = (
            (outcome.held_srft, outcome.held, outcome.held_gain) for outcome in sides.values()
        )
        cells.append([name, *(f"{x:.4g}" for three in numbers for x in three)])
    learned = calibration.learned
    assert learned is not None
    title = f"{calibration.model}: {learned.label}, {learned.quantizer.label}, {learned.rows} rows a head"
    print_table(LEARNED_COLUMNS, cells, title)
    say(
        "error: of codes, relative energy, on rows that nothing was learned from; srft: random SRFT"
    )
    say(f"{path}: {human_bytes(path.stat().st_size)}, {seconds:.1f} s, digest {calibration.digest}")
    say_whole(f"use it: --kv learned-int{learned.bits} --calibration {path}")
