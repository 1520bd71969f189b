"""How does Slurm say it? Environment variables of the job step: the hosts, the tasks on each, and this task's rank.

Slurm numbers the tasks of a step host by host, in the order of its host list (`srun --distribution=block`, the
default). So rank, host, port and GPUs of every task follow from three variables, without a word between processes.
"""

# Why the hosts are not sorted: tf.distribute sorted them by name and gave out task numbers in that order. Slurm orders
# n[2,10] as n2, n10, a sort of strings as n10, n2, and then rank 0 believed to have the address of rank 1's machine.

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping

from replicax._errors import SchedulerError, message
from replicax.cluster._resolvers.base import ClusterResolver, Found, task_url
from replicax.cluster._resolvers.hostlist import expand_hostlist, expand_tasks_per_node
from replicax.cluster._roles import WORKER
from replicax.cluster._spec import ClusterSpec

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where the task of one rank runs."""

    node: int
    local: int
    address: str


class SlurmClusterResolver(ClusterResolver):
    """The cluster that one `srun` started.

    Every task of the step becomes a task of the cluster: rank 0, 1, ... are handed to the jobs in alphabetical order of
    their names. Tasks on the same host get ports counted from `port_base`, and each its own share of the host's GPUs.

    Args:
      jobs: How many tasks each job has; all are workers by default.
      port_base: The port of the first task on each host.
      gpus_per_node: By default as many as ``CUDA_VISIBLE_DEVICES`` lists, else as many as ``nvidia-smi`` finds; 0 where
        there is neither.
      gpus_per_task: By default the GPUs of a node shared out evenly among the tasks of the fullest node.
      tasks_per_node: One number for all hosts or a number for each; by default what Slurm says.
      auto_set_gpu: Whether `cluster_spec()` sets ``CUDA_VISIBLE_DEVICES`` to this task's share, for JAX to see when it
        starts.
      rpc_layer: The protocol before addresses.

    Raises:
      SchedulerError: If this is not a Slurm step, or if Slurm's word and the arguments do not add up.

    Example:
      Rank 2 of ``srun --nodes 2 --ntasks-per-node 2`` on n1 and n2:

      >>> import os
      >>> from replicax.cluster import SlurmClusterResolver
      >>> step = dict(SLURM_PROCID="2", SLURM_STEP_NODELIST="n[1-2]", SLURM_STEP_TASKS_PER_NODE="2(x2)")
      >>> os.environ.update(step)
      >>> resolver = SlurmClusterResolver(jobs={"ps": 1, "worker": 3}, gpus_per_node=0)
      >>> resolver.cluster_spec()
      ClusterSpec({'ps': ['n1:8888'], 'worker': ['n1:8889', 'n2:8888', 'n2:8889']})
      >>> resolver.get_task_info()
      ('worker', 1)
      >>> for name in step:
      ...     del os.environ[name]
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        self._rank = int(_step_variable("PROCID"))
        counts = _tasks_by_host(expand_hostlist(_step_variable("STEP_NODELIST")), tasks_per_node)
        _check_total(counts)
        self._slots = _slots(counts, port_base)
        self._tasks = _deal(dict(jobs) if jobs is not None else {WORKER: len(self._slots)}, len(self._slots))
        _check_rank(self._rank, self._slots)
        gpus = _gpus_of_node(gpus_per_node)
        fullest = max(counts.values())
        self._gpus_per_task = len(gpus) // fullest if gpus_per_task is None else gpus_per_task
        if self._gpus_per_task * fullest > len(gpus):
            raise _too_few_gpus(self._gpus_per_task, fullest, len(gpus))
        first = self._slots[self._rank].local * self._gpus_per_task
        self._own_gpus = gpus[first : first + self._gpus_per_task]
        self._auto_set_gpu = auto_set_gpu

    def cluster_spec(self) -> ClusterSpec:
        """All tasks of the step; also gives this task its GPUs, if `auto_set_gpu`."""
        if self._auto_set_gpu and self._own_gpus:
            os.environ[_VISIBLE] = ",".join(self._own_gpus)
        jobs: dict[str, list[str]] = {}
        for (job, _), slot in zip(self._tasks, self._slots, strict=True):
            jobs.setdefault(job, []).append(slot.address)
        return ClusterSpec(jobs)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The job of this process and the number of its task."""
        return self.task_type, self.task_id

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given task, this process's own by default."""
        return task_url(self, task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """The GPUs that each task has. Unlike other resolvers this one knows without asking JAX."""
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}

    def _found(self) -> Found:
        return Found(*self._tasks[self._rank])


def _tasks_by_host(hosts: list[str], said: int | Mapping[str, int] | None) -> dict[str, int]:
    if isinstance(said, int):
        return dict.fromkeys(hosts, said)
    if said is not None:
        if set(said) != set(hosts):
            raise _other_hosts(hosts, said)
        return {host: said[host] for host in hosts}
    counts = expand_tasks_per_node(_step_variable("STEP_TASKS_PER_NODE"))
    if len(counts) != len(hosts):
        raise SchedulerError(message(f"Slurm names {len(hosts)} hosts and {len(counts)} numbers of tasks"))
    return dict(zip(hosts, counts, strict=True))


def _check_total(counts: Mapping[str, int]) -> None:
    started = os.environ.get("SLURM_STEP_NUM_TASKS")
    if started is not None and int(started) != sum(counts.values()):
        raise _other_number_of_tasks(int(started), counts)


def _slots(counts: Mapping[str, int], port_base: int) -> list[_Slot]:
    """The slot of each rank."""
    return [
        _Slot(node, local, f"{host}:{port_base + local}")
        for node, (host, count) in enumerate(counts.items())
        for local in range(count)
    ]


def _deal(jobs: Mapping[str, int], tasks: int) -> list[tuple[str, int]]:
    """The job and task number of each rank."""
    dealt = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
    if len(dealt) != tasks:
        raise SchedulerError(
            message(
                f"`SlurmClusterResolver(jobs=...)`: Requested {len(dealt)} tasks but only {tasks} were assigned",
                [f"{job}: {count}" for job, count in jobs.items()],
                "Every task of the step has a place in the cluster, and every place needs a task.",
                [f"start the step with `srun --ntasks={len(dealt)}`", f"share out {tasks} tasks in `jobs`"],
            )
        )
    return dealt


def _check_rank(rank: int, slots: list[_Slot]) -> None:
    """Slurm also tells each task where it really is. If that is another place, the addresses would be wrong."""
    if rank >= len(slots):
        raise SchedulerError(message(f"Rank {rank} has no place in a step of {len(slots)} tasks"))
    slot = slots[rank]
    really = int(os.environ.get("SLURM_NODEID", slot.node)), int(os.environ.get("SLURM_LOCALID", slot.local))
    if really != (slot.node, slot.local):
        raise SchedulerError(
            message(
                "The tasks of this Slurm step are not numbered host by host",
                [f"rank {rank} is task {really[1]} of host {really[0]}, not task {slot.local} of host {slot.node}"],
                "Each task works out the addresses of all others from that numbering.",
                ["start the step with `srun --distribution=block`"],
            )
        )


def _gpus_of_node(said: int | None) -> list[str]:
    """The names of this host's GPUs as `CUDA_VISIBLE_DEVICES` wants them."""
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    if said is None:
        return visible if _VISIBLE in os.environ else [str(i) for i in range(_count_with_nvidia_smi())]
    return visible[:said] if len(visible) >= said else [str(i) for i in range(said)]


def _count_with_nvidia_smi() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=60)
    if listed.returncode:
        raise SchedulerError(
            message(
                "`SlurmClusterResolver()` could not count the GPUs of this host",
                [f"`nvidia-smi --list-gpus` ended with {listed.returncode}: {listed.stderr.strip()}"],
                instead=["SlurmClusterResolver(gpus_per_node=4)"],
            )
        )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _step_variable(name: str) -> str:
    value = os.environ.get(f"SLURM_{name}")
    if value is None:
        raise SchedulerError(
            message(
                f"SLURM_{name} not found in environment. Not running inside a SLURM step?",
                why="A batch script itself is not a step; what it starts with `srun` is.",
                instead=["srun --ntasks=8 python train.py"],
            )
        )
    return value


def _other_hosts(hosts: list[str], said: Mapping[str, int]) -> SchedulerError:
    return SchedulerError(
        message(
            "`SlurmClusterResolver(tasks_per_node=...)` speaks of other hosts than Slurm",
            [f"tasks_per_node: {sorted(said)}", f"Slurm: {hosts}"],
            instead=["one number for all hosts: `tasks_per_node=2`", "leave it out, and Slurm's own numbers count"],
        )
    )


def _other_number_of_tasks(started: int, counts: Mapping[str, int]) -> SchedulerError:
    return SchedulerError(
        message(
            f"Slurm started {started} tasks, and `tasks_per_node` makes {sum(counts.values())}",
            [f"{host}: {count}" for host, count in counts.items()],
            instead=["leave `tasks_per_node` out, and Slurm's own numbers count"],
        )
    )


def _too_few_gpus(per_task: int, tasks: int, gpus: int) -> SchedulerError:
    return SchedulerError(
        message(
            "`SlurmClusterResolver(...)`: the tasks of one node want more GPUs than it has",
            [f"{tasks} tasks x {per_task} GPUs = {tasks * per_task}", f"the node has {gpus}"],
            instead=[f"gpus_per_task={gpus // tasks}", f"gpus_per_node={tasks * per_task}, if it has that many"],
        )
    )
