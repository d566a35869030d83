"""`mlxkv presets` and `mlxkv models`: list the values of --kv and --model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

from mlxkv.console import human_bytes, print_json, print_table, say
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import PICKS, parse_kv
from mlxkv.formats.presets import COMPARED, PRESETS

HEAD_DIM = 128
OWNER = "mlx-community/"  # of nearly all aliases
ANY = "N"  # placeholder for the bits of several presets
WINDOWS = ("sink", "recent", "page")
PAIR = "a pair takes its keys from one preset, its values from another: int8/int4"


@dataclass(frozen=True)
class Measured:
    """Quality and speed of a preset. kl: mean KL divergence from full precision, in nats, of tokens decoded after 8192;
    same: how often the likeliest next token is the same, in percent; both for the worst of four pretrained models.
    attention: speed of one token's attention over 32768 tokens, relative to full precision, on one H100. use: when to
    choose it."""

    kl: float
    same: float
    attention: float
    use: str


# docs/results/pretrained.md (KL, next token), docs/internals/kernels.md (speed).
MEASURED = {
    "int8": Measured(0.000013, 99.8, 1.37, "almost no change"),
    "int4": Measured(0.0042, 96.7, 1.69, "the default: no calibration"),
    "fill-4": Measured(0.0039, 96.2, 1.45, "smaller than int4; calibrates once"),
    "fill-3": Measured(0.0120, 94.7, 1.51, "a smaller cache; calibrates once"),
    "fill-2.25": Measured(0.0444, 89.2, 1.55, "the smallest cache; calibrates once"),
}
# With the recommended ones of `fill-NUMBER`.
LISTED = {name: parse_kv(name) for name in PICKS} | PRESETS
SNAPKV = "SnapKV: the half of a prompt that its last queries attend to most"
# (title, prefixes of its presets' names), in the order of `presets --all`.
PAPERS = (
    ("to pick from", PICKS),
    ("balanced maps, all directions alike", ("int3", "int2")),
    ("min-max in groups of 64, as mlx-lm's --kv-bits", ("naive-",)),
    ("QuaRot: Hadamard rotation", ("hadamard-",)),
    ("SRFT", ("srft-",)),
    ("OSCAR: calibrated rotations", ("oscar-",)),
    (
        "balanced: calibrated invertible maps, keys with and without their mean",
        ("balanced-", "centred-"),
    ),
    ("SRFT paper, section 5: learned scales and rotations", ("learned-",)),
    ("TurboQuant", ("turbo-",)),
    ("PolarQuant (Han et al.)", ("polar-tree",)),
    ("KIVI: keys per channel", ("kivi-",)),
    ("PolarQuant (Wu et al.)", ("polar",)),
    ("low rank: fixed", ("static-",)),
    ("OjaKV: low rank that follows the text", ("oja-",)),
    (SNAPKV, ("",)),
)


def presets(as_json: bool, every: bool = False) -> None:
    """Print the presets to pick from, or every one. Bits per value are of pages, without windows."""
    rows = {name: _preset(name, kv) for name, kv in LISTED.items()}
    if as_json:
        print_json({"head_dim": HEAD_DIM, "presets": list(rows.values())})
    elif every:
        _print_all()
    else:
        _picks(rows)


def _picks(rows: dict[str, dict]) -> None:
    """Print the presets of MEASURED."""
    print_table(
        ["--kv", "bits/value", "KL", "same token", "attention", "use it for"],
        [
            [name, f"{rows[name]['bits_per_value']:.2f}", *_figures(m), m.use]
            for name, m in MEASURED.items()
        ],
    )
    say(
        "bits/value: fp16 has 16; at least 128 tokens, first and last, stay exact\n"
        "KL: how far probabilities of the next token move (nats, 0: not at all)\n"
        "KL, same token: after 8,192 tokens, the worst of four models of 135M to 1.5B\n"
        "attention: its speed over 32K tokens against fp16, one H100; a whole token is\n"
        "  not faster at that length\n"
        "KEYS/VALUES: keys of one preset, values of another: int8/int4\n"
        "mlxkv presets --all shows the others; mlxkv fit says what fits here"
    )


def _figures(measured: Measured) -> tuple[str, str, str]:
    return (
        f"{measured.kl:.4f}" if measured.kl >= 0.0001 else f"{measured.kl:.6f}",
        f"{measured.same:.1f} %",
        f"{measured.attention:.2f}x",
    )


def by_paper() -> Iterator[tuple[str, list[list[dict]]]]:
    """Yield the title of each paper with its presets: per method, a list of rows that differ only in bits."""
    rows = {name: _preset(name, kv) for name, kv in LISTED.items()}
    for title, starts in (*PAPERS, ("others", ("",))):
        methods: dict[tuple, list[dict]] = {}
        drops = title == SNAPKV
        for name in [n for n in rows if n.startswith(starts) and (LISTED[n].keep < 1) == drops]:
            methods.setdefault(_method(rows[name]), []).append(rows.pop(name))
        if methods:
            yield title, list(methods.values())


def _print_all() -> None:
    """Print all presets, by paper: a line for each method, with its widths."""
    for title, methods in by_paper():
        say(title)
        for alike in methods:
            say(_line(alike))
    say(
        "columns: --kv, bits per value with scales at head dim 128, without the exact windows; what is stored\n"
        "windows are the first 64 and the last 64 tokens, pages of 64, unless the row says otherwise\n"
        "a scale serves a group of values of one token, or of one channel if the row says so\n"
        f"for comparisons, slower than full precision on a GPU: {', '.join(COMPARED)}\n"
        f"{PAIR}\n"
        "low rank: plus the bytes of its basis\n"
        "+keep0.5 drops half of a prompt's tokens; other windows, groups and ranks: docs/guide/python.md"
    )


def _method(row: dict) -> tuple:
    """Return the properties shared by a method's presets: the stored form, except its bits, and the windows."""
    kv = LISTED[row["name"]]
    sides = (side.describe(ANY) for side in (kv.keys, kv.values))
    return (*sides, kv.keep, kv.pinned, *(row[name] for name in WINDOWS), row["offered"])


def _line(alike: list[dict]) -> str:
    """Return the line of presets that differ only in bits: turbo-int{4,3,2}."""
    first, bits = alike[0], " ".join(f"{row['bits_per_value']:.2f}" for row in alike)
    name, stores = first["name"], stored(alike)
    if len(alike) > 1:
        start, end = _shared([row["name"] for row in alike])
        widths = ",".join(row["name"][len(start) : len(row["name"]) - len(end)] for row in alike)
        name = f"{start}{{{widths}}}{end}"
    slow = "" if first["offered"] else ", slower than full precision on a GPU"
    return f"  {name:<24} {bits:<20} {stores}{_windows(first)}{slow}"


def _windows(row: dict) -> str:
    """Return the windows of a row, if unusual."""
    sizes = tuple(row[name] for name in WINDOWS)
    usual = CacheConfig.sink, CacheConfig.recent, CacheConfig.page
    if not row["compresses"] or sizes == usual:
        return ""
    return f"; windows {sizes[0]} and {sizes[1]}, pages of {sizes[2]}"


def _shared(names: list[str]) -> tuple[str, str]:
    """Return the common prefix and suffix of these names."""
    start = commonprefix(names)
    return start, commonprefix([name[len(start) :][::-1] for name in names])[::-1]


def stored(alike: list[dict]) -> str:
    """Describe the pages of presets that differ only in bits: keys, and values if they differ."""
    kv, bits = LISTED[alike[0]["name"]], ANY if len(alike) > 1 else None
    keys, values = (side.describe(bits).replace(" per token", "") for side in (kv.keys, kv.values))
    return keys if keys == values else f"keys {keys}; values {values}"


def _preset(name: str, kv: CacheConfig) -> dict:
    return {
        "name": name,
        "keys": kv.keys.label,
        "values": kv.values.label,
        "bits_per_value": round(kv.bits_per_value(HEAD_DIM, HEAD_DIM), 3),
        "compresses": kv.compresses,
        "offered": name not in COMPARED,
        "sink": kv.sink,
        "recent": kv.recent,
        "page": kv.page,
    }


def models(as_json: bool) -> None:
    """Print aliases, with their files on this machine, the other models in the hub's cache folder, and those of LM
    Studio and ollama."""
    from mlxkv.catalog.aliases import DEFAULT, HUB, PACKAGES, kept
    from mlxkv.catalog.hub import hub_cache
    from mlxkv.catalog.installed import installed

    sizes, others = hub_cache(), installed()
    files = {name: kept(name) for name in PACKAGES}
    families = {name: size for name, size in sizes.items() if name not in HUB.values()}
    if as_json:
        print_json(
            {
                "default": DEFAULT,
                "packages": [
                    {
                        "name": name,
                        "package": package.requirement,
                        "download_bytes": package.wheel_bytes,
                        "file": str(files[name]) if files[name] else None,
                    }
                    for name, package in PACKAGES.items()
                ],
                "aliases": [
                    {"name": name, "model": target, "cached_bytes": sizes.get(target)}
                    for name, target in HUB.items()
                ],
                "cached": [
                    {"model": name, "bytes": size, "why_not": _why_not_hub(name)}
                    for name, size in families.items()
                ],
                "others": [
                    {
                        **{"model": one.name, "program": one.program, "bytes": one.size},
                        **{"file": str(one.file), "why_not": why_not_run(one.file)},
                    }
                    for one in others
                ],
            }
        )
        return
    rows = [
        [name, f"{package.requirement}, {package.megabytes}, of the package index", files[name]]
        for name, package in PACKAGES.items()
    ]
    rows = [[*row, human_bytes(file.stat().st_size) if file else "no"] for *row, file in rows]
    rows += [
        [
            name,
            target.removeprefix(OWNER),
            human_bytes(sizes[target]) if target in sizes else "no",
        ]
        for name, target in HUB.items()
        if name not in PACKAGES or target in sizes
    ]
    print_table(["--model", "what it is", "on disk"], rows)
    more = [(name, size, "the hub's cache", _why_not_hub(name)) for name, size in families.items()]
    more += [(one.name, one.size, one.program, why_not_run(one.file)) for one in others]
    for name, size, place, why in more:
        reason = f"; does not run: {why}" if why else ""
        say(f"{human_bytes(size):>11}  {name}\n{'':13}of {place}{reason}")
    say(
        f"without --model: {DEFAULT}; mlxkv models get NAME downloads one ahead\n"
        f"names without an owner are of {OWNER.rstrip('/')} on the hub\n"
        "--model also takes any owner/name of the hub, any folder in the hub's format,\n"
        "  and any GGUF file"
    )


def _why_not_hub(name: str) -> str | None:
    from mlxkv.catalog.hub import cached

    place = cached(name)
    return "no whole model is there" if place is None else why_not_run(place.config.parent)


def why_not_run(model: Path) -> str | None:
    """Return why a model on this machine cannot run here, or None. Only its architecture is looked at: that of a GGUF
    file, or the model_type of a folder's config.json."""
    from mlxkv.catalog import installed
    from mlxkv.catalog.gguf.config import MODELS

    if not model.is_dir():
        kind = installed.architecture(model)
        if kind is None:
            return "its architecture cannot be read"
        return None if kind in MODELS else f"GGUF files of {kind} are not read"
    kind = installed.model_type(model)
    if kind is None:
        return "no config.json with a model_type"
    return None if installed.in_mlx_lm(kind) else f"mlx-lm has no {kind}"
