"""Read fewer pages: `python -m experiments.frontier.pages --models DIR --texts HELD --out OUT`.

How many pages an oracle needs for 90, 95 and 99 % of the attention mass, and what half, a quarter and an eighth of
the pages cost by each ranking, with exact pages and with int4, beside all pages at int2.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from experiments.frontier import study
from experiments.frontier.arms import Arm, attend
from experiments.frontier.coding import Codes, Maps
from experiments.frontier.engine import Memory, read_on
from mlxkv import console

INT2, INT4 = Codes(2), Codes(4, plain=True)
SHARES = (0.5, 0.25, 0.125)
RANKINGS = ("oracle", "diagonal", "boxes", "mean", "low rank", "full")


def arms() -> list[Arm]:
    """Return the arms, the most telling first."""
    out = [Arm("int2", INT2), Arm("int4", INT4), Arm("int3", Codes(3))]
    for share in SHARES:
        for rank in RANKINGS:
            if rank not in ("full", "low rank"):
                out.append(Arm(f"int4 {rank} {share}", INT4, rank, share))
            out.append(Arm(f"pages {rank} {share}", None, rank, share))
        for rest in ("mean", "cross"):
            out.append(Arm(f"pages diagonal {share} +{rest}", None, "diagonal", share, 64, rest))
        out.append(Arm(f"pages128 diagonal {share}", None, "diagonal", share, 128))
        out.append(Arm(f"pages128 oracle {share}", None, "oracle", share, 128))
    return out


NEED, MASSES, SIZES = "need", (0.9, 0.95, 0.99), (64, 128)


def need(loaded, prompt: Sequence[Memory], new: list, maps: dict[int, Maps]) -> list[list[dict]]:
    """Return for each text a row by layer and size of pages: the share of pages that an oracle has to read so that they
    and the windows hold each of MASSES, a mean over tokens, by query head."""
    found: dict[tuple[int, int], list] = {}

    def watch(memory: Memory, share: mx.array, total: mx.array) -> None:
        for page in SIZES:
            mass = share.reshape(*share.shape[:-1], -1, page).sum(-1) / total
            held = 1 - mass.sum(-1, keepdims=True)  # by the windows
            sums = held + mx.cumsum(-mx.sort(-mass, axis=-1), axis=-1)
            # Pages before the sum is enough, and one more, unless the windows are.
            pages = [
                mx.where(held[..., 0] >= least, 0, 1 + (sums < least).sum(-1)) / mass.shape[-1]
                for least in MASSES
            ]
            share_of = mx.minimum(mx.stack(pages), 1).mean(-1)  # [masses, B, G, R]
            found[memory.index, page] = share_of.reshape(*share_of.shape[:2], -1).tolist()

    read_on(loaded, prompt, new, attend(study.EXACT, maps, watch))
    return [
        [
            {
                "task": NEED,
                "preset": f"layer {layer}, pages of {page}",
                "layer": layer,
                "page": page,
            }
            | {"need": {str(mass): x[i] for mass, x in zip(MASSES, shares, strict=True)}}
            for (layer, page), shares in found.items()
        ]
        for i in range(len(new))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.pages", __doc__, arms(), arguments, need)


if __name__ == "__main__":
    console.run_tool(main)
