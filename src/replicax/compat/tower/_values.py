"""What were values called? `PerDevice`, `Mirrored` and the list that `map` fills."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax

from replicax import _context, _jax
from replicax._options import ReduceOp
from replicax._values import PARTS, PerReplica, is_per_replica
from replicax._variables.variable import Variable
from replicax.compat.tower import _refusals

PerDevice = PerReplica
Mirrored = jax.Array
"""What is the same on all towers is a plain array here, with a copy on each device."""


class MapOutput(list[Any]):
    """What `map` returned for the items of one device."""

    def get(self) -> list[Any]:
        """The list itself, under the name a value's component has elsewhere."""
        return self


def map_outputs(value: Any) -> list[Any] | None:
    """All items of what `map` returned, or None for any other value."""
    if isinstance(value, MapOutput):
        return list(value)
    if isinstance(value, PerReplica) and value.form == PARTS and all(isinstance(v, MapOutput) for v in value.data):
        return [item for items in value.data for item in items]
    return None


def combine_items(op: ReduceOp, items: list[Any]) -> Any:
    """The sum of what `map` returned, or its mean over the items, however many devices they were on."""
    if not items:
        raise _refusals.nothing_to_reduce()
    first_device = next((item.devices() for item in items if _is_placed(item)), None)
    if first_device is not None:
        (device, *_) = first_device
        items = [jax.device_put(item, device) if _is_placed(item) else item for item in items]
    total = functools.reduce(operator.add, items)
    return total / len(items) if op is ReduceOp.MEAN else total


def lies_on(devices: Iterable[jax.Device], value: Any) -> bool:
    """Whether `value` has a component for each tower, whose devices these are."""
    if isinstance(value, (Variable, PerReplica)):
        return True
    if isinstance(value, jax.Array):
        mode = _context.current()
        if mode is not None and mode.ledger is not None:
            return True  # in a run, an array that is no `PerReplica` is the same on all replicas
        return len(value.devices()) > 1 and value.devices() == set(devices)
    return any(isinstance(leaf, PerReplica) for leaf in jax.tree.leaves(value, is_leaf=is_per_replica))


def copies_of(value: Any) -> list[Any]:
    """The copies of an array that lies on several devices, in their order; anything else has one."""
    if _is_placed(value) and len(value.devices()) > 1 and value.is_fully_replicated:
        return [shard.data for shard in sorted(value.addressable_shards, key=lambda shard: shard.device.id)]
    return [value]


def _is_placed(item: Any) -> bool:
    return isinstance(item, jax.Array) and not isinstance(item, _jax.Tracer)
