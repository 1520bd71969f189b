"""Where should a combined value go? `reduce_to` and its relatives: strategies' reductions, sent to chosen devices.

A *destination* is whatever has devices: a variable, a value, a device or its name. On one device the result is an array
there, on several an array with a copy on each. Inside a run the result is on every replica already and stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from replicax import _context, _errors
from replicax._cross.slices import is_slices
from replicax._devices import resolve
from replicax._options import CommunicationOptions, ReduceOp, VariableAggregation
from replicax._placement import Placement
from replicax._values import PARTS, TRACED, PerReplica
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

PyTree = Any


def reduce_to(
    strategy: Strategy,
    reduce_op: ReduceOp | str,
    value: PyTree,
    destinations: Any,
    options: CommunicationOptions | None = None,
) -> PyTree:
    """`value` combined over the replicas, on the devices of `destinations`."""
    (result,) = batch_reduce_to(strategy, reduce_op, [(value, destinations)], options)
    return result


def batch_reduce_to(
    strategy: Strategy,
    reduce_op: ReduceOp | str,
    pairs: Iterable[tuple[PyTree, Any]],
    options: CommunicationOptions | None = None,
) -> list[PyTree]:
    """The values of (value, destinations) pairs, combined over the replicas in one exchange."""
    op = _op(reduce_op)
    pairs = [_pair(pair) for pair in pairs]
    devices = [devices_of(strategy.placement, destinations) for _, destinations in pairs]
    mode = _context.require_cross(strategy, "strategy.extended.reduce_to(...)")
    values = [value for value, _ in pairs]
    if mode is not None and mode.ledger is not None:
        return _reduce_in_run(strategy, mode.ledger, op, values, options)
    reduced = [strategy.reduce(op, value, options=options) for value in values]
    return [
        send(strategy.placement, result, there) if _differs(value) or strategy.num_replicas_in_sync == 1 else result
        for value, result, there in zip(values, reduced, devices, strict=True)
    ]


def broadcast_to(strategy: Strategy, value: PyTree, destinations: Any) -> PyTree:
    """A copy of `value` on each device of `destinations`. Python numbers stay what they are."""
    mode = _context.require_cross(strategy, "strategy.extended.broadcast_to(...)")
    devices = devices_of(strategy.placement, destinations)
    if _differs(value):
        raise _errors.broadcast_of_per_replica(value)
    if mode is not None and mode.ledger is not None:
        return value
    return send(strategy.placement, value, devices)


def send(placement: Placement, value: PyTree, devices: Sequence[jax.Device]) -> PyTree:
    """The arrays of `value`, copied to `devices`."""
    sharding = _sharding(placement, devices)

    def one(leaf: Any) -> Any:
        return jax.device_put(leaf, sharding) if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) else leaf

    return jax.tree.map(one, value)


def devices_of(placement: Placement, destinations: Any) -> tuple[jax.Device, ...]:
    """The devices that a destination stands for; None stands for those of the replicas."""
    everywhere = tuple(placement.mesh.devices.flat)
    if destinations is None:
        return everywhere
    if isinstance(destinations, (str, list, tuple)) and not destinations:
        raise _errors.empty_destinations()
    if isinstance(destinations, (str, jax.Device)):
        return (resolve(destinations),)
    if isinstance(destinations, (list, tuple)) and all(isinstance(word, (str, jax.Device)) for word in destinations):
        return tuple(resolve(word) for word in destinations)
    if isinstance(destinations, Variable):
        return destinations.devices
    if isinstance(destinations, PerReplica):
        return everywhere if destinations.form == PARTS else devices_of(placement, destinations.data)
    if is_slices(destinations):
        return devices_of(placement, destinations.values)
    if isinstance(destinations, jax.Array):
        return everywhere if isinstance(destinations, jax.core.Tracer) else tuple(destinations.devices())
    raise _errors.not_a_destination(destinations)


def _sharding(placement: Placement, devices: Sequence[jax.Device]) -> Sharding:
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    if set(devices) == set(placement.mesh.devices.flat):
        return placement.mirrored
    return NamedSharding(Mesh(np.array(devices, dtype=object), ("copies",)), PartitionSpec())


def _reduce_in_run(
    strategy: Strategy, ledger: Any, op: ReduceOp, values: list[PyTree], options: CommunicationOptions | None
) -> list[PyTree]:
    """Traced values in one exchange, so that small ones can travel together; anything else by itself."""
    leaves, tree = jax.tree.flatten(values, is_leaf=lambda leaf: isinstance(leaf, PerReplica) or is_slices(leaf))
    together = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]
    reduced = ledger.all_reduce(op, ledger.to_replica([leaves[i] for i in together]), options) if together else []
    results = dict(zip(together, reduced, strict=True))
    return jax.tree.unflatten(
        tree, [results[i] if i in results else strategy.reduce(op, leaf) for i, leaf in enumerate(leaves)]
    )


def _is_traced(leaf: Any) -> bool:
    return any(part.form == TRACED for part in _per_replica_leaves(leaf))


def _differs(tree: PyTree) -> bool:
    return bool(_per_replica_leaves(tree)) or getattr(tree, "on_read", False)


def _per_replica_leaves(tree: PyTree) -> list[PerReplica]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    return [leaf for leaf in leaves if isinstance(leaf, PerReplica)]


def _op(reduce_op: Any) -> ReduceOp:
    if isinstance(reduce_op, VariableAggregation):
        raise _errors.aggregation_as_reduce_op(reduce_op)
    return ReduceOp.parse(reduce_op)


def _pair(pair: Any) -> tuple[PyTree, Any]:
    if not isinstance(pair, tuple):
        raise _errors.not_a_pair(pair, "Each element of `value_destination_pairs` should be a tuple.")
    if len(pair) != 2:
        raise _errors.not_a_pair(pair, "Each element of `value_destination_pairs` should be a tuple of size 2.")
    return pair
