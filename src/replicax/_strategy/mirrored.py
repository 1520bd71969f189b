"""A copy of the model on each device of this machine? `MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax import _errors
from replicax._cross.ops import CrossDeviceOps
from replicax._devices import local_devices_default, resolve
from replicax._placement import place
from replicax._strategy.base import Strategy


class MirroredStrategy(Strategy):
    """Synchronous training on all devices of one machine: one replica per device, variables mirrored on each.

    Args:
      devices: Devices, or words like ``"GPU:0"``; by default all local accelerators, or all local CPU devices.
      cross_device_ops: How values are added up over replicas; by default the platform's all-reduce with small arrays
        packed. ``rx.ReductionToOneDevice()`` adds in a fixed order, reproducible bit for bit.
      eager: True runs steps line by line, so that `print` and `pdb` work.

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

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        eager: bool = False,
    ) -> None:
        chosen = [resolve(device) for device in devices] if devices else list(local_devices_default())
        if len(set(chosen)) != len(chosen):
            raise _errors.duplicate_devices(chosen)
        super().__init__(place(chosen), eager=eager, cross_device_ops=cross_device_ops)
