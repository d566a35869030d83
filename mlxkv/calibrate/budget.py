"""`mlxkv calibrate --budget`: measure what each preset costs in each layer, and find a plan.

Bits by direction are on no menu: the layers of a model share their bits, so what they cost in one layer alone, and the
bits that they take there, are not those of a plan. They are a plan themselves, and the plan that is found is compared
with those of as many bits.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlxkv import files
from mlxkv.calibrate.options import CalibrateOptions
from mlxkv.console import note, print_json, print_table, say, user_path
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.lowrank import RATES
from mlxkv.formats.names import FILL, canonical, parse_preset
from mlxkv.formats.plans import greedy
from mlxkv.formats.plans.plan import Part, Plan
from mlxkv.models import attach, detach
from mlxkv.models.calibration.fitting import known
from mlxkv.models.calibration.measure import WINDOW as CALIBRATION_WINDOW
from mlxkv.models.calibration.measure import bos_of, calibrate, progress_bar
from mlxkv.models.calibration.sensitivity import WINDOW, Sensitivity, alone, kept_path
from mlxkv.models.loader import Loaded
from mlxkv.texts.sources import Text

MENU = "fp16,int8,int4,int3,int2"
EXACT = "fp16"
APART = 4  # one window in so many is kept apart, to measure the plan on
FEWEST = 2  # windows


@dataclass(frozen=True)
class Found:
    """A plan with its figures. menu: what was measured, by layer and preset. predicted: the sum of what its
    layers cost alone. kl: mean divergence of each window that was kept apart, by name: of the plan, of presets
    in all layers, of an even mix. bits: per value, by the same names."""

    plan: Plan
    menu: greedy.Menu
    predicted: float
    kl: Mapping[str, np.ndarray]
    bits: Mapping[str, float]


def check(options: CalibrateOptions) -> None:
    """Raises UserError for settings of --budget that do not go together."""
    for name, value in (("--menu", options.menu), ("--plan", options.plan)):
        if value is not None and options.budget is None:
            raise UserError(f"[{name}] is for a plan; got {value}; add --budget 3.0")
    if options.budget is None:
        return
    if not 0 < options.budget <= 16:
        raise UserError(
            f"[--budget] must be bits per value, above 0 and up to 16; got {options.budget:g}; choose 3.0"
        )
    for option, given in (
        ("--search-clip", options.search_clip),
        ("--learn", options.learn is not None),
        ("--push-to-hub", options.push_to_hub is not None),
    ):
        if given:
            raise UserError(
                f"[--budget] got {options.budget:g} with {option}; leave one of them out"
            )
    of_menu(options.menu)
    if options.plan and not options.plan.endswith(".json"):
        raise UserError(f"[--plan] must end in .json; got {options.plan}; choose plan.json")


def of_menu(text: str | None) -> dict[str, CacheConfig]:
    """The presets to choose from, by name. Raises UserError."""
    names = dict.fromkeys(canonical(name) for name in (text or MENU).split(","))
    found = {name: parse_preset(name) for name in names}
    if len(found) < 2 or not any(config.compresses for config in found.values()):
        raise UserError(f"[--menu] needs two presets or more; got {text}; choose such as {MENU}")
    if shared := [name for name, config in found.items() if config.filled]:
        raise UserError(
            f"[--menu] {shared[0]} shares its bits between all layers, so no layer of it has a price of its own; got "
            f"{text}; choose presets such as {MENU}, or --kv {shared[0]} without a plan"
        )
    if part := [name for name, config in found.items() if config.read < 1]:
        raise UserError(
            f"[--menu] {part[0]} reads a share of the pages when it decodes, and here texts are read as prompts are; "
            f"got {text}; choose presets such as {MENU}, and write +read behind those of the plan"
        )
    if late := [name for name, config in found.items() if config.window >= WINDOW // 2]:
        raise UserError(
            f"[--menu] {late[0]} keeps {found[late[0]].window} tokens exact, all of the prompts that are "
            f"read; choose presets that keep fewer than {WINDOW // 2}"
        )
    return found


def run_budget(
    options: CalibrateOptions, loaded: Loaded, text: Text, made: Calibration | None
) -> None:
    """Find a plan, store it in the calibration, print it. made: the calibration of --calibration, or None."""
    start = time.perf_counter()
    presets = of_menu(options.menu)
    made = made or calibration_for(loaded, text, presets)
    found = find(loaded, made, presets, options.budget, split(loaded, text))
    path = user_path(options.out, "--out") if options.out else artifact.kept_path(made.fingerprint)
    made = replace(made, plan=found.plan.spec, path=None)
    artifact.write(path, made)
    if options.plan:
        write(user_path(options.plan, "--plan"), found.plan)
    report(found, options, path, time.perf_counter() - start)


def calibration_for(loaded: Loaded, text: Text, presets: Mapping[str, CacheConfig]) -> Calibration:
    """The model's own calibration where it serves the presets, else one of this text."""
    found = known(loaded.model)
    if found is not None and all(found.serves(config) for config in presets.values()):
        return found
    with progress_bar(len(text.tokens)) as progress:
        return calibrate(
            loaded.model,
            text.tokens,
            text=text.name,
            window=min(CALIBRATION_WINDOW, loaded.context or CALIBRATION_WINDOW),
            bos=bos_of(loaded.tokenizer),
            progress=progress,
        )


def split(loaded: Loaded, text: Text) -> tuple[list[list[int]], list[list[int]]]:
    """Windows to search on, and windows kept apart. Raises UserError for too little text."""
    bos = bos_of(loaded.tokenizer)
    lead = [] if bos is None else [bos]
    size = min(WINDOW, loaded.context or WINDOW) - len(lead)
    starts = range(0, len(text.tokens) - size + 1, size)
    every = [[*lead, *text.tokens[i : i + size]] for i in starts]
    if len(every) < FEWEST:
        raise UserError(
            f"[--tokens] too little text for a plan; got {len(text.tokens)} tokens; choose {FEWEST * WINDOW} "
            "or more"
        )
    apart = max(1, len(every) // APART)
    return every[:-apart], every[-apart:]


def find(
    loaded: Loaded,
    made: Calibration,
    presets: Mapping[str, CacheConfig],
    budget: float,
    windows: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
) -> Found:
    """Measure each preset in each layer alone, choose, and measure the choice on windows kept apart.

    Raises UserError where nothing can be compressed, and for a budget below the cheapest presets.
    """
    search, apart = windows
    options = _options(loaded, made, presets)
    exact = parse_preset(EXACT)
    arms = {
        f"{name} in layer {layer}": alone(layer, name, presets[name], exact)
        for layer, own in options.items()
        for name in own
        if presets[name].compresses
    }
    size, kept = len(search[0]), kept_path(loaded.model, len(search[0]))
    with progress_bar(len(arms) * size * len(search), "measuring layers") as progress:
        one = Sensitivity(loaded.model, search, made, kept, progress)
        found = {name: float(kl.mean()) for name, kl in one.measure(arms).items()}
    menu = {
        layer: {
            name: greedy.Option(found.get(f"{name} in layer {layer}", 0.0), bits, values)
            for name, (bits, values) in own.items()
        }
        for layer, own in options.items()
    }
    chosen = greedy.allocate(menu, budget)
    parts = {i: Part(name, presets[name]) for i, name in chosen.items()}
    plan = as_plan(parts, exact)
    compared, bits = {"plan": plan}, {"plan": greedy.mean_bits(menu, chosen)}
    mix = greedy.evenly(menu, budget)
    if mix is not None and len(set(mix.values())) > 1:
        name = "even mix of " + " and ".join(dict.fromkeys(mix.values()))
        compared[name] = as_plan({i: Part(n, presets[n]) for i, n in mix.items()}, exact)
        bits[name] = greedy.mean_bits(menu, mix)
    for name, config in presets.items():
        own = {i: name for i in menu if name in menu[i]}
        if config.compresses and len(own) == len(menu):
            compared[name], bits[name] = config, greedy.mean_bits(menu, own)
    name, own = _directions(loaded, made, budget)
    if own.keys() == menu.keys():  # else some layers stay in full precision under it
        compared[name] = parse_preset(name)
        bits[name] = sum(b * n for b, n in own.values()) / sum(n for _, n in own.values())
    with progress_bar(len(compared) * size * len(apart), "measuring plans") as progress:
        kl = Sensitivity(loaded.model, apart, made, kept, progress).measure(compared)
    return Found(plan, menu, greedy.predicted(menu, chosen), kl, bits)


def as_plan(parts: Mapping[int, Part], exact: CacheConfig) -> Plan:
    """A plan of these layers, whose most frequent preset is the default."""
    names = [part.name for part in parts.values()]
    usual = max(dict.fromkeys(names), key=names.count)
    default = next((part for part in parts.values() if part.name == usual), Part(EXACT, exact))
    return Plan.of(default, parts)


def _options(
    loaded: Loaded, made: Calibration, presets: Mapping[str, CacheConfig]
) -> dict[int, dict[str, tuple[float, int]]]:
    """By layer that can be compressed: bits per value of each preset that it takes, and its values a token."""
    out: dict[int, dict[str, tuple[float, int]]] = {}
    for name, config in presets.items():
        if not config.compresses:
            continue
        for layer, taken in _taken(loaded, made, config).items():
            out.setdefault(layer, {})[name] = taken
    if not out:
        raise UserError("[--budget] this model has nothing to compress; got no layer that grows")
    for own in out.values():
        values = next(iter(own.values()))[1]
        own |= {name: (16.0, values) for name, one in presets.items() if not one.compresses}
    return out


def _taken(
    loaded: Loaded, made: Calibration | None, config: CacheConfig
) -> dict[int, tuple[float, int]]:
    """Bits per value that `config` takes in each layer that it compresses, and the layer's values a token."""
    try:
        reports = attach(loaded.model, config, calibration=made if config.calibrated else None)
    finally:
        detach(loaded.model)
    return {
        r.index: (r.bits_per_value, r.kv_heads * (r.key_dim + r.value_dim))
        for r in reports
        if r.compressed
    }


def _directions(
    loaded: Loaded, made: Calibration | None, budget: float
) -> tuple[str, dict[int, tuple[float, int]]]:
    """The preset of bits by direction that takes `budget` bits a value, and what it takes as `_taken` says it: nothing
    where there is no such preset, or the calibration or the model does not serve it."""
    name = f"{FILL}-{budget:g}"
    if made is None or not RATES[0] <= budget <= RATES[1]:
        return name, {}
    config = parse_preset(name)
    if not made.serves(config) or config.window >= WINDOW // 2:
        return name, {}
    with warnings.catch_warnings():  # of models that it compresses nothing of
        warnings.simplefilter("ignore")
        try:
            return name, _taken(loaded, made, config)
        except UserError:  # too few bits for heads of few dims
            return name, {}


def write(path: Path, plan: Plan) -> None:
    """Write a plan file. Raises MachineError."""
    try:
        with files.written(path) as file:
            file.write((json.dumps(plan.spec, indent=2) + "\n").encode())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MachineError(f"[--plan] could not write {path}: {reason}") from None


def verdict(found: Found) -> str:
    """Whether the plan is better than what takes no more bytes, on text that it was not found on."""
    own, bits = float(found.kl["plan"].mean()), found.bits["plan"]
    rivals = {
        name: float(kl.mean())
        for name, kl in found.kl.items()
        if name != "plan" and found.bits[name] <= bits + 0.01
    }
    if not rivals:
        return "nothing else here takes as few bytes"
    best = min(rivals, key=rivals.__getitem__)
    if own < rivals[best]:
        return f"at no more bytes the next best is {best}: {rivals[best] / own:.2f} times the divergence"
    if found.plan.layers == () and found.plan.default.name == best:
        return f"the plan is {best} in every layer: nothing else was better within the budget"
    return (
        f"the plan does NOT win: {best} takes {found.bits[best]:.2f} bits and has "
        f"{rivals[best] / own:.2f} of its divergence; use that"
    )


def report(found: Found, options: CalibrateOptions, path: Path, seconds: float) -> None:
    """Print the plan, what was measured, and how it compares; with --json one document."""
    names = list(dict.fromkeys(name for own in found.menu.values() for name in own))
    compared = [
        {"name": name, "bits_per_value": round(found.bits[name], 4), "kl": kl.tolist()}
        for name, kl in found.kl.items()
    ]
    if options.json:
        menu = {
            str(i): {n: {"kl": o.kl, "bits_per_value": o.bits} for n, o in own.items()}
            for i, own in found.menu.items()
        }
        print_json(
            {
                "budget": options.budget,
                "plan": found.plan.spec,
                "bits_per_value": round(found.bits["plan"], 4),
                "predicted_kl": found.predicted,
                "compared": compared,
                "verdict": verdict(found),
                "sensitivity": menu,
                "path": str(path),
                "seconds": round(seconds, 1),
            }
        )
        return
    rows = [
        [
            i,
            found.plan.name_at(i),
            *(f"{own[n].kl:.3g}" if n in own else "-" for n in names if n != EXACT),
        ]
        for i, own in found.menu.items()
    ]
    columns = ["layer", "plan", *(f"KL {name}" for name in names if name != EXACT)]
    print_table(columns, rows, "what each preset costs alone, nats a token")
    rows = [
        [
            row["name"],
            f"{row['bits_per_value']:.2f}",
            f"{found.predicted:.3g}" if row["name"] == "plan" else "",
            f"{np.mean(row['kl']):.3g}",
        ]
        for row in sorted(compared, key=lambda row: row["bits_per_value"])
    ]
    windows = len(found.kl["plan"])
    print_table(
        ["cache", "bits/value", "KL predicted", "KL measured"],
        rows,
        f"measured on {windows} windows of {WINDOW} tokens that were kept apart",
    )
    say(verdict(found))
    say(json.dumps(found.plan.spec))
    say(f"{path}: {seconds:.0f} s; use it by --kv {path}")
    if windows < 5:
        note(f"{windows} windows are too few for an interval; --tokens reads more")
