"""How were values of towers added up in 2018? `CrossTowerOps` and its two kinds, over the cross-device ops of today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

from replicax._cross.algorithms import AllReduceAlgorithm, HierarchicalAlgorithm
from replicax._cross.destinations import copies, devices_of
from replicax._cross.ops import Collective, CrossDeviceOps, ReductionToOneDevice
from replicax._cross.packing import Packing
from replicax._options import CommunicationOptions, ReduceOp, VariableAggregation, is_count
from replicax._values import PerReplica
from replicax.compat.tower import _reduce, _refusals
from replicax.compat.tower._values import combine_items, map_outputs


class CrossTowerOps:
    """How the values of towers become one value. Given to a strategy, or called with values by itself.

    To write one, fill in `_reduce`; `_batch_reduce` and `_broadcast` may be filled in too. Overridden in one of those that
    are there, they are asked as well, and may hand on to ``super()``.

    >>> from replicax.compat import tower
    >>> class Largest(tower.CrossTowerOps):
    ...     def _reduce(self, aggregation, per_device_value, destinations):
    ...         return max(per_device_value.values)
    >>> print(Largest().reduce("sum", tower.PerDevice((1.0, 2.0)), "cpu:0"))
    2.0
    """

    _ops: CrossDeviceOps

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._ops = _Hooks(made)  # here, as classes of that time do not all call __init__ of this one
        return made

    def __init__(self) -> None: ...

    def reduce(
        self,
        aggregation: Any = None,
        per_device_value: Any = _reduce.REQUIRED,
        destinations: Any = None,
        *,
        method_string: Any = None,
        reduce_op: Any = None,
    ) -> Any:
        """Combines the components of `per_device_value`, with a copy on each device of `destinations`."""
        op = _op(aggregation, method_string, reduce_op)
        if per_device_value is _reduce.REQUIRED:
            raise _refusals.missing_argument("reduce(aggregation, per_device_value, destinations)", "per_device_value")
        items = map_outputs(per_device_value)
        where = per_device_value if destinations is None else destinations
        if items is not None:
            return copies(combine_items(op, items), () if destinations is None else devices_of(destinations))
        return self._ops.reduce(op, per_device_value, where)

    def batch_reduce(
        self,
        aggregation: Any = None,
        value_destination_pairs: Any = _reduce.REQUIRED,
        *,
        method_string: Any = None,
        reduce_op: Any = None,
    ) -> list[Any]:
        """As `reduce` for a list of pairs ``(value, destinations)``, which may travel together."""
        op = _op(aggregation, method_string, reduce_op)
        if value_destination_pairs is _reduce.REQUIRED:
            raise _refusals.missing_argument("batch_reduce(aggregation, pairs)", "value_destination_pairs")
        pairs = [pair if not _is_open(pair) else (pair[0], pair[0]) for pair in value_destination_pairs]
        return self._ops.batch_reduce(op, pairs)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """A copy of one value on each device of `destinations`."""
        return self._ops.broadcast(tensor, destinations)

    def _reduce(self, aggregation: Any, per_device_value: PerReplica, destinations: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}._reduce(...) says how values are combined.")

    def _batch_reduce(self, aggregation: Any, value_destination_pairs: Sequence[tuple[PerReplica, Any]]) -> list[Any]:
        return [self._reduce(aggregation, *pair) for pair in value_destination_pairs]

    def _broadcast(self, tensor: Any, destinations: Any) -> Any:
        return CrossDeviceOps.broadcast_implementation(self._ops, tensor, destinations)


class _Ready(CrossTowerOps):
    """One with an algorithm of today behind it. A class that overrides a hook of it is asked, inside of steps too."""

    def __init__(self, ready: CrossDeviceOps) -> None:
        self._ready = ready
        hooks = ("_reduce", "_batch_reduce", "_broadcast")
        self._ops = _Hooks(self) if any(self._overrides(hook) for hook in hooks) else ready

    def _overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(_Ready, hook)

    def _reduce(self, aggregation: Any, per_device_value: PerReplica, destinations: Any) -> Any:
        op = aggregation if isinstance(aggregation, ReduceOp) else _op(aggregation, None, None)
        return self._ready.reduce_implementation(op, per_device_value, destinations, CommunicationOptions())

    def _batch_reduce(self, aggregation: Any, value_destination_pairs: Sequence[tuple[PerReplica, Any]]) -> list[Any]:
        if self._overrides("_reduce"):
            return super()._batch_reduce(aggregation, value_destination_pairs)
        op = aggregation if isinstance(aggregation, ReduceOp) else _op(aggregation, None, None)
        return self._ready.batch_reduce_implementation(op, value_destination_pairs, CommunicationOptions())


class ReductionToOneDeviceCrossTowerOps(_Ready):
    """Adds up on one device, always in the order of the towers, and copies the result to where it should go.

    Args:
      reduce_to_device: Where to add up; by default the first device of the destination.
      accumulation_fn: Adds up a list of arrays in place of ``a + b + ...``.
    """

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        super().__init__(ReductionToOneDevice(reduce_to_device, accumulation_fn))


class AllReduceCrossTowerOps(_Ready):
    """All devices exchange values at the same time.

    Args:
      all_reduce_alg: ``"nccl"`` is the platform's own all-reduce; any other word reduces in two levels.
      num_packs: With more than one, values are joined and cut into so many pieces.
      agg_small_grads_max_bytes: With ``num_packs=0``, neighbours of at most so many bytes travel together.
      agg_small_grads_max_group: At most so many of them.
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        if not isinstance(all_reduce_alg, str):
            raise _refusals.no_algorithm(all_reduce_alg)
        for name, number in {
            "num_packs": num_packs,
            "agg_small_grads_max_bytes": agg_small_grads_max_bytes,
            "agg_small_grads_max_group": agg_small_grads_max_group,
        }.items():
            if not is_count(number, at_least=0):
                raise _refusals.no_whole_number(name, number)
        packing = Packing(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)
        algorithm = AllReduceAlgorithm(packing) if all_reduce_alg == "nccl" else HierarchicalAlgorithm(packing)
        super().__init__(Collective(algorithm))


class _Hooks(CrossDeviceOps):
    """A cross-device op of today that asks the hooks of 2018."""

    def __init__(self, front: CrossTowerOps) -> None:
        self._front = front

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        return self._front._reduce(_aggregation(reduce_op), per_replica_value, destinations)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Any, options: CommunicationOptions
    ) -> list[Any]:
        return self._front._batch_reduce(_aggregation(reduce_op), value_destination_pairs)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        return self._front._broadcast(tensor, destinations)


def as_cross_device_ops(given: Any) -> CrossDeviceOps | None:
    """What a strategy was given to add up with, as the engine takes it."""
    return given._ops if isinstance(given, CrossTowerOps) else given


def _aggregation(op: ReduceOp) -> VariableAggregation | ReduceOp:
    """The word of 2018 for a reduction, if there was one."""
    return VariableAggregation[op.name] if op.name in VariableAggregation.__members__ else op


def _op(aggregation: Any, method_string: Any, reduce_op: Any) -> ReduceOp:
    op = _reduce.method(aggregation, method_string, reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise _refusals.not_a_reduction(op)
    return op


def _is_open(pair: Any) -> bool:
    """Whether a pair leaves out where its result should go."""
    return isinstance(pair, tuple) and len(pair) == 2 and pair[1] is None
