"""What must a scheduler tell us? Who is in the cluster, which task this process is, and how to reach a task.

Everything a resolver knows comes from one of two places: the program said it (a constructor argument, a property that
was set) or the scheduler's environment says it. Which of the two wins is decided here and nowhere else: the program.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax

from replicax._devices import local_devices_default
from replicax._errors import ClusterError
from replicax.cluster._roles import CHIEF, WORKER, id_in_cluster
from replicax.cluster._spec import ClusterSpec

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Found:
    """What the environment says about this process; None where it is silent."""

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str | None = None


class ClusterResolver(abc.ABC):
    """Tells a strategy who is in the job and which task this process is.

    Use the resolver of your scheduler, or derive from this class for one that is not here: define `cluster_spec` and
    `master`, and pass what the program says itself to the constructor.

    Args:
      task_type: The job this process belongs to, if the program knows better than the scheduler.
      task_id: The number of its task, likewise.
      rpc_layer: The protocol that stands before addresses, ``"grpc"`` in ``grpc://10.0.0.1:2222``, likewise.
      environment: A label of your own for where this runs.

    Example:
      >>> from replicax.cluster import ClusterResolver, ClusterSpec
      >>> class Twins(ClusterResolver):
      ...     def cluster_spec(self):
      ...         return ClusterSpec({"worker": ["castor:2222", "pollux:2222"]})
      ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
      ...         return self.cluster_spec().task_address(task_type or self.task_type, task_id or self.task_id)
      >>> Twins(task_type="worker", task_id=1).master()
      'pollux:2222'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = None

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = as_job(task_type)
        self._task_id = as_number(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Everyone in the job; empty if this process is alone."""

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """How to reach a task, this process's own unless said otherwise; "" if there is nothing to reach."""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """How many devices other than CPUs there are, by kind: ``{"GPU": 8}``.

        All that this process can see or, with both arguments, those of one task; another task's devices can be seen
        only once the processes are connected. Asking starts JAX's backend. `config_proto` is accepted for programs
        written for tf.distribute and ignored.
        """
        return count_accelerators(self._devices_of(task_type, task_id))

    @property
    def task_type(self) -> str | None:
        """The job this process belongs to. What you set here beats the environment."""
        return said_first(self._task_type, self._found().task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = as_job(task_type)

    @property
    def task_id(self) -> int | None:
        """The number of this process's task. What you set here beats the environment."""
        return said_first(self._task_id, self._found().task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = as_number(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol before addresses. What you set here beats the environment."""
        return said_first(self._rpc_layer, self._found().rpc_layer)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str:
        """A free label for where this runs, "" if nobody gave one."""
        return said_first(self._environment, self._found().environment) or ""

    def _found(self) -> Found:
        return Found()

    def _devices_of(self, task_type: str | None, task_id: int | None) -> Sequence[jax.Device]:
        own = local_devices_default()
        if task_type is None or task_id is None:
            return jax.devices()
        if (task_type, task_id) == (self.task_type, self.task_id):
            return own
        if task_type not in (CHIEF, WORKER) or jax.process_count() == 1:
            return []
        process = id_in_cluster(self.cluster_spec(), task_type, task_id)
        return [device for device in jax.devices() if device.process_index == process]


class HasPlatform(Protocol):
    """The part of a `jax.Device` that is counted."""

    @property
    def platform(self) -> str: ...


def count_accelerators(devices: Iterable[HasPlatform]) -> dict[str, int]:
    """How many of the devices are not CPUs, by kind."""
    return dict(collections.Counter(device.platform.upper() for device in devices if device.platform != "cpu"))


def as_job(task_type: object) -> str | None:
    """The name of a job as text."""
    return None if task_type is None else str(task_type)


def as_number(task_id: Any) -> int | None:
    """The number of a task. Launchers write it as 1 and as "1"."""
    try:
        return None if task_id is None else int(task_id) if isinstance(task_id, str) else operator.index(task_id)
    except (TypeError, ValueError):
        raise ClusterError(
            f"task_id={task_id!r} is not the number of a task: the tasks of a job are numbered 0, 1, ..."
        ) from None


def said_first(*sayings: T | None) -> T | None:
    """The first that is not None. Zero and "" are things one may say: a task is often number 0."""
    return next((saying for saying in sayings if saying is not None), None)


def url(address: str, rpc_layer: str | None) -> str:
    """The address with its protocol in front; nothing to reach stays nothing to reach."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def task_url(resolver: ClusterResolver, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
    """How to reach a task, the resolver's own unless said otherwise; "" if it is not known which."""
    task_type = said_first(task_type, resolver.task_type)
    task_id = said_first(task_id, resolver.task_id)
    if task_type is None or task_id is None:
        return ""
    return url(resolver.cluster_spec().task_address(task_type, task_id), said_first(rpc_layer, resolver.rpc_layer))


def alone(cluster: ClusterSpec) -> bool:
    """Whether the cluster has nobody, or only one task, in it."""
    return sum(cluster.num_tasks(job) for job in cluster.jobs) <= 1
