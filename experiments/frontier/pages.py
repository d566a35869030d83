"""Read fewer pages: `python -m experiments.frontier.pages --models DIR --texts HELD --out OUT`.

How many pages an oracle needs for 90, 95 and 99 % of the attention mass, by query head and by kv head; what half, a
quarter and an eighth of the pages cost by each ranking; and fewer pages with more bits beside all pages with int2 and
with bits by direction, at the same bits read.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from experiments.frontier import study
from experiments.frontier.arms import Arm, attend
from experiments.frontier.codes import references
from experiments.frontier.coding import Codes
from experiments.frontier.engine import Memory, read_on
from experiments.frontier.filled import Filled
from experiments.frontier.home import Home
from experiments.frontier.ranking import SUMMARIES
from mlxkv import console

INT4, FOUR = Codes(4, plain=True), Filled(4.0)
RANKINGS = ("oracle", "diagonal", "turned", "boxes", "boxes sum", "mean", "low rank", "full")
SHARES = (0.5, 0.25, 0.125)
EQUAL = ("int2", "fill-2.25")


def budget(bits: float, read: float, ranked: float) -> float:
    """Return the share of pages whose bits, with what a ranking reads of every page, are `bits`."""
    return (bits - ranked) / read


def summed(read: float) -> float:
    """Return the share where the mean values of the other pages are read, too."""
    return (2.25 - 0.25 - 0.125) / (read - 0.125)


def _smaller(rank: str, page: int) -> Arm:
    """Return an arm of smaller pages at the bits of int2."""
    share = budget(2.25, 4.5, SUMMARIES[rank] * 16 / page / 2)
    return Arm(f"2.25: int4 {rank} {page}", INT4, rank, share, page, against=EQUAL, ask=True)


def arms() -> list[Arm]:
    """Return the arms, the most telling first."""
    out = references()
    # At the bits of int2, 2.25: fewer pages with more bits.
    out += [
        Arm(
            "2.25: int4 diagonal",
            INT4,
            "diagonal",
            budget(2.25, 4.5, 0.25),
            against=EQUAL,
            ask=True,
        ),
        Arm("2.25: int4 turned", INT4, "turned", budget(2.25, 4.5, 0.25), against=EQUAL, ask=True),
        Arm("2.25: int4 both", INT4, "both", (2.25 - 0.5) / 4.25, against=EQUAL, ask=True),
        Arm("2.25: int4 most", INT4, "most", budget(2.25, 4.5, 0.25), against=EQUAL, ask=True),
        Arm(
            "2.25: int4 quarter", INT4, "quarter", budget(2.25, 4.5, 0.25), against=EQUAL, ask=True
        ),
        *(_smaller(rank, page) for rank in ("diagonal", "diagonal8", "mean") for page in (32, 16)),
        Arm("2.25: int4 boxes", INT4, "boxes", budget(2.25, 4.25, 0.25), against=EQUAL, ask=True),
        Arm("2.25: int4 boxes sum", INT4, "boxes sum", budget(2.25, 4.25, 0.25), against=EQUAL),
        Arm("2.25: int4 mean", INT4, "mean", budget(2.25, 4.5, 0.125), against=EQUAL),
        Arm("2.25: int4 oracle", INT4, "oracle", 0.5, against=EQUAL, ask=True),
        Arm(
            "2.25: fill-4 diagonal",
            FOUR,
            "diagonal",
            budget(2.25, 4.0, 0.25),
            against=EQUAL,
            ask=True,
        ),
        Arm(
            "2.25: fill-3 diagonal",
            Filled(3.0),
            "diagonal",
            budget(2.25, 3.0, 0.25),
            against=EQUAL,
            ask=True,
        ),
        Arm("2.25: fill-3 oracle", Filled(3.0), "oracle", 0.75, against=EQUAL),
        Arm("2.25: int4 diagonal +mean", INT4, "diagonal", summed(4.5), 64, "mean", EQUAL, True),
        Arm("2.25: fill-4 diagonal +mean", FOUR, "diagonal", summed(4.0), 64, "mean", EQUAL, True),
        Arm("2.25: fill-3 diagonal +mean", Filled(3.0), "diagonal", summed(3.0), 64, "mean", EQUAL),
        Arm("2.25: exact diagonal +mean", None, "diagonal", summed(16), 64, "mean", EQUAL),
        Arm(
            "2.25: exact diagonal",
            None,
            "diagonal",
            budget(2.25, 16, 0.25),
            against=EQUAL,
            ask=True,
        ),
        Arm("2.25: exact oracle", None, "oracle", budget(2.25, 16, 0), against=EQUAL),
        Arm(
            "4.5: exact diagonal", None, "diagonal", budget(4.5, 16, 0.25), against=("int4", "int2")
        ),
    ]
    # How many pages answers need.
    for share in (0.625, 0.75, 0.875):
        for rank in ("diagonal", "boxes"):
            arm = Arm(f"int4 {rank} {share}", INT4, rank, share, against=("int4",), ask=True)
            out.append(arm)
    # What leaving pages out costs by itself.
    for share in SHARES:
        for rank in RANKINGS:
            against = () if rank == "oracle" else (f"pages oracle {share}",)
            out.append(Arm(f"pages {rank} {share}", None, rank, share, against=against))
        for rest in ("mean", "cross"):
            against = (f"pages diagonal {share}",)
            out.append(
                Arm(f"pages diagonal {share} +{rest}", None, "diagonal", share, 64, rest, against)
            )
    for page in (16, 128):
        for rank in ("oracle", "diagonal"):
            name, against = f"pages{page} {rank} 0.25", (f"pages {rank} 0.25",)
            out.append(Arm(name, None, rank, 0.25, page, against=against))
    return out


NEED, MASSES, SIZES = "need", (0.9, 0.95, 0.99), (64, 128)


def need(loaded, prompt: Sequence[Memory], new: list, home: Home) -> list[list[dict]]:
    """Return for each text a row by layer and size of pages: the share of pages that an oracle has to read so that
    they and the windows hold each of MASSES, a mean over tokens, by query head; and by kv head, of the mean mass of the
    heads that share it, which read the same pages."""
    found: dict[tuple[int, int], list] = {}

    def shares(mass: mx.array) -> list:
        """mass [B, G, R, T, pages] -> [masses, B, G * R]."""
        held = 1 - mass.sum(-1, keepdims=True)  # by the windows
        sums = held + mx.cumsum(-mx.sort(-mass, axis=-1), axis=-1)
        # Pages before the sum is enough, and one more, unless the windows are.
        pages = [
            mx.where(held[..., 0] >= least, 0, 1 + (sums < least).sum(-1)) / mass.shape[-1]
            for least in MASSES
        ]
        found = mx.minimum(mx.stack(pages), 1).mean(-1)  # [masses, B, G, R]
        return found.reshape(*found.shape[:2], -1).tolist()

    def watch(memory: Memory, share: mx.array, total: mx.array) -> None:
        for page in SIZES:
            mass = share.reshape(*share.shape[:-1], -1, page).sum(-1) / total
            found[memory.index, page] = shares(mass), shares(mass.mean(2, keepdims=True))

    read_on(loaded, prompt, new, attend(study.EXACT, home, watch))
    return [
        [
            {
                "task": NEED,
                "preset": f"layer {layer}, pages of {page}",
                "layer": layer,
                "page": page,
            }
            | {
                name: {str(mass): x[i] for mass, x in zip(MASSES, own, strict=True)}
                for name, own in zip(("need", "need_kv"), both, strict=True)
            }
            for (layer, page), both in found.items()
        ]
        for i in range(len(new))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.pages", __doc__, arms(), arguments, need)


if __name__ == "__main__":
    console.run_tool(main)
