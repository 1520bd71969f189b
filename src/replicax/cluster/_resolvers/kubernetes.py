"""How does Kubernetes say it? The API server lists the pods that carry a label; each is a task.

replicax does not depend on the `kubernetes` package: the program makes the client, with the credentials, proxies and
version it needs, and passes it here. Two methods of it are used, `list_pod_for_all_namespaces` and
`list_namespaced_pod`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from replicax._errors import ClusterError, NotAvailableError, SchedulerError, message
from replicax.cluster._resolvers.base import ClusterResolver, task_url
from replicax.cluster._roles import WORKER
from replicax.cluster._spec import ClusterSpec


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which decides where its credentials come from."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """A cluster of the pods that carry certain labels.

    Pods of one label selector are ordered by name and stand one after the other; a job may have several selectors. All
    of them must be running. Kubernetes does not say which task this process is: set `task_type` and `task_id`.

    Args:
      job_to_label_mapping: The label selectors of each job; ``{"worker": ["job-name=tensorflow"]}`` by default.
      tf_server_port: The port of every task.
      rpc_layer: The protocol before addresses.
      override_client: A `kubernetes.client.CoreV1Api`, or anything with its two methods that list pods.
      executable_location: Whether this program runs in a pod itself.
      namespace: Only pods in this namespace; by default in all.

    Example:
      >>> from types import SimpleNamespace as Record
      >>> from replicax.cluster import KubernetesClusterResolver
      >>> pod = Record(metadata=Record(name="worker-0"), status=Record(phase="Running", pod_ip="10.1.2.3"))
      >>> client = Record(list_pod_for_all_namespaces=lambda label_selector: Record(items=[pod]))
      >>> KubernetesClusterResolver({"worker": ["app=training"]}, override_client=client).cluster_spec()
      ClusterSpec({'worker': ['10.1.2.3:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
        *,
        namespace: str | None = None,
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise _unknown_location(executable_location)
        super().__init__(rpc_layer=rpc_layer)
        self._selectors = dict(job_to_label_mapping or {WORKER: ["job-name=tensorflow"]})
        self._port = tf_server_port
        self._client = override_client
        self._location = executable_location
        self._namespace = namespace

    def cluster_spec(self) -> ClusterSpec:
        """Asks the API server anew on every call."""
        pods = {
            job: [pod for selector in selectors for pod in self._pods(selector)]
            for job, selectors in self._selectors.items()
        }
        waiting = [pod for job in pods.values() for pod in job if pod.status.phase != "Running"]
        if waiting:
            raise _not_running(waiting)
        return ClusterSpec({job: [f"{_address(pod)}:{self._port}" for pod in found] for job, found in pods.items()})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given task, or of the one set here; "" as long as neither says which."""
        return task_url(self, task_type, task_id, rpc_layer)

    def _pods(self, selector: str) -> list[Any]:
        if self._client is None:
            raise _no_client(self._location)
        if self._namespace is None:
            found = self._client.list_pod_for_all_namespaces(label_selector=selector)
        else:
            found = self._client.list_namespaced_pod(self._namespace, label_selector=selector)
        return sorted(found.items, key=lambda pod: pod.metadata.name)


def _address(pod: Any) -> str:
    # tf.distribute took the address of the host, where the port belongs to the pod only if the two share a network;
    # then both addresses are the same. A client of the program's own that tells only the host's is understood.
    own = getattr(pod.status, "pod_ip", None)
    return own if own and isinstance(own, str) else pod.status.host_ip


def _not_running(pods: list[Any]) -> SchedulerError:
    return SchedulerError(
        message(
            "`KubernetesClusterResolver(...).cluster_spec()` found pods that cannot take part",
            [f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"' for pod in pods],
            "A pod has no address that lasts before it runs and after it has ended.",
            ["wait until all pods of the job run", "choose a label that only the pods of this job carry"],
        )
    )


def _unknown_location(location: object) -> ClusterError:
    return ClusterError(
        message(
            f"`KubernetesClusterResolver(executable_location={location!r})` is no such place",
            instead=[f"executable_location={place}" for place in KubernetesExecutableLocation],
        )
    )


def _no_client(location: KubernetesExecutableLocation) -> NotAvailableError:
    load = "load_incluster_config" if location is KubernetesExecutableLocation.WITHIN_CLUSTER else "load_kube_config"
    return NotAvailableError(
        message(
            "`KubernetesClusterResolver()` needs a client to ask the API server with",
            instead=[
                f"import kubernetes; kubernetes.config.{load}(); "
                "KubernetesClusterResolver(override_client=kubernetes.client.CoreV1Api())"
            ],
        )
    )
