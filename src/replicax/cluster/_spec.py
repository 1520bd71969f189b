"""What does a cluster look like as data?

A cluster is a handful of jobs ("worker", "ps", ...), a job is a list of numbered tasks, and a task is an address. The
numbers may have holes: a worker may know only itself and the parameter servers. `ClusterSpec` holds exactly that and
answers questions about it; who plays which role is decided in `_roles.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from replicax._errors import ClusterError, ClusterTypeError, message

Tasks: TypeAlias = "list[str] | tuple[str, ...] | Mapping[int, str]"
ClusterLike: TypeAlias = "ClusterSpec | ClusterDefLike | Mapping[str, Tasks]"


@dataclasses.dataclass(frozen=True)
class JobDef:
    """One job of a `ClusterDef`: its name, and its addresses by task number."""

    name: str
    tasks: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class ClusterDef:
    """A cluster spelled out for a program to read: the same fields as the protobuf that tf.distribute sends around."""

    job: tuple[JobDef, ...]


class ClusterDefLike(Protocol):
    """Anything with the fields of `ClusterDef`, a protobuf for one."""

    @property
    def job(self) -> Iterable[Any]: ...


class ClusterSpec:
    """The jobs of a cluster and the address of each of their tasks.

    Write it once, by hand or through a resolver, and every process of the job learns from it who else is there.

    Args:
      cluster: Addresses by job name: a list numbers the tasks from 0, a dictionary names the numbers and may leave
        some out. Another `ClusterSpec` or a `ClusterDef` is accepted too.

    Raises:
      ClusterTypeError: If it is made of anything else.

    Example:
      >>> from replicax.cluster import ClusterSpec
      >>> cluster = ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"], "ps": {3: "10.0.0.9:2222"}})
      >>> cluster.jobs, cluster.num_tasks("worker"), cluster.task_address("ps", 3)
      (['worker', 'ps'], 2, '10.0.0.9:2222')
      >>> cluster.job_tasks("ps")
      [None, None, None, '10.0.0.9:2222']
    """

    def __init__(self, cluster: ClusterLike) -> None:
        self._jobs = {job: _numbered(job, tasks) for job, tasks in _pairs(cluster)}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks the job has; holes in the numbering do not count."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The numbers of the job's tasks, ascending."""
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task."""
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise _no_such_task(job_name, task_index, tasks)
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The job's addresses in a list in which the position is the task number; None stands in a hole."""
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """The cluster as one would write it: a list where the numbers run from 0 without a hole, else a dictionary."""
        return {job: list(tasks.values()) if _dense(tasks) else dict(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> ClusterDef:
        """The cluster as a `ClusterDef`, jobs in alphabetical order."""
        return ClusterDef(tuple(JobDef(job, dict(self._jobs[job])) for job in sorted(self._jobs)))

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise _no_such_job(job_name, self.jobs)
        return self._jobs[job_name]


def _pairs(cluster: ClusterLike) -> Iterable[tuple[str, Any]]:
    if isinstance(cluster, ClusterSpec):
        return cluster._jobs.items()
    if isinstance(cluster, Mapping):
        return cluster.items()
    if hasattr(cluster, "job"):
        return [(job.name, job.tasks) for job in cluster.job]
    raise _not_a_cluster(cluster)


def _numbered(job: str, tasks: Tasks) -> dict[int, str]:
    """The tasks of one job by number, in ascending order."""
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(job, str) or not isinstance(tasks, Mapping):
        raise _not_tasks(job, [f"{tasks!r} is of type {type(tasks).__name__}"])
    bad = [
        f"task {index!r}: {address!r}"
        for index, address in tasks.items()
        if type(index) is not int or index < 0 or not isinstance(address, str)
    ]
    if bad:
        raise _not_tasks(job, bad)
    return dict(sorted(tasks.items()))


def _dense(tasks: dict[int, str]) -> bool:
    # An empty job is not dense: it stays `{}`, the form in which it can be told from a job that was emptied by hand.
    return bool(tasks) and list(tasks) == list(range(len(tasks)))


def _not_a_cluster(cluster: object) -> ClusterTypeError:
    return ClusterTypeError(
        message(
            "`ClusterSpec(cluster)` needs a dictionary from job names to addresses",
            [f"got {cluster!r} of type {type(cluster).__name__}"],
            instead=['ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})'],
        )
    )


def _not_tasks(job: object, bad: list[str]) -> ClusterTypeError:
    return ClusterTypeError(
        message(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings",
            bad,
            "Other processes find a task by its job, its number (0, 1, ...) and its address.",
            [f'ClusterSpec({{{job!r}: ["10.0.0.1:2222"]}})', f'ClusterSpec({{{job!r}: {{3: "10.0.0.1:2222"}}}})'],
        )
    )


def _no_such_job(job: object, known: list[str]) -> ClusterError:
    return ClusterError(message(f"No such job in cluster: {job!r}", [f"the cluster has {known or 'no jobs'}"]))


def _no_such_task(job: str, index: object, tasks: dict[int, str]) -> ClusterError:
    known = list(tasks) or "no tasks"
    return ClusterError(message(f"No task with index {index!r} in job {job!r}", [f"the job has {known}"]))
