"""`Weights`: the arrays of a model, as inputs of a traced step: a trace must not keep old ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import eq, getitem, is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Container = dict | list
Spot = tuple[Container, Any]  # a container in a model, and the key, or the position, in it
# The place of a container, or a tuple, and its length.
Link = tuple[Container, Any, Container, int]


class Assigned(Exception):
    """In a trace, the model's code has put arrays in these places."""

    def __init__(self, places: list[Spot]):
        super().__init__("the model's code changes its weights as it runs")
        self.places = places


class Weights:
    """The places where a model keeps its arrays.

    MLX's own way to make them inputs of a compiled function (`inputs=`) leaves a model broken where its code
    raises in a trace, or assigns a weight.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._harmless: set[tuple[int, object]] = set()
        self._places, self._links = _walk(model)
        # Python indices are constants of a trace: scales of adapters, the mode of training.
        numbers = [
            (vars(module), name, value)
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, float) or (module is model and name == "_training")
        ]
        self._numbers = tuple(zip(*numbers, strict=True)) or ((), (), ())
        # Apart, so that every step looks through them without a line of Python for each.
        self._columns = tuple(zip(*self._places, strict=True)) or ((), ())
        self._between = tuple(zip(*self._links, strict=True))

    def arrays(self) -> list[mx.array] | None:
        """Return the current arrays; None if the tree of modules changed: modules, or lists of them, have been
        replaced, arrays have come or gone, or a module's floats have changed."""
        containers, keys, parts, sizes = self._between
        owners, names, numbers = self._numbers
        try:
            if not all(map(eq, map(getitem, owners, names), numbers)):
                return None
            if not all(map(is_, map(getitem, containers, keys), parts)):
                return None
            return (
                list(map(getitem, *self._columns)) if all(map(eq, map(len, parts), sizes)) else None
            )
        except (KeyError, IndexError):
            return None

    @contextmanager
    def replaced(self, traced: Sequence[mx.array]) -> Iterator[None]:
        """Inside, the model computes with `traced`. Raises Assigned where its code has put other arrays in
        places, or has made places. Whatever happens, the model is left as it was."""
        snapshot = [(part, _contents(part)) for _, _, part, _ in self._links]
        for (container, key), x in zip(self._places, traced, strict=True):
            container[key] = x
        try:
            yield
            inputs = {(id(c), key): x for (c, key), x in zip(self._places, traced, strict=True)}
            assigned = [
                (c, key)
                for c, key in _walk(self.model)[0]
                if c[key] is not inputs.get((id(c), key)) and (id(c), key) not in self._harmless
            ]
            if assigned:
                raise Assigned(assigned)
        finally:
            for part, contents in snapshot:
                _put_back(part, *contents)

    def harmless(self, places: Sequence[Spot]) -> None:
        """Let the model's code assign these: it computes what is there already."""
        self._harmless |= {(id(container), key) for container, key in places}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Leave the model as it was, whatever its code assigns as it runs (mlx-vlm's models keep positions of the last
    prompt)."""
    snapshot = [(part, _contents(part)) for _, _, part, _ in _walk(model)[1]]
    try:
        yield
    finally:
        for part, contents in snapshot:
            _put_back(part, *contents)


def content(place: Spot) -> mx.array | None:
    """Return what a place holds; None where there is no such place."""
    container, key = place
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if key < len(container) else None


def _contents(container: Container | tuple) -> tuple:
    """Return what `_put_back` takes: the items of a container, and the attributes of a module."""
    if isinstance(container, dict):
        return dict(container), dict(vars(container)) if isinstance(container, nn.Module) else None
    return list(container), None


def _put_back(container: Container | tuple, items, attributes: dict | None) -> None:
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, items)
    elif isinstance(container, list):
        container[:] = items
    if attributes is not None:  # assigning an array takes an attribute of this name away
        vars(container).clear()
        vars(container).update(attributes)


def _walk(model: nn.Module) -> tuple[list[Spot], list[Link]]:
    """Return the places of arrays, and of the containers between them, the model first."""
    places, links = [], []
    todo: list[Container | tuple] = [[model]]
    while todo:
        container = todo.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            if isinstance(item, mx.array) and not isinstance(container, tuple):
                places.append((container, key))
            elif isinstance(item, (dict, list, tuple)):
                links.append((container, key, item, len(item)))
                todo.append(item)
    return places, links
