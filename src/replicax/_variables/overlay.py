"""How can a gradient be taken with respect to variables that a function reads by closure?

While `value_and_grad` runs the user's function, a *layer* lies over the variables: reading one of those it
differentiates gives the differentiated value, and assignments made meanwhile are kept in the layer, handed out as auxiliary
results and carried out afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax import lax

from replicax import _context, _errors, _jax

if TYPE_CHECKING:
    from replicax._variables.variable import Variable


class Layer:
    __slots__ = ("trace", "values", "written")

    def __init__(self, values: dict[Variable, Any]) -> None:
        self.values = values
        self.written: dict[Variable, None] = {}
        self.trace = _jax.current_trace()

    def write(self, variable: Variable, value: Any) -> None:
        self.values[variable] = lax.stop_gradient(value)
        self.written[variable] = None


class _Watch(dict["Variable", Any]):
    """Holds no values, and remembers which variables were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[Variable, None] = {}

    def __contains__(self, variable: object) -> bool:
        self.asked[variable] = None  # type: ignore[index]
        return False


@contextlib.contextmanager
def watching() -> Iterator[dict[Variable, None]]:
    """Yields a collection, in the order of first use, of the variables that the ``with`` block reads."""
    watch = _Watch()
    _context.thread.overlays.append(Layer(watch))
    try:
        yield watch.asked
    finally:
        _context.thread.overlays.pop()


def accepting(variable: Variable) -> Layer | None:
    """The innermost layer, if a write made here belongs to it rather than to a loop inside it."""
    layers = _context.thread.overlays
    if not layers:
        return None
    layer = layers[-1]
    if layer.trace is _jax.current_trace():
        return layer
    mode = _context.current()
    if mode is None or mode.ledger is None:
        raise _errors.assigned_in_nested_trace(variable)
    return None  # the ledger keeps variables that loops write
