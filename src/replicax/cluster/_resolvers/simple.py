"""What if the program knows its cluster itself? `SimpleClusterResolver` repeats what it is told."""

from __future__ import annotations

from collections.abc import Mapping

from replicax._errors import ClusterTypeError, message
from replicax.cluster._resolvers.base import ClusterResolver, said_first, url
from replicax.cluster._spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A cluster that you write down yourself.

    For a fixed set of machines, for tests, and as the piece from which `UnionResolver` builds larger clusters.

    Args:
      cluster_spec: The cluster.
      master: What `master()` answers when it is not asked about a task.
      task_type: The job this process belongs to.
      task_id: The number of its task.
      environment: A label of your own.
      num_accelerators: What `num_accelerators()` answers, by kind.
      rpc_layer: The protocol before addresses.

    Example:
      >>> from replicax.cluster import ClusterSpec, SimpleClusterResolver
      >>> cluster = ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})
      >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=0, rpc_layer="grpc")
      >>> resolver.master("worker", 1)
      'grpc://10.0.0.2:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise _wrong_type("cluster_spec", cluster_spec, 'ClusterSpec({"worker": ["10.0.0.1:2222"]})')
        if not isinstance(master, str):
            raise _wrong_type("master", master, '"10.0.0.1:2222"')
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given task, or else the `master` of the constructor."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return url(address, said_first(rpc_layer, self.rpc_layer))

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """The counts given to the constructor, for every task."""
        return dict(self._num_accelerators)


def _wrong_type(argument: str, value: object, example: str) -> ClusterTypeError:
    return ClusterTypeError(
        message(
            f"`SimpleClusterResolver({argument}=...)` got the wrong type",
            [f"{argument} = {value!r} of type {type(value).__name__}"],
            instead=[f"{argument}={example}"],
        )
    )
