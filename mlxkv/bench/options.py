"""Parse and check options shared by commands of `mlxkv bench`. No framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import FULL_PAGES

BASELINE = "fp16"
# Full precision with the steps of compressed caches, only for `mlxkv bench decode`: mlx-lm's own caches in a
# replayed step, and float16 pages read by our kernels.
REPLAYED, PAGED = "fp16-replayed", "fp16-pages"
MLX_LM = {"mlx-lm-kv8": 8, "mlx-lm-kv4": 4}  # mlx-lm's own quantized cache: name -> kv_bits
MLX_LM_GROUP = 64
BITS = (2, 3, 4, 6, 8)


def cache_config(name: str) -> CacheConfig:
    """Return the cache format of the row `name`."""
    if name == PAGED:
        return FULL_PAGES
    return parse_kv(BASELINE if name == REPLAYED or name in MLX_LM else name)


def parse_contexts(text: str, least: int, why: str = "too short to time") -> tuple[int, ...]:
    """'1k,4k' -> (1024, 4096), each once. Raises UserError, with `why`, below `least` tokens."""
    lengths = dict.fromkeys(console.parse_tokens(name, "--contexts") for name in text.split(","))
    if min(lengths) < least:
        raise UserError(f"[--contexts] {why}; got {min(lengths)}; choose at least {least}")
    return tuple(lengths)


def print_machine(machine: dict, versions: dict) -> None:
    """Print the machine, the backend in use, and versions."""
    memory = console.human_bytes(machine["memory_bytes"])
    console.say(f"{machine['chip']} · {memory} · {machine['system']}")
    console.say(f"backend {machine['backend']}: {machine['device']}")
    console.say(" · ".join(f"{name} {text or 'missing'}" for name, text in versions.items()))


def print_rows(columns: Sequence[tuple[str, str, str]], rows: Iterable[dict], title: str) -> None:
    """Print a table of rows. columns: heading, key, and format of a number."""
    cells = [[_cell(row.get(key), form) for _, key, form in columns] for row in rows]
    console.print_table([heading for heading, _, _ in columns], cells, title)


def _cell(value: str | float | None, form: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)
