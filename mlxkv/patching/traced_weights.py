"""`Weights`: a model's arrays as inputs of a traced step, so that a trace does not keep old ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import eq, getitem, is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Container = dict | list
Spot = tuple[Container, Any]  # a container in a model, and the key, or the position, in it
# The place of a container, or a tuple, and its length.
Link = tuple[Container, Any, Container, int]


class Assigned(Exception):
    """The model's code assigned arrays to these places during a trace."""

    def __init__(self, places: list[Spot]):
        super().__init__("the model's code changes its weights as it runs")
        self.places = places


class Weights:
    """The places where a model keeps its arrays.

    MLX's own method, `inputs=` of a compiled function, leaves a model broken if its code raises an error or assigns a
    weight in a trace.
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
        # In columns, so that each step checks them without a Python loop.
        self._columns = tuple(zip(*self._places, strict=True)) or ((), ())
        self._between = tuple(zip(*self._links, strict=True))

    def arrays(self) -> list[mx.array] | None:
        """Return the current arrays; None if the module tree changed: modules or lists replaced, arrays
        added or removed, or a module's floats changed."""
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
        """Make the model compute with `traced` in this block. Raises Assigned if its code replaced arrays or added
        places. Always restores the model."""
        with _restored(self._links):
            for (container, key), x in zip(self._places, traced, strict=True):
                container[key] = x
            yield
            inputs = {(id(c), key): x for (c, key), x in zip(self._places, traced, strict=True)}
            assigned = [
                (c, key)
                for c, key in _walk(self.model)[0]
                if c[key] is not inputs.get((id(c), key)) and (id(c), key) not in self._harmless
            ]
            if assigned:
                raise Assigned(assigned)

    def harmless(self, places: Sequence[Spot]) -> None:
        """Allow the model's code to assign these `places`: the values do not change."""
        self._harmless |= {(id(container), key) for container, key in places}


def unchanged(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the model after this block, whatever its code assigns (mlx-vlm's models keep positions of the last
    prompt)."""
    return _restored(_walk(model)[1])


@contextmanager
def _restored(links: list[Link]) -> Iterator[None]:
    snapshot = [(part, _contents(part)) for _, _, part, _ in links]
    try:
        yield
    finally:
        for part, (items, attributes) in snapshot:
            if isinstance(part, dict):
                dict.clear(part)
                dict.update(part, items)
            elif isinstance(part, list):
                part[:] = items
            if attributes is not None:  # assigning an array deletes an attribute of this name
                vars(part).clear()
                vars(part).update(attributes)


def content(place: Spot) -> mx.array | None:
    """Return the array at a place; None if the place does not exist."""
    container, key = place
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if key < len(container) else None


def _contents(container: Container | tuple) -> tuple:
    """Return the items of a container, and the attributes of a module."""
    if isinstance(container, dict):
        return dict(container), dict(vars(container)) if isinstance(container, nn.Module) else None
    return list(container), None


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
