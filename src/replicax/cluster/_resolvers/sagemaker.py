"""How does SageMaker say it? Two environment variables: all hosts of the training job, and which of them this is.

Every host is one worker. Nobody promises that all hosts see the list in the same order, so the names are sorted.
"""

from __future__ import annotations

import json
import os

from replicax._errors import SchedulerError, message
from replicax.cluster._resolvers.base import ClusterResolver, Found, alone, task_url
from replicax.cluster._roles import WORKER
from replicax.cluster._spec import ClusterSpec


class SageMakerClusterResolver(ClusterResolver):
    """The hosts of a SageMaker training job, one worker each.

    Args:
      port: The port of every worker.
      task_type: The job this process belongs to, instead of worker.
      task_id: The number of its task, instead of the position of its host.
      rpc_layer: The protocol before addresses.
      environment: A label of your own.

    Raises:
      SchedulerError: If this process does not run in a SageMaker training job.

    Example:
      >>> import os
      >>> from replicax.cluster import SageMakerClusterResolver
      >>> os.environ.update(SM_HOSTS='["algo-2", "algo-1"]', SM_CURRENT_HOST="algo-2")
      >>> resolver = SageMakerClusterResolver()
      >>> resolver.cluster_spec(), resolver.task_id
      (ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}), 1)
      >>> del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port
        _hosts()  # say now rather than later that this is not SageMaker

    def cluster_spec(self) -> ClusterSpec:
        """All hosts; empty if this one is not among them."""
        hosts, here = _hosts()
        return ClusterSpec({WORKER: [f"{host}:{self._port}" for host in hosts]} if here in hosts else {})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given task, this process's own by default; "" on a single host."""
        return "" if alone(self.cluster_spec()) else task_url(self, task_type, task_id, rpc_layer)

    def _found(self) -> Found:
        hosts, here = _hosts()
        return Found(WORKER, hosts.index(here)) if here in hosts else Found()


def _hosts() -> tuple[list[str], str]:
    """All hosts, sorted, and this one."""
    missing = [name for name in ("SM_HOSTS", "SM_CURRENT_HOST") if name not in os.environ]
    if missing:
        raise SchedulerError(
            message(
                "`SageMakerClusterResolver()`: Not a SageMaker Environment",
                [f"{name} is not set" for name in missing],
                instead=["use the resolver of the scheduler that started this process"],
            )
        )
    return sorted(json.loads(os.environ["SM_HOSTS"])), os.environ["SM_CURRENT_HOST"]
