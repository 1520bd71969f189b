"""Who plays which part in a cluster?

Four job names have a meaning: the *chief* and the *workers* train together and are numbered as one group, chief first;
*ps* tasks hold variables; the *evaluator* watches on its own. Each function answers one question about a task, after
checking that the cluster and the task can be what they are said to be.
"""

from __future__ import annotations

from collections.abc import Iterator

from replicax._errors import ClusterError, message
from replicax.cluster._spec import ClusterLike, ClusterSpec

CHIEF, WORKER, PS, EVALUATOR = "chief", "worker", "ps", "evaluator"
ROLES = (CHIEF, WORKER, PS, EVALUATOR)
_ONLY_ONE = (CHIEF, EVALUATOR)


def normalize_cluster_spec(cluster_spec: ClusterLike) -> ClusterSpec:
    """A `ClusterSpec` from whatever form the caller has."""
    return cluster_spec if isinstance(cluster_spec, ClusterSpec) else ClusterSpec(cluster_spec)


def validate_cluster(
    cluster_spec: ClusterLike, task_type: str | None = None, task_id: int | None = None
) -> ClusterSpec:
    """The cluster, or an error that names everything that keeps this task from taking part in it.

    Args:
      cluster_spec: The cluster; only the jobs chief, worker, ps and evaluator may be in it, and only one chief and one
        evaluator.
      task_type: The job of the task to check; None checks the cluster alone. An evaluator need not be listed.
      task_id: Its number.

    Example:
      >>> from replicax.cluster import validate_cluster
      >>> validate_cluster({"worker": ["a:1", "b:1"]}, "worker", 2)
      Traceback (most recent call last):
        ...
      replicax...ClusterError: The cluster cannot be used by task_type='worker', task_id=2:
      <BLANKLINE>
        The `task_id` 2 exceeds the maximum id of worker, which is 1
    """
    cluster = normalize_cluster_spec(cluster_spec)
    problems = list(_problems(cluster, task_type, task_id))
    if problems:
        raise ClusterError(
            message(f"The cluster cannot be used by task_type={task_type!r}, task_id={task_id!r}", problems)
        )
    return cluster


def is_chief(cluster_spec: ClusterLike | None = None, task_type: str | None = None, task_id: int | None = None) -> bool:
    """Whether this task does what only one should do: write checkpoints, summaries and the log.

    That is the chief, or worker 0 where there is no chief. An evaluator is alone in its own world and therefore chief
    of it, and so is a process that belongs to no cluster.
    """
    if not cluster_spec and task_type is None:
        return True
    cluster = validate_cluster(cluster_spec or {}, task_type, task_id)
    if task_type in (CHIEF, EVALUATOR):
        return True
    return CHIEF not in cluster.jobs and task_type == WORKER and task_id == 0


def worker_count(cluster_spec: ClusterLike, task_type: str) -> int:
    """How many tasks train together with a task of this type."""
    cluster = validate_cluster(cluster_spec, task_type, task_id=None)
    if task_type == PS:
        raise _does_not_train("worker_count", "There is no worker count for task_type 'ps'")
    if task_type == EVALUATOR:
        return _count(cluster, EVALUATOR)
    return _count(cluster, CHIEF) + _count(cluster, WORKER)


def id_in_cluster(cluster_spec: ClusterLike, task_type: str, task_id: int) -> int:
    """The number of this task among those that train together: the chief first, then the workers.

    Example:
      >>> from replicax.cluster import id_in_cluster
      >>> id_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}, "worker", 1)
      2
    """
    cluster = validate_cluster(cluster_spec, task_type, task_id)
    if task_type == PS:
        raise _does_not_train("id_in_cluster", "There is no id for task_type 'ps'")
    if task_type == WORKER:
        return task_id + _count(cluster, CHIEF)
    return task_id


def global_id_in_cluster(cluster_spec: ClusterLike, task_type: str, task_id: int) -> int:
    """The number of this task among all tasks: the chief, then the other jobs by name, parameter servers last."""
    cluster = validate_cluster(cluster_spec, task_type, task_id)
    cluster.task_address(task_type, task_id)  # an evaluator may stand outside the cluster, but then has no number in it
    order = sorted(cluster.jobs, key=lambda job: (job == PS, job != CHIEF, job))
    tasks = [(job, index) for job in order for index in cluster.task_indices(job)]
    return tasks.index((task_type, task_id))


def collective_leader(cluster_spec: ClusterLike, task_type: str | None, task_id: int | None) -> str:
    """The task that starts collectives, as a device prefix; "" for a process that has nobody to agree with."""
    cluster = validate_cluster(cluster_spec, task_type, task_id)
    if not cluster or task_type == EVALUATOR:
        return ""
    return _first_task(cluster, (CHIEF, WORKER))


def coordination_leader(cluster_spec: ClusterLike) -> str:
    """The task that hosts the coordination service: the one that lives longest, a parameter server if there is one."""
    cluster = validate_cluster(cluster_spec)
    return _first_task(cluster, (PS, CHIEF, WORKER)) if cluster else ""


def _problems(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> Iterator[str]:
    for job in cluster.jobs:
        if job not in ROLES:
            yield f"Disallowed task type {job!r} in the cluster; the jobs are {', '.join(ROLES)}"
    for job in _ONLY_ONE:
        if _count(cluster, job) > 1:
            yield f"There must be at most one {job}, and the cluster has {_count(cluster, job)}"
    if task_type is None:
        return
    if task_type not in ROLES:
        yield f"Unrecognized task_type {task_type!r}; the jobs are {', '.join(ROLES)}"
    elif task_type not in cluster.jobs:
        if task_type != EVALUATOR:
            yield f"`task_type` {task_type!r} is not in the cluster, whose jobs are {cluster.jobs}"
    elif task_id is not None and task_id not in (indices := cluster.task_indices(task_type)):
        above = max(indices, default=-1)
        yield (
            f"The `task_id` {task_id} exceeds the maximum id of {task_type}, which is {above}"
            if task_id > above
            else f"The `task_id` {task_id} is not among the tasks of {task_type}, which are {indices}"
        )


def _count(cluster: ClusterSpec, job: str) -> int:
    return cluster.num_tasks(job) if job in cluster.jobs else 0


def _first_task(cluster: ClusterSpec, preference: tuple[str, ...]) -> str:
    for job in preference:
        if _count(cluster, job):
            return f"/job:{job}/replica:0/task:0"
    raise ClusterError(
        message(
            "Nobody in this cluster can lead",
            [f"the cluster has {cluster.jobs}"],
            instead=[f"add a task to one of the jobs {', '.join(preference)}"],
        )
    )


def _does_not_train(call: str, what: str) -> ClusterError:
    return ClusterError(
        message(
            f"`{call}(...)`: {what}",
            why="Parameter servers hold variables and do not train, so they are not numbered with the workers.",
            instead=["ask about a chief, worker or evaluator", "use `global_id_in_cluster` to number all tasks"],
        )
    )
