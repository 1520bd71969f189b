"""Which device inside a replica? Logical devices, as TPU programs number the cores of a replica.

XLA divides a replica's computation over its devices by itself. What a program says here tells it how a value lies; the
value stays the same.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax import _context
from replicax._errors import DeviceError, VariableError, message
from replicax._placement import Placement

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy


class _Current(threading.local):
    def __init__(self) -> None:
        self.numbers: list[tuple[Any, int]] = []


_current = _Current()


def count(placement: Placement) -> int:
    """How many devices a replica has."""
    return placement.mesh.size // placement.replicas


def checked(placement: Placement, logical_device: int, call: str) -> int:
    """`logical_device`, if there is one of that number."""
    devices = count(placement)
    if not isinstance(logical_device, (int, np.integer)) or not 0 <= logical_device < devices:
        raise DeviceError(
            message(
                f"`{call}` names a logical device that a replica does not have",
                [f"logical device {logical_device}; a replica has {devices}, counted from 0"],
                "Logical devices are the devices of one replica.",
                ["use a smaller number", "give replicas more devices: `DeviceAssignment`, or `replica_mesh={...}`"],
            )
        )
    return logical_device


@contextlib.contextmanager
def scope(strategy: Strategy, logical_device: int) -> Iterator[None]:
    """Makes `logical_device` the one that ``extended.worker_devices`` speaks of."""
    call = f"extended.experimental_logical_device({logical_device})"
    _current.numbers.append((strategy, checked(strategy.placement, logical_device, call)))
    try:
        yield
    finally:
        _current.numbers.pop()


def devices(strategy: Strategy) -> tuple[jax.Device, ...]:
    """The device of each replica of this process that the innermost `scope` means: the first by default."""
    number = next((number for owner, number in reversed(_current.numbers) if owner is strategy), 0)
    placement = strategy.placement
    grid = placement.mesh.devices.reshape(placement.replicas, -1)
    return tuple(grid[replica, number] for replica in placement.local_replicas)


def replicate(strategy: Strategy, x: Any) -> Any:
    """A whole copy of `x` on each device of the replica."""
    _shape(x, "strategy.experimental_replicate_to_logical_devices(x)")
    return _constrained(strategy, x, PartitionSpec())


def split(strategy: Strategy, x: Any, parts: Sequence[int]) -> Any:
    """`x` cut into ``parts[i]`` equal parts along axis i."""
    call = f"strategy.experimental_split_to_logical_devices(x, {parts!r})"
    placement, shape = strategy.placement, _shape(x, call)
    try:
        parts = [operator.index(part) for part in parts]
    except TypeError:
        wanted = "a list of whole numbers, one an axis"
        raise _refused(call, f"{parts!r} of type {type(parts).__name__}", wanted) from None
    if len(parts) != len(shape):
        raise _refused(
            call, f"{len(parts)} numbers, x of shape {list(shape)} has {len(shape)} axes", "one number an axis"
        )
    uneven = [axis for axis, size in enumerate(shape) if parts[axis] < 1 or size % parts[axis]]
    if uneven:
        numbers = ", ".join(f"axis {axis} of size {shape[axis]} in {parts[axis]} parts" for axis in uneven)
        raise _refused(call, numbers, "parts that divide each axis evenly")
    if math.prod(parts) != count(placement):
        product = " x ".join(map(str, parts))
        raise _refused(
            call,
            f"{product} = {math.prod(parts)} parts, {count(placement)} logical devices",
            "as many parts as devices",
        )
    return _constrained(strategy, x, _spec(placement, parts))


def _shape(x: Any, call: str) -> tuple[int, ...]:
    if not hasattr(x, "shape") and not isinstance(x, (list, tuple, int, float, complex)):
        raise _refused(call, f"{x!r} of type {type(x).__name__}", "one array; for a pytree, one after the other")
    return np.shape(x)


def _spec(placement: Placement, parts: Sequence[int]) -> PartitionSpec:
    """Gives each axis of an array the mesh axes it is cut over; those inside a replica have prime sizes."""
    free = [(name, placement.mesh.shape[name]) for name in placement.auto_axes]
    entries = []
    for number in parts:
        taken = []
        while number > 1:
            name, size = next((name, size) for name, size in free if number % size == 0)
            free.remove((name, size))
            taken.append(name)
            number //= size
        entries.append(tuple(taken) or None)
    return PartitionSpec(*entries)


def _constrained(strategy: Strategy, x: Any, spec: PartitionSpec) -> Any:
    mode = _context.current()
    in_a_compiled_step = mode is not None and mode.replica is not None and mode.ledger is not None
    if not in_a_compiled_step or not strategy.placement.auto_axes:
        return x
    return lax.with_sharding_constraint(jnp.asarray(x), spec)


def _refused(call: str, bad: str, wanted: str) -> VariableError:
    return VariableError(
        message(
            f"`{call}` does not fit",
            [bad],
            "Each logical device of a replica gets one equal part.",
            [f"give {wanted}"],
        )
    )
