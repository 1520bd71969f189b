"""Who else has a say when a variable is made? Creators, and variables that have to lie beside others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context, _errors
from replicax._devices import resolve
from replicax._placement import Placement
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

Creator = Callable[..., Any]


@contextlib.contextmanager
def variable_creator_scope(creator: Creator) -> Iterator[None]:
    """Lets `creator` take part in making every variable of a ``with`` block.

    For code that cannot change the code it calls: give all variables of somebody's layer another dtype, keep a list
    of them, share them. `creator` is called with the next creator and the options of the variable, as keywords, and
    returns a variable, usually the one that the next creator makes. Of nested blocks the innermost is asked first.

    >>> import replicax as rx
    >>> made = []
    >>> def listed(next_creator, **options):
    ...     variable = next_creator(**options | {"name": f"model/{options['name']}"})
    ...     made.append(variable.name)
    ...     return variable
    >>> with rx.variable_creator_scope(listed):
    ...     w = rx.Variable(1.0, name="w")
    >>> made
    ['model/w']
    """
    creators = _context.thread.creators
    creators.append(creator)
    try:
        yield
    finally:
        if creators[-1] is not creator:
            raise _errors.scope_nesting("Variable creator")
        creators.pop()


def colocated(strategy: Strategy, beside: Any) -> AbstractContextManager[None]:
    """Variables made in this block lie where `beside` lies: a variable of the strategy, a device or several devices."""
    call = "colocate_vars_with(...)"
    _context.require_scope(strategy, call)
    if isinstance(beside, Variable):
        if beside.strategy is not strategy:
            raise _errors.colocated_with_foreign(beside, strategy)
    else:
        beside = _devices(beside)

    def create(next_creator: Creator, **options: Any) -> Any:
        _context.require_scope(strategy, call)
        return next_creator(**options | {"colocate_with": beside})

    return variable_creator_scope(create)


def placed_beside(placement: Placement, beside: Any) -> Placement:
    """Where a variable of a strategy with this placement belongs if it was asked to lie beside something."""
    if beside is None:
        return placement
    if isinstance(beside, Variable):
        return beside.placement
    devices = _devices(beside)
    if set(devices) == set(placement.devices) and placement.parameter_device is None:
        return placement
    home, *others = devices
    if others:
        raise _errors.colocated_with_some_devices(devices, placement.devices)
    return dataclasses.replace(placement, parameter_device=home)


def _devices(beside: Any) -> tuple[jax.Device, ...]:
    if isinstance(beside, (str, jax.Device)):
        return (resolve(beside),)
    if isinstance(beside, Sequence) and beside and all(isinstance(word, (str, jax.Device)) for word in beside):
        return tuple(resolve(word) for word in beside)
    raise _errors.colocated_with_nothing(beside)
