"""Which devices hold replicas and which hold variables? `Placement`: frozen data that every other part asks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

AXIS = "replica"
"""The mesh axis over which replicas are laid; `lax.psum(x, "replica")` inside a step means what it says."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where replicas compute and where variables rest.

    The first mesh axis is ``"replica"``; further axes, if any, lie inside a replica (model parallelism) and are left to
    XLA. Nothing here assumes one process: `local_replicas` are those this process can address.
    """

    mesh: Mesh
    parameter_device: jax.Device | None = None
    """The one device that holds all variables, or None when they rest mirrored on the replicas' own devices."""

    @functools.cached_property
    def replicas(self) -> int:
        return self.mesh.shape[AXIS]

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The first device of each replica, in replica order."""
        return tuple(self.mesh.devices.reshape(self.replicas, -1)[:, 0])

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The replicas whose devices belong to this process."""
        here = jax.process_index(self.devices[0].client)
        return tuple(i for i, device in enumerate(self.devices) if device.process_index == here)

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.devices[i] for i in self.local_replicas)

    @functools.cached_property
    def mirrored(self) -> NamedSharding:
        """A full copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """Axis 0 laid over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @functools.cached_property
    def auto_axes(self) -> tuple[str, ...]:
        """The axes inside a replica."""
        return tuple(name for name in self.mesh.axis_names if name != AXIS)

    @functools.cached_property
    def apart(self) -> bool:
        """Whether variables rest elsewhere than each replica computes."""
        return self.parameter_device is not None and set(self.mesh.devices.flat) != {self.parameter_device}

    @functools.cached_property
    def rest(self) -> Sharding:
        """Where a variable that is equal everywhere lies between steps."""
        if self.apart:
            return jax.sharding.SingleDeviceSharding(self.parameter_device)
        return self.mirrored


def place(devices: Sequence[jax.Device], parameter_device: jax.Device | None = None) -> Placement:
    """One replica on each of `devices`."""
    return Placement(_mesh(np.array(devices, dtype=object), (AXIS,)), parameter_device)


def place_grid(devices: Sequence[jax.Device], inside: dict[str, int]) -> Placement:
    """Replicas over several devices each: `inside` names the axes within one replica and their sizes."""
    shape = (-1, *inside.values())
    return Placement(_mesh(np.array(devices, dtype=object).reshape(shape), (AXIS, *inside)))


def _mesh(grid: np.ndarray, names: tuple[str, ...]) -> Mesh:
    # jax.make_mesh gives Explicit axes, with which shard_map refuses inputs laid out otherwise.
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
