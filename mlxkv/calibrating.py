"""`mlxkv calibrate`: the transforms of the oscar and balanced presets, and with --search-clip their
clips, fitted to a model and kept in a file. --learn goes on in `mlxkv.learning`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mlxkv import artifact, clips, publishing, rotation
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
from mlxkv.config import CacheConfig, parse_kv
from mlxkv.console import human_bytes, note, print_json, print_table
from mlxkv.errors import UserError
from mlxkv.eval.texts import Text, calibration_tokens
from mlxkv.learned import Learned
from mlxkv.models import load
from mlxkv.models.calibrations import given

SEARCHED = "oscar-int2"
COLUMNS = (
    *("layer", "kv heads", "dims", "condition K", "condition V", "floored"),
    *("balanced K", "balanced V", "seconds"),
)


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
    search_clip: bool = False
    kv: str | None = None
    calibration: str | None = None
    learn: str | None = None
    base: str | None = None
    bits: int | None = None
    group: int | None = None
    steps: int | None = None

    @property
    def searched(self) -> dict[str, CacheConfig]:
        """The presets for which clips are searched."""
        names = [name.strip() for name in (self.kv or SEARCHED).split(",")]
        return {name: parse_kv(name) for name in names} if self.search_clip else {}

    @property
    def settings(self) -> dict[str, str | int]:
        """What was said of learned transforms."""
        said = {"variant": self.learn, "base": self.base, "bits": self.bits, "group": self.group}
        return {k: v for k, v in {**said, "steps": self.steps}.items() if v is not None}


def run(options: Options) -> None:
    """Read text, write the file, show what came out."""
    check(options)  # before a model is loaded
    publishing.check(options.push_to_hub, options.private)
    if options.learn is not None:
        from mlxkv import learning

        learning.run(options)
        return
    chosen = given(options.calibration) if options.calibration else None
    _insist_on_file(options, chosen or options)
    loaded = load(options.model, "fp16", dtype=options.dtype)
    text = Text("none", [])
    fits = options.target not in WITHOUT_TEXT  # rotations to the text, not only clips
    if fits or options.search_clip:
        files = [Path(name).expanduser() for name in options.text]
        text = calibration_tokens(loaded, options.tokens, files)
        if LEAST <= len(text.tokens) < options.tokens:
            note(f"{text.name} has {len(text.tokens)} tokens, fewer than {options.tokens}")
    timing: dict[str, float] = {}
    start = time.perf_counter()
    reading = {
        "window": min(WINDOW, loaded.context or WINDOW),
        "bos": bos_of(loaded.tokenizer),
    }
    turns = len(options.searched) + (0 if chosen else passes(options.target))
    trials = {}
    with progress_bar(len(text.tokens) * turns) as progress:
        made = chosen or calibrate(
            loaded.model,
            text.tokens if fits else (),
            text=text.name if fits else "none",
            target=options.target,
            parts=options.parts,
            per_layer=options.per_layer,
            progress=progress,
            timing=timing,
            **reading,
        )
        path = Path(options.out or artifact.kept_path(made.fingerprint)).expanduser()
        made = _with_kept_clips(made, path)
        for name, config in options.searched.items():
            made, trials[name] = clips.search(
                loaded.model, made, config, text.tokens, progress=progress, **reading
            )
    seconds = time.perf_counter() - start
    artifact.write(path, made)
    report(made, path, seconds, timing, trials, options.json)
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
    _check_learning(options)
    for option, value in (("--kv", options.kv), ("--calibration", options.calibration)):
        if value is not None and not options.search_clip:
            raise UserError(f"[{option}] is for a search of clips; got {value}; add --search-clip")
    for name, config in options.searched.items():
        if reason := clips.why_not(config):
            raise UserError(f"[--kv] got {name}; {reason}")
    if options.tokens < LEAST:
        raise UserError(f"[--tokens] too little text; got {options.tokens}; choose {LEAST} or more")


def _check_learning(options: Options) -> None:
    if options.learn is None:
        if options.settings:
            name, got = next(iter(options.settings.items()))
            raise UserError(f"[--{name}] is for learned transforms; got {got}; add --learn scale")
        return
    Learned(**options.settings).check()
    for option, is_usual in (
        ("--target", options.target == "attention"),
        ("--parts", options.parts == rotation.PARTS),
        ("--search-clip", not options.search_clip),
        ("--push-to-hub", options.push_to_hub is None),
    ):
        if not is_usual:
            raise UserError(
                f"[--learn] got {options.learn} with {option}, which is for other transforms; leave "
                "one of them out"
            )


def _insist_on_file(options: Options, made: Options | Calibration) -> None:
    usual = (made.target, made.parts, made.per_layer) == ("attention", "uhp", False)
    if options.out is None and not usual:
        raise UserError(
            "[calibrate] an ablation is not kept as the model's own calibration; got no -o; name a "
            "file with -o FILE"
        )


def _with_kept_clips(made: Calibration, path: Path) -> Calibration:
    """`made`, with the clips of the file that it replaces where the transforms are the same."""
    try:
        old = artifact.read(path)
    except UserError:  # not there, or not worth keeping
        return made
    if (old.fingerprint, old.parts) != (made.fingerprint, made.parts):
        return made
    made, lost = made.with_clips_of(old)
    if lost:
        note(f"{path} had clips for other rotations; they are gone")
    return made


def report(
    made: Calibration,
    path: Path,
    seconds: float,
    timing: dict[str, float],
    trials: dict[str, dict[str, clips.Trial]],
    as_json: bool,
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
                "balanced": {
                    side: basis.balance and basis.balance.condition for side, basis in sides.items()
                },
                "seconds": round(timing.get(name, 0.0), 4),
                "clips": {side: dict(basis.clips) for side, basis in sides.items()},
                "clip_errors": {kv: found[name].by_side() for kv, found in trials.items()},
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
            *("-" if x is None else f"{x:.3g}" for x in row["balanced"].values()),
            f"{row['seconds']:.2f}",
        ]
        for row in rows
    ]
    shared = "per layer" if made.per_layer else "per kv head"
    for kv, found in trials.items():
        _report_clips(kv, found)
    title = f"{made.model}: {made.tokens} tokens of {made.text}, target {made.target}, {shared}"
    print_table(COLUMNS, cells, title)
    print(f"{path}: {human_bytes(size)}, {seconds:.1f} s, digest {made.digest}")
    print("condition: largest over smallest eigenvalue, the worst kv head; balanced: largest over")
    print("smallest singular value of the balanced transform")


def _report_clips(kv: str, found: dict[str, clips.Trial]) -> None:
    """Per layer and side the clip of the preset and the one that was chosen, with their errors."""
    rows = []
    chosen = {side: clips.choose(found, side) for side in SIDES}
    for name, trial in found.items():
        row = [name]
        for side in SIDES:
            if not (errors := trial.errors(side)):
                row += ["kept", ""]
                continue
            own, best = next(iter(errors)), chosen[side][name]  # the preset's own is tried first
            row += [f"{own:g} -> {best:g}", f"{errors[own]:.2g} -> {errors[best]:.2g}"]
        rows.append(row)
    print_table(("layer", "clip K", "error", "clip V", "error"), rows, f"{kv}: clips")
    print("error: of the attention output, relative energy, one side stored and the other exact")
