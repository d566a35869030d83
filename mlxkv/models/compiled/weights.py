"""`Weights`: the arrays of a model, as inputs of a traced step: a trace must not keep old ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import getitem, is_

import mlx.core as mx
import mlx.nn as nn

Container = dict | list
Place = tuple[Container, object]  # a container in a model, and the key, or the position, in it


class Assigned(Exception):
    """In a trace, the model's code has put arrays in these places."""

    def __init__(self, places: list[Place]):
        super().__init__("the model's code changes its weights as it runs")
        self.places = places


class Weights:
    """Where a model keeps its arrays.

    MLX's own way to make them inputs of a compiled function (`inputs=`) leaves a model broken where its code
    raises in a trace, or assigns a weight.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._harmless: set[tuple[int, object]] = set()
        self._look()

    def _look(self) -> None:
        self._places, links = _walk(self.model)
        # Apart, so that every step looks through them without a line of Python for each.
        self._containers, self._keys = zip(*self._places, strict=True)
        self._links = tuple(zip(*links, strict=True))

    def changed(self) -> bool:
        """Whether modules, or lists of them, have been replaced since the last look; looks again."""
        containers, keys, found = self._links
        try:
            if all(map(is_, map(getitem, containers, keys), found)):
                return False
        except (KeyError, IndexError):
            pass
        self._look()
        return True

    def arrays(self) -> list[mx.array]:
        """What the places hold now."""
        return list(map(getitem, self._containers, self._keys))

    @contextmanager
    def replaced(self, traced: Sequence[mx.array]) -> Iterator[None]:
        """Inside, the model computes with `traced`. Raises Assigned where its code has put other arrays in
        places, or has made places. Whatever happens, the model is left as it was."""
        before = self.arrays()
        _put(self._places, traced)
        try:
            yield
            known = {(id(c), key): x for (c, key), x in zip(self._places, traced, strict=True)}
            assigned = [
                (c, key)
                for c, key in _walk(self.model)[0]
                if c[key] is not known.get((id(c), key)) and (id(c), key) not in self._harmless
            ]
            if assigned:
                raise Assigned(assigned)
        finally:
            _put(self._places, before)

    def harmless(self, places: Sequence[Place]) -> None:
        """Let the model's code assign these: it computes what is there already."""
        self._harmless |= {(id(container), key) for container, key in places}


def _put(places: Sequence[Place], arrays: Sequence[mx.array]) -> None:
    for (container, key), x in zip(places, arrays, strict=True):
        container[key] = x


def _walk(model: nn.Module) -> tuple[list[Place], list[tuple[Container, object, object]]]:
    """The places of arrays, and of the containers between them."""
    places, links, todo = [], [], [model]
    while todo:
        container = todo.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, one in items:
            if isinstance(one, mx.array) and not isinstance(container, tuple):
                places.append((container, key))
            elif isinstance(one, (dict, list, tuple)):
                if not isinstance(container, tuple):
                    links.append((container, key, one))
                todo.append(one)
    return places, links
