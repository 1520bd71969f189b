"""How can a gradient be taken with respect to variables that a function reads by closure?

While `value_and_grad` runs the user's function, a *layer* lies over the variables: reading one of those it
differentiates gives the differentiated value, and assignments made meanwhile are kept in the layer, handed out as auxiliary
results and carried out afterwards.
"""

from __future__ import annotations

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
