"""Find a plan: spend bytes where they save the most divergence.

The divergence of a plan is predicted as the sum of what each layer's preset costs alone, with all other
layers exact. That is what makes the search cheap, and it is a guess: layers' errors may meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxkv.errors import UserError


@dataclass(frozen=True)
class Option:
    """A preset for one layer. kl: the divergence that it costs alone, in nats. bits: per value, in pages.
    values: numbers of keys and values that a token has in this layer."""

    kl: float
    bits: float
    values: int

    @property
    def size(self) -> float:
        """Bits for a token."""
        return self.bits * self.values


Menu = Mapping[int, Mapping[str, Option]]  # by layer, by preset


def predicted(menu: Menu, chosen: Mapping[int, str]) -> float:
    """The sum of what the layers cost alone."""
    return sum(menu[layer][name].kl for layer, name in chosen.items())


def mean_bits(menu: Menu, chosen: Mapping[int, str]) -> float:
    """Bits per value over all layers of the menu."""
    found = [menu[layer][name] for layer, name in chosen.items()]
    return sum(one.size for one in found) / sum(one.values for one in found)


def allocate(menu: Menu, budget: float) -> dict[int, str]:
    """Choose a preset for each layer, of at most `budget` bits per value in the mean over all.

    From the cheapest preset everywhere, and from each preset that fits everywhere, layers are raised one at a
    time, the one first that saves the most divergence for its bytes. The start that ends best is taken, so
    no preset that fits is predicted better than the plan. Raises UserError where nothing fits.
    """
    values = sum(next(iter(own.values())).values for own in menu.values())
    room = budget * values + 1e-6  # sums of floats
    cheapest = {i: min(own, key=lambda n: (own[n].size, own[n].kl)) for i, own in menu.items()}
    if (least := mean_bits(menu, cheapest)) * values > room:
        raise UserError(
            f"[--budget] too few bits for these presets; got {budget:g}; choose {least:.4g} or more, or "
            "other presets by --menu"
        )
    names = dict.fromkeys(name for own in menu.values() for name in own)
    starts = [cheapest]
    for name in names:
        start = {i: name if name in own else cheapest[i] for i, own in menu.items()}
        if mean_bits(menu, start) * values <= room:
            starts.append(start)
    ends = [_raised(menu, start, room) for start in starts]
    return min(ends, key=lambda one: (predicted(menu, one), mean_bits(menu, one)))


def _raised(menu: Menu, start: Mapping[int, str], room: float) -> dict[int, str]:
    """`start` with layers raised as long as there is room, the best bargain first."""
    chosen = dict(start)
    left = room - sum(menu[i][name].size for i, name in chosen.items())
    while True:
        best, rate = None, 0.0
        for i, name in chosen.items():
            now = menu[i][name]
            for other, option in menu[i].items():
                more, saved = option.size - now.size, now.kl - option.kl
                if saved <= 0 or more > left:
                    continue
                gain = saved / more if more > 0 else float("inf")
                if gain > rate:
                    best, rate = (i, other, more), gain
        if best is None:
            return chosen
        chosen[best[0]] = best[1]
        left -= best[2]


def evenly(menu: Menu, budget: float) -> dict[int, str] | None:
    """What needs no measurement: of two presets that all layers share and whose bits are next to `budget`,
    the wider one in as many layers as fit, evenly over the depth. None where `budget` lies outside."""
    shared = set.intersection(*(set(own) for own in menu.values()))
    sizes = {name: mean_bits(menu, dict.fromkeys(menu, name)) for name in shared}
    low = max((n for n in shared if sizes[n] <= budget + 1e-9), key=sizes.__getitem__, default=None)
    high = min((n for n in shared if sizes[n] > budget + 1e-9), key=sizes.__getitem__, default=None)
    if low is None or high is None:
        return None if low is None else dict.fromkeys(menu, low)
    layers, count = sorted(menu), 0
    chosen = dict.fromkeys(layers, low)
    for count in range(len(layers) + 1):
        wide = {layers[k * len(layers) // count] for k in range(count)} if count else set()
        now = {i: high if i in wide else low for i in layers}
        if mean_bits(menu, now) > budget + 1e-9:
            break
        chosen = now
    return chosen
