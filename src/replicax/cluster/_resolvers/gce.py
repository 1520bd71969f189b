"""How does Google Compute Engine say it? The instances of an instance group are the tasks of one job.

replicax does not depend on Google's API client: the program makes one, with the credentials it needs, and passes it
here. What is used of it: `instanceGroups().listInstances`, its `listInstances_next`, and `instances().get`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicax._errors import NotAvailableError, SchedulerError, message
from replicax.cluster._resolvers.base import ClusterResolver, task_url
from replicax.cluster._roles import WORKER
from replicax.cluster._spec import ClusterSpec


class GCEClusterResolver(ClusterResolver):
    """A cluster of the running instances of one instance group.

    All of them belong to one job, ordered by address. For a cluster of several jobs make a group and a resolver for
    each and join them with `UnionResolver`.

    Args:
      project: The project's id.
      zone: The zone of the group.
      instance_group: The name of the group.
      port: The port of every task.
      task_type: The job of these instances. It cannot be changed later.
      task_id: The number of this process's task.
      rpc_layer: The protocol before addresses.
      credentials: Kept for programs written for tf.distribute; the client in `service` carries its own.
      service: A client of the Compute Engine API, version v1.

    Example:
      >>> from replicax.cluster import GCEClusterResolver
      >>> GCEClusterResolver("my-project", "us-east1-d", "trainers", 8470).cluster_spec()
      Traceback (most recent call last):
        ...
      replicax...NotAvailableError: `GCEClusterResolver(...)` needs a client to ask Compute Engine with.
      <BLANKLINE>
      Do this:
        * pass `service=googleapiclient.discovery.build("compute", "v1")`.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = WORKER,
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        self._job = task_type
        self._where = {"project": project, "zone": zone}
        self._instance_group = instance_group
        self._port = port
        self._service = service

    def cluster_spec(self) -> ClusterSpec:
        """Asks Compute Engine anew on every call."""
        if self._service is None:
            raise _no_client()
        return ClusterSpec({self._job: sorted(f"{self._ip(name)}:{self._port}" for name in self._instances())})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given task, this process's own by default."""
        return task_url(self, task_type, task_id, rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The job of all instances in the group."""
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise SchedulerError(
            message(
                "`GCEClusterResolver.task_type = ...` cannot be set: every instance of the group belongs to one job",
                [f"the job is {self._job!r}, not {task_type!r}"],
                instead=[f"say so when you make it: `GCEClusterResolver(..., task_type={task_type!r})`"],
            )
        )

    def _instances(self) -> Iterator[str]:
        """The names of the running instances, page after page."""
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._where, instanceGroup=self._instance_group, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            page = request.execute()
            for instance in page.get("items", []):  # a page without instances has no such key
                yield instance["instance"].rpartition("/")[2]
            request = groups.listInstances_next(previous_request=request, previous_response=page)

    def _ip(self, instance: str) -> str:
        details = self._service.instances().get(**self._where, instance=instance).execute()
        return details["networkInterfaces"][0]["networkIP"]


def _no_client() -> NotAvailableError:
    return NotAvailableError(
        message(
            "`GCEClusterResolver(...)` needs a client to ask Compute Engine with",
            instead=['pass `service=googleapiclient.discovery.build("compute", "v1")`'],
        )
    )
