"""What are the gradients with respect to variables? `value_and_grad` and `grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax import _context, _errors
from replicax._context import Kind
from replicax._variables import overlay, storage
from replicax._variables.variable import Variable


def value_and_grad(
    function: Callable[..., Any], variables: Sequence[Variable] | Any, has_aux: bool = False
) -> Callable[..., Any]:
    """The value of `function` and its gradients with respect to variables that it reads by closure.

    Inside a replica the gradients are this replica's own: reduce them with
    ``context.all_reduce("mean", gradients)`` or hand them to `rx.Optimizer`, which does. Variables may also be
    assigned inside `function` (a BatchNorm's running mean, say).

    Args:
      function: Returns a scalar, or ``(scalar, anything)`` with ``has_aux=True``.
      variables: A list, or any pytree, of variables.

    Returns:
      A function of the same arguments that returns ``(value, gradients)``, gradients in the structure of `variables`.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> value, (gradient,) = rx.value_and_grad(lambda x: x * w.value ** 2, [w])(2.0)
    >>> print(value, gradient)
    18.0 12.0
    """
    if not callable(function):
        raise _errors.not_a_loss(function)
    flat, tree = jax.tree.flatten(variables)
    _check_variables(flat)

    def call(*args: Any, **kwargs: Any) -> Any:
        written: list[Variable] = []

        def inner(values: list[Any]) -> Any:
            layer = overlay.Layer(dict(zip(flat, values, strict=True)))
            _context.thread.overlays.append(layer)
            try:
                out = function(*args, **kwargs)
            finally:
                _context.thread.overlays.pop()
            value, aux = out if has_aux else (out, None)
            written[:] = layer.written
            return value, (aux, [layer.values[variable] for variable in written])

        (value, (aux, new)), grads = jax.value_and_grad(inner, has_aux=True)([v.value for v in flat])
        for variable, array in zip(written, new, strict=True):
            _write_through(variable, array)
        mode = _context.current()
        if mode is not None and mode.ledger is not None and mode.kind is Kind.CROSS:
            grads = mode.ledger.gradients_across(grads)
        return ((value, aux) if has_aux else value), jax.tree.unflatten(tree, grads)

    return call


def grad(
    function: Callable[..., Any], variables: Sequence[Variable] | Any, has_aux: bool = False
) -> Callable[..., Any]:
    """As `value_and_grad`, without the value; with ``has_aux=True`` returns ``(gradients, aux)``.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> print(rx.grad(lambda: w.value ** 2, w)())
    6.0
    """
    both = value_and_grad(function, variables, has_aux)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return call


def _write_through(variable: Variable, value: Any) -> None:
    """Carries out a write that was already combined over replicas when it was made."""
    layer = overlay.accepting(variable)
    mode = _context.current()
    if layer is not None:
        layer.write(variable, value)
    elif mode is not None and mode.ledger is not None:
        mode.ledger.write(variable, value)
    else:
        storage.host_write(variable, value)


def _check_variables(flat: list[Any]) -> None:
    for leaf in flat:
        if not isinstance(leaf, Variable):
            raise _errors.not_a_variable("value_and_grad(f, variables)", leaf)
