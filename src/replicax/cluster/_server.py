"""How does a process join a cluster? `Server` says which task this process is; starting it is still to come.

What can be decided without other processes is decided here and tested: which job and task are meant, and at which
address they would listen.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from replicax._errors import ClusterError, NotAvailableError, message
from replicax.cluster._resolvers.base import said_first, url
from replicax.cluster._resolvers.tf_config import TFConfigClusterResolver
from replicax.cluster._roles import CHIEF, WORKER
from replicax.cluster._spec import ClusterLike, ClusterSpec


@dataclasses.dataclass(frozen=True)
class ServerDef:
    """Everything a server needs to know: its cluster, its place in it, and how it is spoken to."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"
    default_session_config: Any = None


class Server:
    """One task of a cluster, listening at its address.

    Args:
      server_or_cluster_def: The cluster, or a `ServerDef`, whose fields the other arguments replace.
      job_name: The job of this task. May be left out if the cluster has only one.
      task_index: Its number. May be left out if the job has only one task.
      protocol: How it is spoken to; ``"grpc"`` by default.
      config: Kept in the `server_def`.
      start: Whether to start at once.

    Raises:
      ClusterError: If it cannot be told which task is meant, or there is no such task.
      NotAvailableError: On start. This version of replicax runs in one process.

    Example:
      >>> from replicax.cluster import Server
      >>> server = Server({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, task_index=1, start=False)
      >>> server.target
      'grpc://10.0.0.2:2222'
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterLike,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        self._server_def = _server_def(server_or_cluster_def, job_name, task_index, protocol, config)
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """A cluster of one task on this machine, at any free port."""
        return Server({"localhost": ["localhost:0"]}, protocol="grpc", config=config, start=start)

    @property
    def server_def(self) -> ServerDef:
        """Which task this is, after everything left out has been filled in."""
        return self._server_def

    @property
    def target(self) -> str:
        """Where this task is reached."""
        this = self._server_def
        return url(this.cluster.task_address(this.job_name, this.task_index), this.protocol)

    def start(self) -> NoReturn:
        """Starts to listen."""
        raise _one_process("start", self.target)

    def join(self) -> NoReturn:
        """Waits for the server to end."""
        raise _one_process("join", self.target)


def serve_from_tf_config(session_config: Any = None) -> Server:
    """Starts the server of the task that ``TF_CONFIG`` says this process is.

    Raises:
      ClusterError: If ``TF_CONFIG`` does not say it, or the cluster has nobody who trains.
      NotAvailableError: Otherwise, see `Server`.
    """
    resolver = TFConfigClusterResolver()
    cluster, job = resolver.cluster_spec(), resolver.task_type
    if job is None or not {CHIEF, WORKER} & set(cluster.jobs):
        raise ClusterError(
            message(
                "TF_CONFIG does not say which server to start",
                [f"cluster: {cluster}", f"task.type: {job}"],
                "It needs a cluster in which somebody trains, a chief or a worker, and the task that this process is.",
                ['TF_CONFIG=\'{"cluster": {"worker": ["a:2222"]}, "task": {"type": "worker", "index": 0}}\''],
            )
        )
    return Server(cluster, job, resolver.task_id or 0, resolver.rpc_layer, session_config)


def _server_def(
    given: ServerDef | ClusterLike, job_name: str | None, task_index: int | None, protocol: str | None, config: Any
) -> ServerDef:
    if isinstance(given, ServerDef):
        cluster = given.cluster
        job, index = said_first(job_name, given.job_name), said_first(task_index, given.task_index)
        protocol, config = said_first(protocol, given.protocol), said_first(config, given.default_session_config)
    else:
        cluster, job, index = ClusterSpec(given), job_name, task_index
    job = _only("job_name", "the cluster", cluster.jobs) if job is None else job
    index = _only("task_index", f"job {job!r}", cluster.task_indices(job)) if index is None else index
    cluster.task_address(job, index)  # refuses a task that is not there
    return ServerDef(cluster, job, index, protocol or "grpc", config)


def _only(argument: str, whose: str, choices: list[Any]) -> Any:
    if len(choices) != 1:
        raise ClusterError(
            message(
                f"`Server(...)`: Must specify an explicit `{argument}`",
                [f"{whose} has {choices}"],
                "It may be left out where there is only one.",
                [f"Server(cluster, {argument}={choice!r})" for choice in choices],
            )
        )
    return choices[0]


def _one_process(call: str, target: str) -> NotAvailableError:
    return NotAvailableError(
        message(
            f"`Server.{call}()` cannot serve {target}: this version of replicax runs in one process",
            why="The processes of a job will be started, and will find each other, by `replicax launch`.",
            instead=["use the devices of this process: `rx.MirroredStrategy()`"],
        )
    )
