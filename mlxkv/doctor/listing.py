"""`mlxkv presets` and `mlxkv models`: list what --kv and --model take."""

from __future__ import annotations

from mlxkv.console import human_bytes, print_json, print_table
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.presets import COMPARED, PRESETS

HEAD_DIM = 128
WINDOWS = ("sink", "recent", "page")


def presets(as_json: bool) -> None:
    """Print the presets. Bits per value are of pages, without windows."""
    rows = [_preset(name, kv) for name, kv in PRESETS.items()]
    if as_json:
        print_json({"head_dim": HEAD_DIM, "presets": rows})
        return
    rows = [row for row in rows if row["offered"]]
    columns, shared = ["--kv", "stores", "bits/value"], _same_windows(rows)
    cells = [[row["name"], _stores(row), f"{row['bits_per_value']:.2f}"] for row in rows]
    if not shared:
        columns += WINDOWS
        for cell, row in zip(cells, rows, strict=True):
            cell += [row[name] if row["compresses"] else "-" for name in WINDOWS]
    print_table(columns, cells)
    print(f"bits/value: with scales, at head dim {HEAD_DIM}, without the full-precision windows")
    if shared:
        sink, recent, page = shared
        print(f"windows: the first {sink} and the last {recent} tokens stay exact; pages of {page}")
    print("a scale serves a group of values of one token, or of one channel if the row says so")
    print(f"for comparisons, slower than full precision on a GPU: {', '.join(COMPARED)}")
    print("a pair takes its keys from one preset, its values from another: int8/int4")
    print(
        "low rank takes other ranks and codes: oja-0.6+int8, static-r96+windows; plus the bytes of its basis"
    )
    print("any of them drops tokens of a prompt with +keep0.5, or --keep 0.5")


def _same_windows(rows: list[dict]) -> tuple[int, ...] | None:
    """(sink, recent, page) if every preset that compresses has the same, else None."""
    found = {tuple(row[name] for name in WINDOWS) for row in rows if row["compresses"]}
    return found.pop() if len(found) == 1 else None


def _stores(row: dict) -> str:
    keys, values = (row[side].replace(" per token", "") for side in ("keys", "values"))
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
    """Print embedded models, aliases, and the models in the hub's cache folder."""
    from mlxkv.models.catalog.aliases import EMBEDDED, HUB
    from mlxkv.models.catalog.locate import hub_cache

    cached = hub_cache()
    others = {name: size for name, size in cached.items() if name not in HUB.values()}
    if as_json:
        print_json(
            {
                "embedded": list(EMBEDDED),
                "aliases": [
                    {"name": name, "model": target, "cached_bytes": cached.get(target)}
                    for name, target in HUB.items()
                ],
                "cached": [{"model": name, "bytes": size} for name, size in others.items()],
            }
        )
        return
    rows = [
        [name, _embedded(source), "yes" if source.folder.is_dir() else "no"]
        for name, source in EMBEDDED.items()
    ]
    rows += [
        [name, target, human_bytes(cached[target]) if target in cached else "no"]
        for name, target in HUB.items()
    ]
    rows += [["-", name, human_bytes(size)] for name, size in others.items()]
    print_table(["--model", "what it is", "on disk"], rows)
    print("on disk: size in the hub's cache folder")
    print("--model also takes any hub name (owner/name) and any folder in the hub's format")


def _embedded(source) -> str:
    return f"embedded, planted: {source.planted}" if source.planted else "embedded"
