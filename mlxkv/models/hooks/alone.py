"""Which models take one sequence at a time, and caches that say so to their hosts.

A model's code makes one mask for all layers of a kind, from the first of their caches. In a batch mlx-lm's own caches
have padding on the left and ours have none, so no mask fits both. Hosts ask whether a cache has `merge` (mlx-lm) or
`to_batch` (mlx-vlm), and serve sequences one after the other where one has neither.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache

from mlxkv.models.hooks.probe import Place, leaves


def is_alone(caches: list, compressed: Container[Place]) -> bool:
    """Return whether of the model's own `caches` some of one kind are to be compressed and others are not."""
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for place, one in leaves(caches):
        kinds[place in compressed].add(type(one).__name__)
    return bool(kinds[True] & kinds[False])


def keep_alone(caches: list, compressed: Container[Place]) -> None:
    """Take the ways into a batch from those of `caches` that are compressed, and from lists that hold them."""
    for place, one in leaves(caches):
        if place in compressed:
            one.alone = True
            if len(place) > 1:
                outer = caches[place[0]]
                if not hasattr(type(outer), "alone"):
                    outer.__class__ = _alone(type(outer))


@cache
def _alone(kind: type) -> type:
    """The class of a list of caches without its ways into a batch; its name, which saved files hold, stays."""

    def absent(_):
        raise AttributeError("sequences of this model are read one at a time")

    def __reduce__(self):
        return _again, (kind, vars(self))

    ways = dict.fromkeys(("merge", "to_batch"), property(absent))
    more = {"__reduce__": __reduce__, "__module__": kind.__module__, "alone": True}
    return type(kind.__name__, (kind,), ways | more)


def _again(kind: type, state: dict):
    """Unpickle or copy a list of caches."""
    out = object.__new__(_alone(kind))
    vars(out).update(state)
    return out
