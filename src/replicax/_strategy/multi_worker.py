"""A copy of the model on each device of many machines? `MultiWorkerMirroredStrategy`, and what of it is there already.

Where nobody else is in the job it is a strategy of one machine and works. A cluster of several workers is read and
checked, and then refused: what would connect the processes is not built yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._devices import accelerators_or_one_cpu
from replicax._errors import ClusterError, NotAvailableError, message
from replicax._options import CommunicationImplementation, CommunicationOptions
from replicax._strategy.base import Strategy
from replicax._strategy.layout import LayoutPolicy
from replicax._strategy.mirrored import replicas_of
from replicax.cluster import ClusterResolver, ClusterSpec, TFConfigClusterResolver, validate_cluster, worker_count
from replicax.cluster._roles import PS


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several machines, variables mirrored on each.

    Without a cluster, or with one in which this process is the only one that trains, it uses the devices of this
    machine. A cluster of several workers raises `rx.NotAvailableError`.

    Args:
      cluster_resolver: Who is in the job; by default what ``TF_CONFIG`` says.
      communication_options: How reductions travel, for all of them; see `rx.CommunicationOptions`.
      communication: Only their implementation, as the experimental class of tf.distribute took it; there it came
        first and the resolver second, which works too.
      eager: True runs steps line by line, so that `print` and `pdb` work.
      replica_mesh: The axes inside a replica of several devices, as in `rx.MirroredStrategy`.
      variables: How variables lie between steps, likewise.

    >>> import replicax as rx
    >>> strategy = rx.MultiWorkerMirroredStrategy()
    >>> strategy.num_replicas_in_sync, strategy.extended.should_checkpoint
    (1, True)
    """

    between_graph = True

    def __init__(
        self,
        cluster_resolver: ClusterResolver | CommunicationImplementation | None = None,
        communication_options: CommunicationOptions | ClusterResolver | None = None,
        *,
        communication: CommunicationImplementation | str | None = None,
        eager: bool = False,
        replica_mesh: Mapping[str, int] | None = None,
        variables: LayoutPolicy | None = None,
    ) -> None:
        if isinstance(cluster_resolver, CommunicationImplementation):  # the order of tf.distribute.experimental
            given: tuple[Any, Any] = (communication_options, None)
            communication = cluster_resolver
        else:
            given = (cluster_resolver, communication_options)
        resolver, options = _resolver(given[0]), _options(given[1], communication)
        _check_alone(resolver)
        self._resolver = resolver
        placement = replicas_of(accelerators_or_one_cpu(), replica_mesh, eager=eager)
        super().__init__(placement, eager=eager, communication_options=options, variables=variables)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver this strategy was made from."""
        return self._resolver


def _resolver(given: Any) -> ClusterResolver:
    if given is None:
        return TFConfigClusterResolver()
    if not isinstance(given, ClusterResolver):
        raise ClusterError(
            message(
                "`rx.MultiWorkerMirroredStrategy(cluster_resolver)` needs a cluster resolver",
                [f"got {given!r} of type {type(given).__name__}"],
                instead=[
                    "rx.cluster_resolver.TFConfigClusterResolver()",
                    "rx.cluster_resolver.SimpleClusterResolver(ClusterSpec(...), task_type='worker', task_id=0)",
                ],
            )
        )
    return given


def _options(given: Any, communication: CommunicationImplementation | str | None) -> CommunicationOptions:
    if given is None:
        return CommunicationOptions(implementation=communication or CommunicationImplementation.AUTO)
    if not isinstance(given, CommunicationOptions) or communication is not None:
        twice = [] if communication is None else [f"and communication={communication!r}, which it says too"]
        raise ClusterError(
            message(
                "`rx.MultiWorkerMirroredStrategy(communication_options)` needs an `rx.CommunicationOptions` alone",
                [f"got {given!r} of type {type(given).__name__}", *twice],
                instead=['rx.CommunicationOptions(implementation="nccl")'],
            )
        )
    return given


def _check_alone(resolver: ClusterResolver) -> None:
    """Refuses a cluster that makes no sense, and one in which others train too."""
    cluster = resolver.cluster_spec()
    if not cluster:
        return
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is None or task_id is None:
        raise ClusterError(
            message(
                "When `cluster_spec` is given, you must also specify `task_type` and `task_id`",
                [f"task_type={task_type!r}, task_id={task_id!r}, cluster {cluster}"],
                "They say which process of the cluster this one is.",
            )
        )
    validate_cluster(cluster, task_type, task_id)
    if task_type == PS:
        raise ClusterError(
            f"rx.MultiWorkerMirroredStrategy: a chief, a worker or an evaluator trains or watches, and this is {PS!r}."
        )
    workers = worker_count(cluster, task_type)
    if workers > 1:
        raise several_processes("rx.MultiWorkerMirroredStrategy(cluster_resolver)", cluster, workers)


def several_processes(call: str, cluster: ClusterSpec, processes: int) -> NotAvailableError:
    """What is missing for a synchronous strategy over several processes."""
    return NotAvailableError(
        message(
            f"`{call}` is not available yet for several processes",
            [f"{processes} processes train: {cluster}"],
            "What is missing is what starts their collectives and notices when one of them is gone. It will come with "
            "`rx.MultiWorkerMirroredStrategy`.",
            [
                "use the devices of this process: `rx.MirroredStrategy()`",
                "leave the cluster out (unset TF_CONFIG), for this machine alone",
            ],
        )
    )
