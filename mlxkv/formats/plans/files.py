"""Read plans: `plan.json`, mlx-optiq's `kv_config.json`, and calibrations that carry one.

    {"version": 1, "default": "int4", "layers": {"0": "fp16", "5-9": "int2", "11,13": "int3"}}
    ["fp16", "int4", "int4", "int2"]                           a preset for every layer, in order
    [{"layer_idx": 0, "bits": 8, "group_size": 64}, ...]       as mlx-optiq 0.7 writes it

Without "default", layers that are not named stay in full precision. Of mlx-optiq's file, layers that it does
not name stay in full precision, too, as there; widths become the presets of `WIDTHS`, which have their own
groups: `group_size` is not taken over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlxkv import untrusted
from mlxkv.console import user_path
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.plans.plan import MOST, VERSION, Part, Plan
from mlxkv.untrusted import Unsound

Parse = Callable[[str], CacheConfig]  # the name of a preset; raises UserError
ENDINGS = (".json", ".safetensors")
LARGEST = 1 << 20  # bytes of a plan
WHERE = "--kv"
EXACT = "fp16"
# Widths of mlx-optiq's kv_config.json, which stores min-max codes in groups: ours of the same width.
WIDTHS = {0: EXACT, 2: "int2", 3: "int3", 4: "int4", 8: "int8", 16: EXACT}
KEYS = ("version", "default", "layers", "note")
LAYERS = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")
EXAMPLE = '{"version": 1, "default": "int4", "layers": {"0": "fp16", "5-9": "int2"}}'


def is_plan(text: str) -> bool:
    """Whether `--kv TEXT` names a file: a plan, or a calibration that carries one."""
    return text.strip().lower().endswith(ENDINGS)


def read(text: str, parse: Parse) -> Plan:
    """Read the plan in the file that `--kv TEXT` names. parse: reads the name of a preset. Raises UserError."""
    path = user_path(text.strip(), WHERE)
    if path.suffix.lower() == ".safetensors":
        return _carried(path, parse)
    try:
        data = untrusted.read_json(path, LARGEST)
    except FileNotFoundError:
        raise UserError(f"[{WHERE}] no such plan; got {text.strip()!r}; write {EXAMPLE}") from None
    except Unsound as error:
        raise UserError(f"[{WHERE}] {path.name} {error}; write {EXAMPLE}") from None
    return parsed(data, path.name, parse)


def _carried(path: Path, parse: Parse) -> Plan:
    """The plan that a calibration carries."""
    try:
        head = untrusted.parse(untrusted.safetensors(path).metadata["mlxkv"])
        data = head["plan"]
    except FileNotFoundError:
        raise UserError(f"[{WHERE}] no such calibration; got {str(path)!r}") from None
    except (KeyError, TypeError):
        raise UserError(
            f"[{WHERE}] {path.name} carries no plan; make one with mlxkv calibrate --budget 3.0 -o FILE"
        ) from None
    except Unsound as error:
        raise UserError(f"[{WHERE}] {path.name} {error}") from None
    return parsed(data, path.name, parse, path)


def parsed(data: Any, label: str, parse: Parse, calibration: Path | None = None) -> Plan:
    """The plan in `data`, as a file or `load(kv={...})` holds it. label: its name in reports and errors.
    Raises UserError."""
    more: dict[str, Any] = {"label": label, "calibration": calibration}
    named = _Names(label, parse)
    if isinstance(data, list):
        if not 0 < len(data) <= MOST:
            raise _wrong(label, f"is a list of {len(data)} layers", f"choose 1 to {MOST}")
        if isinstance(data[0], dict):
            return Plan.of(named(EXACT), _optiq(data, named, label), **more)
        parts = {i: named(one) for i, one in enumerate(data)}
        names = [part.name for part in parts.values()]
        usual = max(dict.fromkeys(names), key=names.count)
        return Plan.of(named(usual), parts, count=len(parts), **more)
    if not isinstance(data, Mapping):
        raise _wrong(label, "is neither an object nor a list", f"write {EXAMPLE}")
    if unknown := [str(key)[:40] for key in data if key not in KEYS]:
        raise _wrong(label, f"has an unknown entry; got {unknown[0]!r}", f"write {EXAMPLE}")
    if type(version := data.get("version", VERSION)) is not int or version != VERSION:
        raise _wrong(label, f"has version {str(version)[:20]}", f"this version reads {VERSION}")
    layers = data.get("layers", {})
    if not isinstance(layers, Mapping) or not ("default" in data or layers):
        raise _wrong(label, "names no layers", f"write {EXAMPLE}")
    return Plan.of(named(data.get("default", EXACT)), _parts(layers, named, label), **more)


class _Names:
    """Reads presets' names, each once."""

    def __init__(self, label: str, parse: Parse):
        self._label, self._parse = label, parse
        self._known: dict[str, Part] = {}

    def __call__(self, name: Any) -> Part:
        if not isinstance(name, str) or len(name) > 200 or is_plan(name):
            raise _wrong(
                self._label,
                f"gives a layer what is no preset; got {str(name)[:40]!r}",
                "choose from `mlxkv presets`",
            )
        if name not in self._known:
            try:
                self._known[name] = Part(name.strip().lower(), self._parse(name))
            except UserError as error:
                said = str(error).removeprefix("[--kv] ")
                raise UserError(f"[{WHERE}] {self._label}: {said}") from None
        return self._known[name]


def _parts(layers: Mapping[Any, Any], named: _Names, label: str) -> dict[int, Part]:
    """{"0": preset, "5-9": preset} -> by layer."""
    out: dict[int, Part] = {}
    for key, name in layers.items():
        text = str(key).replace(" ", "")
        if not LAYERS.fullmatch(text):
            raise _wrong(label, f"names no layer; got {str(key)[:40]!r}", 'write "3" or "5-9"')
        part = named(name)
        for run in text.split(","):
            first, _, last = run.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers or numbers[-1] >= MOST:
                raise _wrong(label, f"names layers that cannot be; got {run!r}", "write FIRST-LAST")
            if (twice := next((i for i in numbers if i in out), None)) is not None:
                raise _wrong(label, f"names a layer twice; got {twice}", "name each once")
            out |= dict.fromkeys(numbers, part)
    return out


def _optiq(entries: list, named: _Names, label: str) -> dict[int, Part]:
    """mlx-optiq's list, by layer."""
    out: dict[int, Part] = {}
    for entry in entries:
        found = entry if isinstance(entry, dict) else {}
        layer, bits = found.get("layer_idx"), found.get("bits")
        if type(layer) is not int or not 0 <= layer < MOST:
            raise _wrong(
                label, f"has an entry without a layer; got {str(entry)[:60]}", 'write "layer_idx"'
            )
        if type(bits) is not int or bits not in WIDTHS:
            choices = ", ".join(map(str, WIDTHS))
            raise _wrong(
                label,
                f"has no preset of this width; got {str(bits)[:20]} bits",
                f"choose {choices}",
            )
        if layer in out:
            raise _wrong(label, f"names a layer twice; got {layer}", "name each once")
        out[layer] = named(WIDTHS[bits])
    return out


def _wrong(label: str, what: str, then: str) -> UserError:
    return UserError(f"[{WHERE}] {label} {what}; {then}")
