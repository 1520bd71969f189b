"""How does a TPU slice say it? The program names the slice, or the environment of a TPU machine lists its hosts.

JAX programs run on the hosts of the slice themselves, one process on each, so that "local", the devices of this
process, is the usual answer and needs no cloud at all. A list of addresses is taken as it is; only a bare name has to
be looked up, with a client that the program makes, for replicax depends on none.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Self

import jax

from replicax._devices import local_devices_default
from replicax._errors import ClusterError, NotAvailableError, SchedulerError, message
from replicax.cluster._resolvers.base import ClusterResolver, Found, task_url
from replicax.cluster._roles import WORKER
from replicax.cluster._spec import ClusterSpec
from replicax.cluster._topology import Topology, devices_by_host

LOCAL = "local"
_PORT = 8470


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """What a slice is made of."""

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology
    devices: tuple[jax.Device, ...]


class TPUClusterResolver(ClusterResolver):
    """The TPU slice on which a `TPUStrategy` runs.

    On a machine with TPUs, and on a laptop that plays one, ``TPUClusterResolver("local")`` is all there is to write:
    the cores are the devices of this process, whatever they are.

    Args:
      tpu: ``"local"`` or ``""`` for the devices of this process; one or several addresses (``"grpc://10.0.0.1:8470"``);
        or a name to look up. By default what the environment says: ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS``,
        ``TPU_PROCESS_ADDRESSES``, ``TPU_WORKER_HOSTNAMES`` or ``TPU_NAME``, else "local".
      zone: Where a named slice is.
      project: Whose it is.
      job_name: The job to which the hosts belong.
      coordinator_name: Another job with one task, which only coordinates.
      coordinator_address: The address of that task.
      credentials: Kept for programs written for tf.distribute; the client in `service` carries its own.
      service: A client of the Cloud TPU API, to look up a name with.
      discovery_url: Likewise kept.

    Example:
      >>> import jax
      >>> from replicax.cluster import TPUClusterResolver
      >>> resolver = TPUClusterResolver("local")
      >>> resolver.get_tpu_system_metadata().num_cores == len(jax.local_devices())
      True
      >>> TPUClusterResolver(["10.0.0.1:8470", "10.0.0.2:8470"]).master()
      'grpc://10.0.0.1:8470'
    """

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = WORKER,
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        super().__init__()
        if coordinator_name is not None and coordinator_address is None:
            raise _where_is_the_coordinator(coordinator_name)
        self._tpu = _from_environment() if tpu is None else _one_text(tpu)
        self._zone, self._project = zone, project
        self._job_name = job_name
        self._coordinator = {} if coordinator_name is None else {coordinator_name: [str(coordinator_address)]}
        self._service = service
        self._topology: Topology | None = None

    @staticmethod
    def connect(
        tpu: str | Sequence[str] | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """A resolver whose cores are ready for use. The devices of this process always are."""
        resolver = TPUClusterResolver(tpu, zone, project)
        if not resolver.is_local:
            raise NotAvailableError(
                message(
                    "`TPUClusterResolver.connect(...)` cannot drive a slice from outside",
                    [f"tpu={resolver._tpu!r}"],
                    "A JAX program runs on the hosts of the slice, one process on each.",
                    ['run this script on every host of the slice with `TPUClusterResolver.connect("local")`'],
                )
            )
        return resolver

    @property
    def is_local(self) -> bool:
        """Whether the slice is the devices of this process."""
        return self._tpu in (LOCAL, "")

    def cluster_spec(self) -> ClusterSpec:
        """The hosts of the slice, and the coordinator if there is one; empty for the devices of this process."""
        if self.is_local:
            return ClusterSpec({})
        return ClusterSpec({self._job_name: self._addresses(), **self._coordinator})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given host, the first by default; "" for the devices of this process."""
        return "" if self.is_local else task_url(self, task_type, task_id, rpc_layer)

    def get_master(self) -> str:
        """The same as `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """The job to which the hosts belong; None for the devices of this process."""
        return None if self.is_local else self._job_name

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """How many cores each host has, of whatever kind the devices are."""
        return {"TPU": self.get_tpu_system_metadata().num_of_cores_per_host}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """What the slice is made of. Asking starts JAX's backend.

        Raises:
          SchedulerError: If the processes of the slice are not connected, or have different numbers of devices.
        """
        own = local_devices_default()
        if self.is_local:
            return system_metadata(own, self._topology)
        hosts = self.cluster_spec().num_tasks(self._job_name)
        if jax.process_count() != hosts:
            raise _not_connected(hosts, jax.process_count())
        return system_metadata(jax.devices(), self._topology)

    def set_tpu_topology(self, topology: Topology | bytes) -> None:
        """Replaces the topology that the devices report, say by a larger one to plan for."""
        self._topology = Topology(serialized=topology) if isinstance(topology, bytes) else topology

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held that would have to be let go."""

    def __deepcopy__(self, memo: object) -> Self:
        """A resolver describes one slice; a copy of whatever holds it speaks of the same."""
        return self

    def _found(self) -> Found:
        return Found(self._job_name, int(os.environ.get("TPU_WORKER_ID", 0)), "grpc")

    def _addresses(self) -> list[str]:
        if ":" in self._tpu:
            return [address.rpartition("://")[2] for address in self._tpu.split(",")]
        node = self._look_up(self._tpu)
        unfit = [f"{key} {node[key]!r}, not {fit!r}" for key, fit in _FIT.items() if node.get(key, fit) != fit]
        if unfit:
            raise SchedulerError(message(f"The TPU {self._tpu!r} is not yet ready", unfit))
        endpoints = node.get("networkEndpoints") or [node]  # a slice of one host may carry its address itself
        return [f"{endpoint['ipAddress']}:{endpoint.get('port', _PORT)}" for endpoint in endpoints]

    def _look_up(self, name: str) -> dict[str, Any]:
        if self._service is None or self._project is None or self._zone is None:
            raise _cannot_look_up(name, self._project, self._zone, self._service)
        path = f"projects/{self._project}/locations/{self._zone}/nodes/{name}"
        return self._service.projects().locations().nodes().get(name=path).execute()


_FIT = {"state": "READY", "health": "HEALTHY"}


def system_metadata(devices: Sequence[jax.Device], topology: Topology | None = None) -> TPUSystemMetadata:
    """What these devices are made of, as the parts of one slice."""
    hosts = devices_by_host(devices)
    per_host = [len(host) for host in hosts]
    if len(set(per_host)) > 1:
        raise SchedulerError(
            message(
                "The hosts of a TPU slice must have equally many cores",
                [f"process {host[0].process_index}: {len(host)} cores" for host in hosts],
            )
        )
    return TPUSystemMetadata(
        num_cores=len(devices),
        num_hosts=len(hosts),
        num_of_cores_per_host=per_host[0],
        topology=topology or Topology.from_devices(devices),
        devices=tuple(devices),
    )


def _from_environment() -> str:
    for variable in ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_PROCESS_ADDRESSES"):
        if os.environ.get(variable):
            return os.environ[variable]
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(hosts) > 1:
        return ",".join(f"{host}:{_PORT}" for host in hosts)
    return os.environ.get("TPU_NAME", LOCAL)


def _one_text(tpu: str | Sequence[str]) -> str:
    if isinstance(tpu, str):
        return tpu
    if not tpu:
        raise ClusterError(
            message("`TPUClusterResolver(tpu=[])` names no TPU", instead=['TPUClusterResolver("local")'])
        )
    return ",".join(tpu)


def _where_is_the_coordinator(name: str) -> ClusterError:
    return ClusterError(
        message(
            f"`TPUClusterResolver(coordinator_name={name!r})` needs the address of that coordinator",
            instead=['coordinator_address="10.0.0.9:8470"', "leave `coordinator_name` out"],
        )
    )


def _cannot_look_up(name: str, project: str | None, zone: str | None, service: Any) -> NotAvailableError:
    missing = {"project": project, "zone": zone, "service": service}
    return NotAvailableError(
        message(
            f"The TPU {name!r} is a name that has to be looked up",
            [f"{argument} is not given" for argument, value in missing.items() if value is None],
            instead=[
                'use the devices of this process: `TPUClusterResolver("local")`',
                'give the addresses of its hosts: `TPUClusterResolver(["10.0.0.1:8470", "10.0.0.2:8470"])`',
                'give `project`, `zone` and `service=googleapiclient.discovery.build("tpu", "v2")`',
            ],
        )
    )


def _not_connected(hosts: int, processes: int) -> SchedulerError:
    return SchedulerError(
        message(
            f"The slice has {hosts} hosts, and JAX sees {processes} process{'es' * (processes > 1)}",
            why="The devices of other hosts can be seen only after the processes have found each other.",
            instead=[
                "call `jax.distributed.initialize()` on every host before anything else",
                'ask about this host alone: `TPUClusterResolver("local")`',
            ],
        )
    )
