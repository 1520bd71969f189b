"""The variables in one place, the replicas in many? `CentralStorageStrategy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from replicax import _errors
from replicax._cross.ops import CrossDeviceOps
from replicax._devices import accelerators_or_one_cpu, resolve, resolve_all
from replicax._placement import Placement, place
from replicax._strategy import sessions
from replicax._strategy.base import Strategy
from replicax._variables.variable import Variable


class CentralStorageStrategy(Strategy):
    """Synchronous training where variables exist once, on a device of their own, and replicas compute on others.

    For models whose optimizer state does not fit beside the activations: a copy of each variable that a step reads is
    sent to the replicas and dropped again, and the update, slots included, happens once, on the parameter device. With
    GPUs or TPUs that device can be ``"cpu:0"``, which is the memory of the host.

    Args:
      compute_devices: Devices of the replicas, or words like ``"GPU:0"``; by default all local accelerators, or the
        first CPU device if there are none.
      parameter_device: Where variables rest; by default the compute device if there is only one, else ``"cpu:0"``.
      cross_device_ops: How values are added up over replicas, as in `rx.MirroredStrategy`.
      eager: True runs steps line by line, so that `print` and `pdb` work.

    >>> import jax, replicax as rx
    >>> strategy = rx.experimental.CentralStorageStrategy(jax.devices()[1:3], "cpu:0")
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    >>> def step(x):
    ...     gradient = rx.get_replica_context().all_reduce("mean", x)
    ...     w.assign_sub(0.1 * gradient)
    >>> strategy.run(step, (rx.PerReplica((1.0, 3.0)),))
    >>> print(w.numpy(), w.devices == (jax.devices()[0],))
    0.8 True
    """

    def __init__(
        self,
        compute_devices: Sequence[jax.Device | str] | None = None,
        parameter_device: jax.Device | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        eager: bool = False,
    ) -> None:
        call = "`CentralStorageStrategy(compute_devices=...)`"
        chosen = resolve_all(compute_devices, call) if compute_devices else accelerators_or_one_cpu()
        home = _home(chosen, parameter_device)
        super().__init__(place(chosen, home), eager=eager, cross_device_ops=cross_device_ops)

    between_graph = True
    session_settings = sessions.ISOLATED

    def place_variable(self, variable: Variable, colocate_with: Any) -> Placement:
        """An on-read variable has a component for each replica, which lies where the replica does."""
        placement = super().place_variable(variable, colocate_with)
        return dataclasses.replace(placement, parameter_device=None) if variable.on_read else placement


def _home(compute_devices: Sequence[jax.Device], wanted: jax.Device | str | None) -> jax.Device:
    if wanted is None:
        return compute_devices[0] if len(compute_devices) == 1 else resolve("cpu:0")
    device = resolve(wanted)
    if device.process_index != jax.process_index():
        raise _elsewhere(device)
    return device


def _elsewhere(device: jax.Device) -> _errors.DeviceError:
    return _errors.DeviceError(
        _errors.message(
            f"CentralStorageStrategy(parameter_device={device}) is a device of another process",
            [f"process {device.process_index}; this is process {jax.process_index()}"],
            "Replicas and variables of this strategy belong to one machine.",
            ["name a device of this process: 'cpu:0'", "for many machines use `rx.MultiWorkerMirroredStrategy`"],
        )
    )
