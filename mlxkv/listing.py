"""`mlxkv presets` and `mlxkv models`: what there is to choose from."""

from __future__ import annotations

from mlxkv.config import PRESETS, CacheConfig
from mlxkv.console import human_bytes, print_json, print_table

HEAD_DIM = 128


def presets(as_json: bool) -> None:
    """The presets as a table. Bits per value inside the pages; the windows come on top."""
    rows = [_preset(name, kv) for name, kv in PRESETS.items()]
    if as_json:
        print_json({"head_dim": HEAD_DIM, "presets": rows})
        return
    print_table(
        ["--kv", "keys", "values", "bits/value", "sink", "recent", "page"],
        [
            [row["name"], row["keys"], _values(row), f"{row['bits_per_value']:.2f}"]
            + [row[window] if row["compresses"] else "-" for window in ("sink", "recent", "page")]
            for row in rows
        ],
    )
    print(
        f"bits/value: scales included, at head dim {HEAD_DIM}, without the full-precision windows"
    )
    print("sink, recent: first and last tokens kept in full precision; a page is encoded at once")
    print("a pair takes its keys from one preset and its values from another: --kv int8/int4")


def _preset(name: str, kv: CacheConfig) -> dict:
    return {
        "name": name,
        "keys": kv.keys.label,
        "values": kv.values.label,
        "bits_per_value": round(kv.bits_per_value(HEAD_DIM, HEAD_DIM), 3),
        "compresses": kv.compresses,
        "sink": kv.sink,
        "recent": kv.recent,
        "page": kv.page,
    }


def _values(row: dict) -> str:
    return "as keys" if row["values"] == row["keys"] else row["values"]


def models(as_json: bool) -> None:
    """Embedded models, aliases, and what the hub's cache holds."""
    from mlxkv.locate import hub_cache
    from mlxkv.models.aliases import EMBEDDED, HUB

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
    rows = [[name, _embedded(source), "-"] for name, source in EMBEDDED.items()]
    rows += [
        [name, target, human_bytes(cached[target]) if target in cached else "not loaded yet"]
        for name, target in HUB.items()
    ]
    rows += [["-", name, human_bytes(size)] for name, size in others.items()]
    print_table(["--model", "what it is", "in the hub cache"], rows)
    print("--model also takes any hub name (owner/name) and any local folder in the hub's format")


def _embedded(source) -> str:
    return f"embedded, works offline{', outlier channels planted' if source.planted else ''}"
