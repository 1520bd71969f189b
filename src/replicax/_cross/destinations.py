"""Where should a combined value go? To the devices of a *destination*: a value, a variable, a device or its name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from replicax import _errors
from replicax._cross.parts import is_concrete
from replicax._cross.slices import is_slices
from replicax._devices import resolve
from replicax._placement import AXIS, Placement, place
from replicax._values import PARTS, PerReplica

PyTree = Any


def devices_of(destinations: Any) -> tuple[jax.Device, ...]:
    """The devices that `destinations` stands for; none for values that are being traced."""
    if isinstance(destinations, (str, jax.Device, list, tuple)):
        return _named(destinations)
    if isinstance(destinations, PerReplica):
        if destinations.form != PARTS:
            return devices_of(destinations.data)
        return tuple(dict.fromkeys(device for part in destinations.data for device in _device_of_part(part)))
    if is_slices(destinations):
        return devices_of(destinations.values)
    if isinstance(destinations, jax.Array):
        return in_order(destinations.sharding) if is_concrete(destinations) else ()
    if hasattr(destinations, "distribute_strategy"):
        return destinations.devices
    raise _errors.not_a_destination(destinations)


def _named(words: str | jax.Device | Sequence[Any]) -> tuple[jax.Device, ...]:
    words = [words] if isinstance(words, jax.Device) or words and isinstance(words, str) else list(words)
    if not words:
        raise _errors.empty_destinations()
    if not all(isinstance(word, (str, jax.Device)) for word in words):
        raise _errors.not_a_destination(words)
    return tuple(dict.fromkeys(map(resolve, words)))


def in_order(sharding: Sharding) -> tuple[jax.Device, ...]:
    """The devices of a sharding, in the order of its mesh if it has one."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def copies(tree: PyTree, devices: tuple[jax.Device, ...]) -> PyTree:
    """The arrays of `tree` with a copy on each of `devices`. Traced ones are on every replica already."""
    if not devices:
        return tree
    sharding = SingleDeviceSharding(devices[0]) if len(devices) == 1 else placement_on(devices).mirrored

    def one(leaf: Any) -> Any:
        return jax.device_put(leaf, sharding) if is_concrete(leaf) else leaf

    return jax.tree.map(one, tree)


@functools.lru_cache(maxsize=64)
def placement_on(devices: tuple[jax.Device, ...]) -> Placement:
    """One replica on each of `devices`, the same object each time, so that programs for it are found again."""
    return place(devices)


@functools.lru_cache(maxsize=64)
def _placement_over(mesh: Mesh) -> Placement:
    return Placement(mesh)


def placement_of(value: PerReplica) -> Placement | None:
    """The replicas over which a value is laid out; None if its components are held one by one."""
    sharding = getattr(value.data, "sharding", None)
    if value.form == PARTS or not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return _placement_over(sharding.mesh) if AXIS in sharding.mesh.axis_names else None


def _device_of_part(part: Any) -> tuple[jax.Device, ...]:
    leaves = [leaf for leaf in jax.tree.leaves(part) if isinstance(leaf, (jax.Array, np.ndarray))]
    return devices_of(leaves[0]) if leaves and isinstance(leaves[0], jax.Array) else ()
