"""Which strategies were there in 2018, and which one of today does the work of each?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import jax

from replicax._devices import resolve
from replicax._errors import DeviceError
from replicax._options import is_count
from replicax._strategy.central_storage import CentralStorageStrategy as CentralStorage
from replicax._strategy.destinations import checked_pair
from replicax._strategy.layout import LayoutPolicy
from replicax._strategy.mirrored import MirroredStrategy as Mirrored
from replicax._strategy.multi_worker import several_processes
from replicax._strategy.one_device import OneDeviceStrategy as OneDevice
from replicax._strategy.tpu import TPUStrategy as TPU
from replicax.cluster import ClusterSpec, TPUClusterResolver, validate_cluster, worker_count
from replicax.cluster._roles import CHIEF, PS, WORKER
from replicax.compat.tower import _refusals
from replicax.compat.tower._cross_tower_ops import as_cross_device_ops
from replicax.compat.tower._reduce import REQUIRED
from replicax.compat.tower._strategy import DistributionStrategy
from replicax.compat.tower._values import PerDevice


class MirroredStrategy(DistributionStrategy):
    """One tower on each device of this machine, variables mirrored on all of them.

    Args:
      devices: Devices or words such as ``"/gpu:0"``; by default as for `rx.MirroredStrategy`.
      num_gpus: So many of the first GPUs instead; 0 is one CPU. `num_gpus_per_worker` is another name of it.
      cross_tower_ops: How values are added up. `cross_device_ops` is the later name of it.
      prefetch_on_device: Nothing to choose here; batches are moved while the last one is worked on.
      auto_shard_dataset: Nothing to choose here; one process reads everything.
      eager: True runs towers line by line, so that `print` and `pdb` work.
      replica_mesh: The axes inside a tower of several devices, as in `rx.MirroredStrategy`.
      variables: How variables lie between steps, likewise.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device | str] | None = None,
        num_gpus: int | None = None,
        num_gpus_per_worker: int | None = None,
        cross_tower_ops: Any = None,
        prefetch_on_device: bool | None = None,
        auto_shard_dataset: bool = False,
        cross_device_ops: Any = None,
        *,
        eager: bool = False,
        replica_mesh: Mapping[str, int] | None = None,
        variables: LayoutPolicy | None = None,
    ) -> None:
        if devices is not None and num_gpus is not None:
            raise _refusals.two_ways("MirroredStrategy", "devices", "num_gpus")
        if num_gpus is not None and num_gpus_per_worker is not None:
            raise _refusals.two_ways("MirroredStrategy", "num_gpus", "num_gpus_per_worker")
        if cross_tower_ops is not None and cross_device_ops is not None:
            raise _refusals.two_cross_tower_ops()
        if isinstance(devices, Sized) and len(devices) == 0:
            raise _refusals.no_devices()
        count = num_gpus if num_gpus is not None else num_gpus_per_worker
        if devices is None and count is not None:
            devices = local_accelerators(count)
        ops = as_cross_device_ops(cross_tower_ops if cross_tower_ops is not None else cross_device_ops)
        self._over(Mirrored(devices, ops, eager=eager, replica_mesh=replica_mesh, variables=variables))


class OneDeviceStrategy(DistributionStrategy):
    """Everything on one device, with the API of many."""

    def __init__(
        self, device: jax.Device | str, prefetch_on_device: bool | None = None, *, eager: bool = False
    ) -> None:
        self._over(OneDevice(device, eager=eager))


class CollectiveAllReduceStrategy(DistributionStrategy):
    """One tower on each of this worker's devices, and collectives to reduce.

    On one machine it is `MirroredStrategy`. `configure` with a cluster of several workers, which would make it one of
    them, raises `rx.NotAvailableError`.

    Args:
      num_gpus_per_worker: So many of the first GPUs; 0 is one CPU.
    """

    def __init__(self, num_gpus_per_worker: int = 0, *, eager: bool = False) -> None:
        self._over(Mirrored(local_accelerators(num_gpus_per_worker), eager=eager))

    @property
    def between_graph(self) -> bool:
        """Whether every process runs the program for itself: they would, had it a cluster."""
        return True

    @property
    def _session_settings(self) -> Mapping[str, Any]:
        return {}

    def _join(self, cluster_spec: Any, task_type: str | None, task_id: int | None) -> None:
        cluster = _checked("CollectiveAllReduceStrategy", cluster_spec, task_type, task_id, needs=WORKER)
        workers = worker_count(cluster, WORKER)
        if workers > 1:
            raise several_processes("CollectiveAllReduceStrategy.configure(cluster_spec=...)", cluster, workers)


class ParameterServerStrategy(DistributionStrategy):
    """Variables on servers, towers on workers that do not wait for each other.

    On one machine it is `rx.experimental.CentralStorageStrategy`: variables lie once, on the CPU if there are several
    GPUs. With a cluster it needs processes.

    Args:
      num_gpus_per_worker: So many of the first GPUs compute; 0 is one CPU.
      cluster_spec: The cluster, if there is one, with the task that this process is.
    """

    def __init__(
        self,
        num_gpus_per_worker: int = 0,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        eager: bool = False,
    ) -> None:
        self._over(CentralStorage(local_accelerators(num_gpus_per_worker), eager=eager))
        self.configure(None, cluster_spec, task_type, task_id)

    def _join(self, cluster_spec: Any, task_type: str | None, task_id: int | None) -> None:
        _checked("ParameterServerStrategy", cluster_spec, task_type, task_id, needs=PS)
        raise _refusals.not_available(
            "ParameterServerStrategy.configure(cluster_spec=...)",
            "What is missing are the processes that hold the variables; they will come with "
            "`rx.ParameterServerStrategy`. This version of replicax keeps them in one process.",
            "leave the cluster out, for the devices of this machine",
        )


class TPUStrategy(DistributionStrategy):
    """One tower on each core of a TPU slice.

    With ``TPUClusterResolver("local")`` the cores are the devices of this process, whatever they are.

    Args:
      tpu_cluster_resolver: Which slice.
      steps_per_run: How many steps a training loop should take at once; nothing here asks for it.
      num_cores: Uses only so many cores.

    >>> from replicax.compat import tower
    >>> from replicax.cluster import TPUClusterResolver
    >>> distribution = tower.TPUStrategy(TPUClusterResolver("local"), steps_per_run=100, num_cores=2)
    >>> distribution.num_towers, distribution.num_hosts, distribution.steps_per_run
    (2, 1, 100)
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        num_cores: int | None = None,
        *,
        eager: bool = False,
    ) -> None:
        self._tpu = TPU(tpu_cluster_resolver, steps_per_run=steps_per_run, num_cores=num_cores, eager=eager)
        self._over(self._tpu)

    @property
    def steps_per_run(self) -> int:
        """How many steps a training loop should take at once."""
        return self._tpu.steps_per_run

    @property
    def num_hosts(self) -> int:
        """How many hosts the slice has."""
        return self._tpu.num_hosts

    @property
    def num_towers_per_host(self) -> int:
        """How many towers each host has."""
        return self._tpu.num_replicas_per_host

    def get_host_cpu_device(self, host_id: int) -> str:
        """The name of the CPU of a host."""
        return self._tpu.get_host_cpu_device(host_id)

    def unwrap(self, value: Any) -> list[Any]:
        """As for every strategy; a list is taken as a list of the towers' values, which is what it was here in 2018."""
        return value if isinstance(value, list) else super().unwrap(value)

    def reduce(
        self,
        aggregation: Any = None,
        value: Any = REQUIRED,
        destinations: Any = None,
        *,
        method_string: Any = None,
        reduce_op: Any = None,
    ) -> Any:
        """As for every strategy; a list is taken as a list of the towers' values."""
        value = _of_towers(value)
        return super().reduce(aggregation, value, destinations, method_string=method_string, reduce_op=reduce_op)

    def batch_reduce(
        self,
        aggregation: Any = None,
        value_destination_pairs: Any = REQUIRED,
        *,
        method_string: Any = None,
        reduce_op: Any = None,
    ) -> list[Any]:
        """As for every strategy; a list in a pair is taken as a list of the towers' values."""
        pairs = value_destination_pairs
        if pairs is not REQUIRED:
            pairs = [(_of_towers(value), where) for value, where in map(checked_pair, pairs)]
        return super().batch_reduce(aggregation, pairs, method_string=method_string, reduce_op=reduce_op)


def _of_towers(value: Any) -> Any:
    return PerDevice(tuple(value)) if isinstance(value, list) else value


def _checked(strategy: str, cluster_spec: Any, task_type: str | None, task_id: int | None, needs: str) -> ClusterSpec:
    """A cluster that makes sense for this strategy and this task."""
    if task_type is None or task_id is None:
        raise _refusals.no_task(strategy)
    cluster = validate_cluster(cluster_spec, task_type, task_id)
    if needs not in cluster.jobs and not (needs == WORKER and CHIEF in cluster.jobs):
        raise _refusals.no_job(strategy, needs, cluster.jobs)
    if needs == WORKER and task_type not in (CHIEF, WORKER):
        raise _refusals.wrong_task(strategy, task_type, cluster.jobs)
    return cluster


def local_accelerators(count: int) -> list[jax.Device]:
    """The first `count` GPUs of this machine; for 0 its CPU."""
    if not is_count(count, at_least=0):
        raise _refusals.no_count(count)
    if count == 0:
        return [resolve("/cpu:0")]
    try:
        return [resolve(f"/gpu:{i}") for i in range(count)]
    except DeviceError as error:
        raise _refusals.too_few_gpus(count) from error
