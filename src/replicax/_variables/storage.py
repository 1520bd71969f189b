"""Where do a variable's numbers lie between steps, and how does the host read and write them?

A mirrored variable is one array at its placement's rest sharding. An on-read variable is one array with a leading replica
axis, laid over the replicas. The arrays are donated to compiled steps, so an array that was handed to the user is marked
`_shared` and copied before the next donation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from replicax import _errors
from replicax._options import VariableAggregation
from replicax._values import _blocks

if TYPE_CHECKING:
    from replicax._variables.variable import Variable


class Exports:
    """Arrays of variables that are in others' hands."""

    count = 0
    """How many were handed out since the process began; a program compares before it donates."""
    variables: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
    """Those whose array is out now, by their id."""


def initial_array(initial: Any, dtype: Any, shape: Sequence[int] | None, name: str) -> jax.Array:
    """The user's initial value as an array that nobody else holds, with a firm dtype."""
    with jax.ensure_compile_time_eval():
        value = initial() if callable(initial) and not hasattr(initial, "shape") else initial
        if value is None:
            raise _errors.no_initial_value(name)
        if isinstance(value, Tracer):
            raise _errors.traced_initial_value(name, value)
        try:
            array = jnp.array(value, dtype=dtype, copy=True)
        except _errors.ReplicaxError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise _errors.not_an_initial_value(name, value, dtype, error) from error
        if shape is not None and tuple(shape) != array.shape:
            if array.ndim:
                raise _errors.initial_shape(name, array, tuple(shape))
            array = jnp.broadcast_to(array, tuple(shape))
        if _is_weak(array):  # else the first step changes the type and the second call compiles again
            array = lax.convert_element_type(array, array.dtype)
        return array


def _is_weak(array: Any) -> bool:
    return getattr(array, "weak_type", False)  # arrays of random keys have no such thing


def rest(variable: Variable, value: jax.Array) -> jax.Array:
    """`value` laid where the variable rests."""
    placement = variable.placement
    if variable.on_read:
        stacked = jnp.broadcast_to(value[None], (placement.replicas, *value.shape))
        return jax.device_put(stacked, placement.split)
    return jax.device_put(value, variable.strategy.rest_sharding(variable))


def brought(variable: Variable, value: Any, before: Any) -> Any:
    """What host code adds to `before`, its arrays on the same devices: they may have been put on others."""
    if not isinstance(before, jax.Array) or isinstance(before, Tracer):
        return value
    here = before.sharding.device_set
    place = before.sharding if len(here) == 1 else variable.placement.mirrored

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
            return leaf
        if leaf.sharding.device_set == here:
            return leaf
        return jax.device_put(leaf, place)

    return jax.tree.map(one, value)


def checked(variable: Variable, value: Any, method: str) -> jax.Array:
    """`value` as an array of the variable's dtype and shape."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, _errors.ReplicaxError) or isinstance(value, (jax.Array, np.ndarray)):
            raise
        raise _errors.assigned_no_array(variable, value, method, error) from error
    if array.dtype != variable.dtype:
        if jnp.issubdtype(array.dtype, jnp.complexfloating) and not jnp.issubdtype(variable.dtype, jnp.complexfloating):
            raise _errors.assigned_dtype(variable, array, method)
        array = array.astype(variable.dtype)
    if _is_weak(array):
        array = lax.convert_element_type(array, array.dtype)
    if array.shape != variable.shape and not (variable.on_read and array.shape[1:] == variable.shape and array.ndim):
        raise _errors.assigned_shape(variable, array, method)
    return array


def host_write(variable: Variable, value: jax.Array) -> None:
    """A new value from host code; an on-read variable takes one value for all components, or all components at once."""
    value = jnp.array(value, copy=True)  # laying out may share memory with the user's array, and ours gets donated
    if variable.on_read and value.ndim == len(variable.shape) + 1:
        variable._array = jax.device_put(value, variable.placement.split)
    else:
        variable._array = rest(variable, value)
    _unshared(variable)


def share(variable: Variable) -> None:
    """Notes that somebody else may hold the array, so that it is copied before a step may donate it."""
    Exports.count += 1
    if not variable._shared:
        variable._shared = True
        Exports.variables[id(variable)] = variable


def host_value(variable: Variable) -> jax.Array:
    """What host code sees: the common value, or the components combined."""
    if not variable.on_read:
        share(variable)
        return variable._array
    return _combine(variable, variable._array)


def _combine(variable: Variable, stacked: jax.Array) -> jax.Array:
    if variable.placement.replicas == 1:
        return stacked[0]
    match variable.aggregation:
        case VariableAggregation.SUM:
            return jnp.sum(stacked, axis=0, dtype=stacked.dtype)
        case VariableAggregation.MEAN:
            return jnp.mean(stacked, axis=0)
        case VariableAggregation.ONLY_FIRST_REPLICA:
            return stacked[0]
    raise _errors.on_read_none(variable)


def stacked(variable: Variable) -> jax.Array:
    """All components of an on-read variable, as one array."""
    share(variable)
    return variable._array


def components(variable: Variable) -> tuple[jax.Array, ...]:
    """One array per local replica, on its own device."""
    share(variable)
    if variable.on_read:
        return tuple(block[0] for block in _blocks(variable._array))
    by_device = {shard.device: shard.data for shard in variable._array.addressable_shards}
    devices = variable.placement.local_devices
    if all(device in by_device for device in devices):
        whole = [by_device[device] for device in devices]
        if whole[0].shape != variable.shape:  # cut over the devices
            spread = jax.device_put(variable._array, variable.placement.mirrored)
            by_device = {shard.device: shard.data for shard in spread.addressable_shards}
            whole = [by_device[device] for device in devices]
        return tuple(whole)
    return (variable._array,) * (1 if variable.placement.apart else len(devices))


def component(variable: Variable, index: int) -> jax.Array:
    """One component of an on-read variable, by its number among those of this process."""
    return _blocks(variable._array)[index][0]


def write_component(variable: Variable, index: int, value: jax.Array) -> None:
    """A new value for one component of an on-read variable; the others stay where they are."""
    replica, old = variable.placement.local_replicas[index], variable._array
    pieces = [
        jax.device_put(value[None], shard.device) if (shard.index[0].start or 0) == replica else shard.data
        for shard in old.addressable_shards
    ]
    variable._array = jax.make_array_from_single_device_arrays(old.shape, old.sharding, pieces)


def unshare(variable: Variable) -> None:
    """Makes sure nobody else holds the array, so that it can be donated."""
    if variable._shared:
        variable._array = jnp.copy(variable._array)
        _unshared(variable)


def release(donated: Any) -> None:
    """Before a step takes over the buffers of arguments: variables whose arrays are among them get their own."""
    buffers = set(map(id, jax.tree.leaves(donated)))
    for reference in Exports.variables.valuerefs() if buffers else ():
        variable = reference()
        if variable is not None and id(variable._array) in buffers:
            unshare(variable)


def _unshared(variable: Variable) -> None:
    variable._shared = False
    Exports.variables.pop(id(variable), None)


def stand_in(variable: Variable) -> jax.Array:
    """An array with the shape one replica sees, to be recognised as this variable in a traced program."""
    if variable.on_read:
        return variable._array.addressable_shards[0].data
    return variable._array
