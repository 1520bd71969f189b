"""How is a variable changed from code that speaks for all replicas? `update`: a function, and the variable to update.

A mirrored variable is one value to the host and one program to a compiled run, so the function runs once and all copies
change alike. An eager run, and an on-read variable on the host, has components that can be told apart. There the
function runs once for each, and while it runs the variable stands for that component.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context, _errors
from replicax._context import Kind, Mode
from replicax._devices import resolve
from replicax._values import PerReplica, lay_out, regroup, select_replica
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

PyTree = Any


def update(
    strategy: Strategy,
    variable: Variable,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    group: bool = True,
) -> PyTree:
    """Runs ``fn(variable, *args, **kwargs)`` where assignments change exactly the component that is being updated.

    Args:
      group: True returns what `fn` returned; False a tuple of components in place of each leaf of it.
    """
    _check_variable(strategy, variable)
    call = f"strategy.extended.update({variable.name}, fn, ...)"
    args, kwargs = _context.checked_call("strategy.extended.update(var, {})", "fn", fn, args, kwargs)
    apart = variable.on_read and strategy.num_replicas_in_sync > 1
    alone = variable.placement.parameter_device is not None

    def across(strategy: Strategy, /, *args: Any, **kwargs: Any) -> PyTree:
        return _carry_out(strategy, call, fn, (variable, *args), kwargs, apart, alone, group)

    return _across(strategy, call, across, args, kwargs)


def update_non_slot(
    strategy: Strategy,
    colocate_with: Any,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    group: bool = True,
) -> PyTree:
    """Runs ``fn(*args, **kwargs)`` for state that belongs to no variable, where `non_slot_devices` says it lies."""
    call = "strategy.extended.update_non_slot(devices, fn, ...)"
    args, kwargs = _context.checked_call("strategy.extended.update_non_slot(devices, {})", "fn", fn, args, kwargs)
    alone = isinstance(colocate_with, Variable)
    if not alone and strategy.num_replicas_in_sync > 1:
        _check_devices(strategy, colocate_with)

    def across(strategy: Strategy, /, *args: Any, **kwargs: Any) -> PyTree:
        return _carry_out(strategy, call, fn, args, kwargs, False, alone, group)

    return _across(strategy, call, across, args, kwargs)


def non_slot_devices(strategy: Strategy, variables: Sequence[Variable]) -> Any:
    """Where state that belongs to no variable should lie: all devices, or beside one variable that all agree on."""
    if strategy.placement.parameter_device is None and strategy is not _context.default_strategy():
        return strategy.placement.devices
    if not variables:
        raise _errors.no_variables_for_non_slot()
    return min(variables, key=lambda variable: variable.name)


def _across(strategy: Strategy, call: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> PyTree:
    """Calls `fn(strategy, ...)` across replicas; code inside a replica meets the other replicas first."""
    mode = _context.current()
    if mode is not None and mode.replica is not None:
        _context.require_scope(strategy, call)
        return mode.replica.merge_call(fn, args, kwargs)
    return fn(strategy, *args, **(kwargs or {}))


def _carry_out(
    strategy: Strategy, call: str, fn: Callable[..., Any], args: Any, kwargs: Any, apart: bool, alone: bool, group: bool
) -> PyTree:
    mode = _context.require_cross(strategy, call)
    ledger = None if mode is None else mode.ledger
    if ledger is not None:
        results = ledger.update(fn, args, kwargs)
    elif apart:
        results = []
        for i in range(len(strategy.placement.local_replicas)):
            own, own_kwargs = select_replica(i, (args, kwargs))
            results.append(_on_host(strategy, fn, own, own_kwargs, i))
    else:
        _refuse_per_replica(call, args, kwargs)
        results = [_on_host(strategy, fn, args, kwargs)]
    merged = results[0] if len(results) == 1 else _merged(strategy, results, apart)
    return merged if group else ungrouped(strategy, merged, alone)


def _on_host(
    strategy: Strategy, fn: Callable[..., Any], args: Any, kwargs: Any, component: int | None = None
) -> PyTree:
    with _context.push(Mode(strategy, Kind.UPDATE, update_id=component)):
        return fn(*args, **kwargs)


def _merged(strategy: Strategy, results: Sequence[PyTree], apart: bool) -> PyTree:
    """One result for all components: those of a mirrored variable were given the same update."""
    return regroup(results, (lambda parts: lay_out(strategy.placement, parts)) if apart else (lambda parts: parts[0]))


def ungrouped(strategy: Strategy, merged: PyTree, alone: bool, kind: type[Any] = tuple) -> PyTree:
    """Each leaf as a tuple, or list, with one entry per component; a variable that exists only once has one."""

    def components(leaf: Any) -> Any:
        return kind((leaf,) if alone else strategy.local_entries(leaf))

    return jax.tree.map(components, merged, is_leaf=lambda leaf: leaf is None or isinstance(leaf, PerReplica))


def _check_variable(strategy: Strategy, variable: Any) -> None:
    if not isinstance(variable, Variable):
        raise _errors.update_of_no_variable(variable)
    if variable.strategy is not strategy and strategy.num_replicas_in_sync > 1:
        raise _errors.update_of_foreign_variable(variable, strategy)


def _check_devices(strategy: Strategy, devices: Any) -> None:
    words = devices if isinstance(devices, (tuple, list)) else ()
    if not words or not set(map(resolve, words)) <= set(strategy.placement.mesh.devices.flat):
        raise _errors.not_non_slot_devices(devices)


def _refuse_per_replica(call: str, args: Any, kwargs: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    for path, leaf in leaves:
        if isinstance(leaf, PerReplica):
            raise _errors.update_with_per_replica(call, jax.tree_util.keystr(path[1:]), leaf)
