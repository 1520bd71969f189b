"""What is a cross-device op, and which are there?

A cross-device op says how one value per replica becomes one value. A strategy is given one, and uses it inside compiled
steps (`algorithm`) as well as on the host (`reduce` and its relatives). Users write their own by filling in hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _context, _errors
from replicax._cross import dtypes, host, in_step, parts
from replicax._cross.algorithms import AllReduceAlgorithm, HierarchicalAlgorithm, OneDeviceAlgorithm
from replicax._cross.destinations import copies, devices_of, in_order, placement_of, placement_on
from replicax._cross.packing import Packing
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._options import CommunicationOptions, ReduceOp, is_count
from replicax._placement import Placement
from replicax._values import PARTS, TRACED, PerReplica, components, is_per_replica, lay_out, parts_of

PyTree = Any
Pairs = Sequence[tuple[Any, Any]]


class CrossDeviceOps:
    """How one value per replica becomes one value. Make your own when none of those that there are will do.

    Fill in `reduce_implementation`, in ordinary code over ``per_replica_value.values``; `broadcast_implementation` and
    `gather` work as they are. The same code then serves `strategy.reduce`, an eager run and, traced, compiled steps,
    where each replica receives what the others hold and computes the result for itself. The gradient of a sum or mean
    is, whatever your code does, the sum or mean of the gradients that come back.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> class Careful(rx.CrossDeviceOps):
    ...     '''Leaves out replicas whose value is not a number.'''
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         values = jnp.stack(per_replica_value.values)
    ...         return jnp.nanmean(values, 0) if reduce_op is rx.ReduceOp.MEAN else jnp.nansum(values, 0)
    >>> strategy = rx.MirroredStrategy(jax.devices()[:3], cross_device_ops=Careful())
    >>> step = lambda x: rx.get_replica_context().all_reduce("mean", x)
    >>> print(strategy.run(step, (rx.PerReplica((1.0, float("nan"), 3.0)),)))
    2.0
    """

    _algorithm: in_step.Algorithm | None = None
    _asks_hooks = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = {"reduce_implementation", "batch_reduce_implementation"}
        if hooks & vars(cls).keys() and "_asks_hooks" not in vars(cls):
            cls._asks_hooks = (
                True  # whoever overrides a hook of an op that has an algorithm wants it called in steps too
            )

    @property
    def algorithm(self) -> in_step.Algorithm | None:
        """How sums travel inside a compiled step; None: each replica calls the hooks."""
        return None if self._asks_hooks else self._algorithm

    def __repr__(self) -> str:
        return f"rx.{type(self).__name__}()"

    # -- for the caller

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines one value per replica and puts the result on the devices of `destinations`.

        Strategies do this for you; call it to try an op by itself.

        Args:
          reduce_op: A member of `rx.ReduceOp`; words are for strategies.
          per_replica_value: A `PerReplica` of arrays or `IndexedSlices`, or a variable. A single array counts as one
            replica's, an array with copies on several devices as one for each.
          destinations: A value or variable (its devices), a device or its name.

        Returns:
          An array on that device, or one with a copy on each of those devices.

        >>> import replicax as rx
        >>> ops = rx.ReductionToOneDevice()
        >>> print(ops.reduce(rx.ReduceOp.MEAN, rx.PerReplica((1.0, 2.0)), "cpu:0"))
        1.5
        """
        op = _checked_op(reduce_op)
        value, destinations = _checked_pair((per_replica_value, destinations))
        options = CommunicationOptions.parse(options)
        result = self._at_once(op, value, destinations, options)
        if result is not None:
            return result
        return self.reduce_implementation(op, self._for_hooks(value, destinations), destinations, options)

    def batch_reduce(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions | None = None
    ) -> list[Any]:
        """As `reduce`, for many values at once, so that small ones can travel together.

        >>> import replicax as rx
        >>> ops = rx.ReductionToOneDevice()
        >>> pairs = [(rx.PerReplica((0.0, 1.0)), "cpu:0"), (rx.PerReplica((1.0, 2.0)), "cpu:1")]
        >>> [float(x) for x in ops.batch_reduce(rx.ReduceOp.SUM, pairs)]
        [1.0, 3.0]
        """
        op = _checked_op(reduce_op)
        if not isinstance(value_destination_pairs, Iterable):
            raise _errors.not_pairs(value_destination_pairs)
        pairs = [_checked_pair(pair) for pair in value_destination_pairs]
        options = CommunicationOptions.parse(options)
        results = [self._at_once(op, *pair, options) for pair in pairs]
        left = [
            (self._for_hooks(value, destinations), destinations)
            for (value, destinations), result in zip(pairs, results, strict=True)
            if result is None
        ]
        reduced = iter(self.batch_reduce_implementation(op, left, options) if left else [])
        return [next(reduced) if result is None else result for result in results]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Puts a copy of one array on each device of `destinations`.

        >>> import jax, replicax as rx
        >>> copy = rx.NcclAllReduce().broadcast(3.0, "cpu:1")
        >>> print(copy, copy.devices() == {jax.devices()[1]})
        3.0 True
        """
        devices_of(destinations)
        if any(isinstance(leaf, PerReplica) for leaf in jax.tree.leaves(tensor, is_leaf=is_per_replica)):
            raise _errors.broadcast_of_per_replica(tensor)
        return self.broadcast_implementation(tensor, destinations)

    def gather(
        self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions | None = None
    ) -> jax.Array:
        """Concatenates the replicas' values along `axis`, on the devices of `destinations`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> value = rx.PerReplica((jnp.array([1, 2]), jnp.array([3])))
        >>> print(rx.ReductionToOneDevice().gather(value, "cpu:0", axis=0))
        [1 2 3]
        """
        value, _ = _checked_pair((per_replica_value, destinations))
        if value.form == TRACED:
            return in_step.all_gather(_placement_of_run(), value.data, axis)
        placement = placement_of(value)
        if placement is not None:
            return copies(host.gather(placement, value, axis), devices_of(destinations))
        whole = parts.concatenate(parts.together(value.data, _first_device(destinations)), axis)
        return copies(whole, devices_of(destinations))

    # -- hooks

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """The hook behind `reduce`: combine ``per_replica_value.values`` into one value."""
        raise NotImplementedError(f"{type(self).__name__}.reduce_implementation(...) says how values are combined.")

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """The hook behind `batch_reduce`, and what compiled steps call: by default one reduction after the other."""
        return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """The hook behind `broadcast`."""
        array = jax.tree.map(functools.partial(dtypes.as_array, "broadcast"), tensor)
        return copies(array, devices_of(destinations))

    def _at_once(self, op: ReduceOp, value: PerReplica, destinations: Any, options: CommunicationOptions) -> Any:
        """The result where no hook need be asked: there is one component, or a step is being traced."""
        if _is_traced(value):
            return in_step.all_reduce(self, _placement_of_run(), op, _local(value), options)
        placement = placement_of(value)
        if (len(value.data) if placement is None else placement.replicas) == 1:
            (only,) = components(value)
            arrays = jax.tree.map(functools.partial(dtypes.checked, op), only, is_leaf=lambda leaf: leaf is None)
            return self.broadcast_implementation(arrays, destinations)
        if placement is not None and not value.data.is_fully_addressable:
            (result,) = host.reduce_laid_out(self, placement, op, [value], None, options)
            return copies(result, devices_of(destinations))
        return None

    def _for_hooks(self, value: PerReplica, destinations: Any) -> PerReplica:
        """A value as hooks of a user see it: all components on one device, so that they can be calculated with."""
        if not self._asks_hooks:
            return value
        return PerReplica(tuple(parts.together(components(value), _first_device(destinations))))


class ReductionToOneDevice(CrossDeviceOps):
    """Collects the values on one device, adds them up in the order of the replicas, and hands the sum out.

    The order is always the same and so are the bits: in every run, compiled or eager, inside a step or on the host.
    That is what to choose when two runs must be compared digit by digit; `NcclAllReduce` is faster for large values.
    (The gradients that come back *through* a reduction are added by the platform's own all-reduce.)

    Args:
      reduce_to_device: Where values on the host are added up; by default the first device of the destination.
      accumulation_fn: Adds up a list of arrays of one shape, in place of ``a + b + ...``. It must be a sum: a mean
        divides what it returns by the number of replicas.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2], cross_device_ops=rx.ReductionToOneDevice())
    >>> print(strategy.reduce("sum", rx.PerReplica((1.0, 2.0))))
    3.0
    """

    _asks_hooks = False

    def __init__(
        self,
        reduce_to_device: jax.Device | str | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise _errors.not_an_accumulation(accumulation_fn)
        self._device = None if reduce_to_device is None else devices_of(reduce_to_device)[0]
        self._accumulate = accumulation_fn
        self._algorithm = OneDeviceAlgorithm(accumulation_fn)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        here = parts.together(components(per_replica_value), self._device or _first_device(destinations))
        return copies(parts.combine(reduce_op, here, self._accumulate), devices_of(destinations))


class Collective(CrossDeviceOps):
    """All devices that hold the values take part, and get the result, at the same time."""

    _asks_hooks = False

    def __init__(self, algorithm: in_step.Algorithm) -> None:
        self._algorithm = algorithm

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        (result,) = self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)
        return result

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """One exchange for all values that lie where their results should go; the others by way of one device."""
        results: dict[int, Any] = {}
        exchanges: dict[Placement, list[tuple[int, PerReplica]]] = {}
        for i, (value, destinations) in enumerate(value_destination_pairs):
            laid, placement = _laid_out(value)
            if placement is not None and set(in_order(placement.mirrored)) == set(devices_of(destinations)):
                exchanges.setdefault(placement, []).append((i, laid))
            else:
                results[i] = _BY_ONE_DEVICE.reduce_implementation(reduce_op, value, destinations, options)
        for placement, values in exchanges.items():
            reduced = host.reduce_laid_out(self, placement, reduce_op, [value for _, value in values], None, options)
            results.update((i, result) for (i, _), result in zip(values, reduced, strict=True))
        return [results[i] for i in range(len(results))]


class NcclAllReduce(Collective):
    """The platform's own all-reduce, small arrays packed; what strategies use unless told otherwise.

    That is NCCL on GPUs, the interconnect on TPUs, gloo between processes on CPU and threads inside one.

    Args:
      num_packs: 1 joins small arrays as was measured to be best; 0 joins nothing; more joins everything and cuts it
        into so many pieces. Results are the same.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2], cross_device_ops=rx.NcclAllReduce(num_packs=2))
    >>> step = lambda x: rx.get_replica_context().all_reduce("sum", {"w": x, "b": x * 10})
    >>> sums = strategy.run(step, (rx.PerReplica((1.0, 2.0)),))
    >>> print(sums["w"], sums["b"])
    3.0 30.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(AllReduceAlgorithm(_packing(self, num_packs)))


class HierarchicalCopyAllReduce(Collective):
    """Adds up within groups of replicas first and then between the groups.

    The groups are the hosts, if there are several, so that only a share of each value crosses the slower links between
    them; on one host they are groups of about half of the replicas. (A prime number of replicas is one group.)

    Args:
      num_packs: As for `NcclAllReduce`.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:4], cross_device_ops=rx.HierarchicalCopyAllReduce())
    >>> print(strategy.reduce("sum", rx.PerReplica((1.0, 2.0, 3.0, 4.0))))
    10.0
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(HierarchicalAlgorithm(_packing(self, num_packs)))


_BY_ONE_DEVICE = ReductionToOneDevice()


def chosen(cross_device_ops: CrossDeviceOps | None) -> CrossDeviceOps:
    """What a strategy was given as its cross-device op, or the default."""
    if cross_device_ops is None:
        return NcclAllReduce()
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise _errors.not_cross_device_ops(cross_device_ops)
    return cross_device_ops


def _packing(ops: CrossDeviceOps, num_packs: int) -> Packing:
    if not is_count(num_packs, at_least=0):
        raise ValueError(
            f"{type(ops).__name__}(num_packs={num_packs!r}): a whole number, which cannot be negative. 0 packs nothing, "
            "1 chooses."
        )
    return Packing(num_packs)


# -- what is given to the verbs


def _checked_op(reduce_op: Any) -> ReduceOp:
    if not isinstance(reduce_op, ReduceOp):
        raise _errors.not_a_reduce_op(reduce_op)
    return reduce_op


def _checked_pair(pair: Any) -> tuple[PerReplica, Any]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise _errors.not_a_value_and_destinations(pair)
    value, destinations = pair
    devices_of(destinations)
    value = _as_per_replica(value)
    if value.form == PARTS and not parts_of(value):
        raise _errors.no_components()
    return value, destinations


def _as_per_replica(value: Any) -> PerReplica:
    """What was given as one value per replica, as components."""
    if isinstance(value, PerReplica):
        return value
    if is_slices(value):
        return _slices_per_replica(value)
    if hasattr(value, "distribute_strategy"):  # a variable, which stands below this file
        return PerReplica(value.value, TRACED) if _in_traced_run() else PerReplica(value.values)
    if value is None or isinstance(value, (list, tuple, str)):
        raise _errors.not_per_replica(value)
    array = jnp.asarray(value)
    if not parts.is_concrete(array) or len(array.devices()) == 1 or not array.is_fully_replicated:
        return PerReplica((array,))
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return PerReplica(tuple(by_device[device] for device in in_order(array.sharding) if device in by_device))


def _slices_per_replica(value: IndexedSlices) -> PerReplica:
    held = [x for x in (value.values, value.indices) if isinstance(x, PerReplica)]
    if not held:
        return PerReplica((value,))
    if held[0].form == TRACED:
        return PerReplica(value, TRACED)
    columns = [
        x.values if isinstance(x, PerReplica) else (x,) * len(held[0].values) for x in (value.values, value.indices)
    ]
    return PerReplica(tuple(IndexedSlices(v, i, value.dense_shape) for v, i in zip(*columns, strict=True)))


def _is_traced(value: PerReplica) -> bool:
    return value.form == TRACED


def _local(value: PerReplica) -> Any:
    """This replica's part of a traced value."""
    if not is_slices(value.data):
        return value.data
    return jax.tree.map(
        lambda x: x.data if isinstance(x, PerReplica) else x,
        value.data,
        is_leaf=lambda x: isinstance(x, PerReplica),
    )


def _in_traced_run() -> bool:
    mode = _context.current()
    return mode is not None and mode.ledger is not None


def _placement_of_run() -> Placement:
    mode = _context.current()
    assert mode is not None, "a traced value outlived its run"
    return mode.strategy.placement


def _laid_out(value: PerReplica) -> tuple[PerReplica, Placement | None]:
    """The value as one array over its devices, if it is one or its components lie on devices of their own."""
    placement = placement_of(value)
    if placement is None and value.form == PARTS and not any(map(is_slices, value.data)):
        devices = devices_of(value)
        if len(devices) == len(value.data):
            placement = placement_on(devices)
            value = lay_out(placement, value.data)
    return (value, None) if value.form == PARTS else (value, placement)


def _first_device(destinations: Any) -> jax.Device | None:
    return next(iter(devices_of(destinations)), None)
