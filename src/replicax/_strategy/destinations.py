"""Where should a combined value go? `reduce_to` and its relatives: a strategy's reductions, sent to chosen devices.

On one device the result is an array there, on several an array with a copy on each. Inside a run the result is on every
replica already and stays there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context, _errors
from replicax._cross.destinations import copies, devices_of
from replicax._cross.parts import is_concrete
from replicax._options import CommunicationOptions, ReduceOp, VariableAggregation
from replicax._placement import Placement
from replicax._values import PerReplica
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
    pairs = [checked_pair(pair) for pair in pairs]
    devices = [devices_or_all(strategy.placement, destinations) for _, destinations in pairs]
    mode = _context.require_cross(strategy, "strategy.extended.reduce_to(...)")
    values = [value for value, _ in pairs]
    reduced = strategy.reduce(op, values, options=options)
    if mode is not None and mode.ledger is not None:
        return reduced
    return [
        copies(result, there) if _differs(value) or strategy.num_replicas_in_sync == 1 else result
        for value, result, there in zip(values, reduced, devices, strict=True)
    ]


def broadcast_to(strategy: Strategy, value: PyTree, destinations: Any) -> PyTree:
    """A copy of `value` on each device of `destinations`. Python numbers stay what they are."""
    _context.require_cross(strategy, "strategy.extended.broadcast_to(...)")
    if _differs(value):
        raise _errors.broadcast_of_per_replica(value)
    devices = devices_or_all(strategy.placement, destinations)
    mode = _context.current()
    in_run = mode is not None and mode.ledger is not None

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            leaf = leaf.value
        if in_run or isinstance(leaf, (int, float)) or not is_concrete(leaf):
            return leaf
        return strategy.cross_device_ops.broadcast(leaf, devices)

    return jax.tree.map(one, value)


def sent(placement: Placement, value: PyTree, destinations: Any) -> PyTree:
    """`value` where it should go; inside a run it is there already."""
    devices = devices_or_all(placement, destinations)
    mode = _context.current()
    return copies(value, devices) if mode is None or mode.ledger is None else value


def devices_or_all(placement: Placement, destinations: Any) -> tuple[jax.Device, ...]:
    """The devices that a destination stands for; None stands for all of the replicas."""
    return tuple(placement.mesh.devices.flat) if destinations is None else devices_of(destinations)


def checked_pair(pair: Any) -> tuple[PyTree, Any]:
    """`pair`, if it is a value and its destinations."""
    if not isinstance(pair, tuple):
        raise _errors.not_a_pair(pair, "Each element of `value_destination_pairs` should be a tuple.")
    if len(pair) != 2:
        raise _errors.not_a_pair(pair, "Each element of `value_destination_pairs` should be a tuple of size 2.")
    return pair


def _differs(tree: PyTree) -> bool:
    return bool(_per_replica_leaves(tree)) or getattr(tree, "on_read", False)


def _per_replica_leaves(tree: PyTree) -> list[PerReplica]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    return [leaf for leaf in leaves if isinstance(leaf, PerReplica)]


def _op(reduce_op: Any) -> ReduceOp:
    if isinstance(reduce_op, VariableAggregation):
        raise _errors.aggregation_as_reduce_op(reduce_op)
    return ReduceOp.parse(reduce_op)
