"""A copy of the model on each device of this machine? `MirroredStrategy`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax

from replicax import _errors
from replicax._cross.ops import CrossDeviceOps
from replicax._devices import local_devices_default, resolve_all
from replicax._options import is_count
from replicax._placement import AXIS, Placement, place, place_grid
from replicax._strategy import sessions
from replicax._strategy.base import Strategy
from replicax._strategy.layout import LayoutPolicy


class MirroredStrategy(Strategy):
    """Synchronous training on all devices of one machine: one replica per device, variables mirrored on each.

    Args:
      devices: Devices, or words like ``"GPU:0"``; by default all local accelerators, or all local CPU devices.
      cross_device_ops: How values are added up over replicas; by default the platform's all-reduce with small arrays
        packed. ``rx.ReductionToOneDevice()`` adds in a fixed order, reproducible bit for bit.
      eager: True runs steps line by line, so that `print` and `pdb` work.
      replica_mesh: The axes inside a replica, for models too large for one device: with ``{"model": 2}`` each replica
        is two neighbouring devices, and `variables` says how parameters are cut over them.
      variables: How variables lie between steps, if not as one copy per device: `rx.partition_rules` or
        `rx.fully_sharded`.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    >>> def step(x):
    ...     gradient = rx.get_replica_context().all_reduce("mean", x)
    ...     w.assign_sub(0.1 * gradient)
    >>> strategy.run(step, (rx.PerReplica((1.0, 3.0)),))
    >>> print(w.numpy())
    0.8
    """

    session_settings = sessions.ISOLATED

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        eager: bool = False,
        replica_mesh: Mapping[str, int] | None = None,
        variables: LayoutPolicy | None = None,
    ) -> None:
        chosen = resolve_all(devices, "`rx.MirroredStrategy(devices=...)`") if devices else local_devices_default()
        placement = replicas_of(chosen, replica_mesh, eager=eager)
        super().__init__(placement, eager=eager, cross_device_ops=cross_device_ops, variables=variables)


def replicas_of(devices: Sequence[jax.Device], inside: Mapping[str, int] | None, *, eager: bool) -> Placement:
    """A replica on each device, or on as many neighbours as the axes `inside` a replica make."""
    if not inside:
        return place(devices)
    check_inside(inside, len(devices))
    placement = place_grid(devices, dict(inside))
    if eager and placement.auto_axes:
        raise _errors.eager_over_several_devices(placement)
    return placement


def check_inside(inside: Mapping[str, int], devices: int) -> None:
    """Refuses axes inside a replica that do not divide so many devices."""
    if not isinstance(inside, Mapping):
        raise _errors.no_replica_mesh(inside)
    if not all(isinstance(name, str) and is_count(size) for name, size in inside.items()):
        raise _errors.no_replica_mesh(inside)
    if devices % math.prod(inside.values()) or AXIS in inside:
        raise _errors.uneven_replica_mesh(inside, devices)
