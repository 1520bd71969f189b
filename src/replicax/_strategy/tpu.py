"""One replica on each core of a TPU slice, or on several cores? `TPUStrategy`.

It asks for TPUs by name only: with the resolver "local" the cores are the devices of this process, whatever they are,
so that a TPU program can be tried on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from replicax import _errors
from replicax._errors import ClusterError, DeviceError, message
from replicax._options import is_count
from replicax._placement import Placement, place, place_grid
from replicax._strategy import logical, sessions
from replicax._strategy.base import Strategy
from replicax._strategy.extended import StrategyExtended
from replicax._strategy.layout import LayoutPolicy
from replicax._strategy.mirrored import check_inside
from replicax.cluster import DeviceAssignment, Topology, TPUClusterResolver, TPUSystemMetadata

_HOST_CPU = "/task:{host}/device:CPU:0"


class TPUStrategy(Strategy):
    """Synchronous training on the cores of a TPU slice: one replica per core, or per group of cores.

    Args:
      tpu_cluster_resolver: Which slice; by default ``TPUClusterResolver("")``, the devices of this process.
      experimental_device_assignment: Which cores form a replica, a `DeviceAssignment`. With several cores each, the
        axis inside a replica is called ``"model"`` and `variables` says how parameters are cut over it.
      experimental_spmd_xla_partitioning: Kept for programs written for tf.distribute: XLA always partitions replicas of
        several cores. With True, values can no longer be assigned to one core.
      steps_per_run: How many steps a training loop should take per call of `run_steps`.
      num_cores: Uses only so many cores.
      replica_mesh: The axes inside a replica, as in `rx.MirroredStrategy`: the short way to replicas of neighbouring cores.
      variables: How variables lie between steps, likewise.
      eager: True runs steps line by line, so that `print` and `pdb` work.
      device_assignment: The former name of `experimental_device_assignment`.

    >>> import jax, replicax as rx
    >>> resolver = rx.cluster_resolver.TPUClusterResolver("local")
    >>> strategy = rx.TPUStrategy(resolver, num_cores=2)
    >>> strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    PerReplica:{
      0: Array(0, dtype=int32),
      1: Array(1, dtype=int32)
    }
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        steps_per_run: int | None = None,
        num_cores: int | None = None,
        replica_mesh: Mapping[str, int] | None = None,
        variables: LayoutPolicy | None = None,
        eager: bool = False,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        assignment = _assignment(experimental_device_assignment, device_assignment)
        self._resolver = _resolver(tpu_cluster_resolver, "rx.TPUStrategy(...)")
        self._metadata = self._resolver.get_tpu_system_metadata()
        self._assigns_single_cores = not experimental_spmd_xla_partitioning
        self.steps_per_run = _steps_per_run(steps_per_run)
        """How many steps a training loop should take per call of `run_steps`; nothing here asks for it."""
        cluster = self._resolver.cluster_spec()
        self.session_settings = {**sessions.ISOLATED, **({"cluster_def": cluster.as_cluster_def()} if cluster else {})}
        placement = _placed(self._metadata, assignment, num_cores, replica_mesh)
        if eager and placement.auto_axes:
            raise _errors.eager_over_several_devices(placement)
        super().__init__(placement, eager=eager, variables=variables)

    # -- the slice

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver this strategy was made from."""
        return self._resolver

    @property
    def num_hosts(self) -> int:
        """How many hosts the slice has."""
        return self._metadata.num_hosts

    @property
    def num_replicas_per_host(self) -> int:
        """How many replicas each host has."""
        return self._metadata.num_of_cores_per_host // logical.count(self.placement)

    @property
    def host_cpu_devices(self) -> tuple[str, ...]:
        """The names of the CPUs of all hosts."""
        return tuple(self.get_host_cpu_device(host) for host in range(self.num_hosts))

    def get_host_cpu_device(self, host_id: int) -> str:
        """The name of the CPU of a host; with the devices of this process alone it is always this host's."""
        job = self._resolver.get_job_name()
        if job is None:
            return "/replica:0" + _HOST_CPU.format(host=0)
        return f"/job:{job}" + _HOST_CPU.format(host=host_id)

    @property
    def extended(self) -> TPUExtended:
        """The members that tf.distribute keeps under ``strategy.extended``, those of TPUs included."""
        return TPUExtended(self)

    # -- the cores of one replica

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """States inside a step that one core should compute `tensor`. It stays the same value.

        XLA divides every operation over the cores of a replica and takes no such advice: only the number is checked.

        Raises:
          DeviceError: There is no core of this number.
        """
        call = f"strategy.experimental_assign_to_logical_device(x, {logical_device_id})"
        if not self._assigns_single_cores:
            raise DeviceError(
                message(
                    f"`{call}` under experimental_spmd_xla_partitioning=True",
                    why="There every value lies on all cores of a replica, whole or in parts.",
                    instead=["`strategy.experimental_split_to_logical_devices(x, [...])`", "leave the flag out"],
                )
            )
        logical.checked(self.placement, logical_device_id, call)
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Says inside a step that `tensor` lies in equal parts over the cores of its replica. It stays the same value.

        Args:
          partition_dimensions: For each axis in how many parts it is cut; their product is the number of cores.

        >>> import jax, jax.numpy as jnp, replicax as rx
        >>> from replicax.cluster import DeviceAssignment, Topology
        >>> topology = Topology.from_devices(jax.local_devices())
        >>> cores = DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=2)
        >>> strategy = rx.TPUStrategy(experimental_device_assignment=cores)
        >>> def step(x):
        ...     return strategy.experimental_split_to_logical_devices(x, [1, 2]).sum()
        >>> float(strategy.run(step, (jnp.ones((3, 4)),)))
        12.0
        """
        return logical.split(self, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Says inside a step that each core of the replica holds the whole of `tensor`. It stays the same value."""
        return logical.replicate(self, tensor)


class TPUExtended(StrategyExtended):
    """``strategy.extended`` of a `TPUStrategy`, which also tells about the slice."""

    _strategy: TPUStrategy

    @property
    def steps_per_run(self) -> int:
        """How many steps a training loop should take per call of `run_steps`."""
        return self._strategy.steps_per_run

    @property
    def num_hosts(self) -> int:
        """How many hosts the slice has."""
        return self._strategy.num_hosts

    @property
    def num_replicas_per_host(self) -> int:
        """How many replicas each host has."""
        return self._strategy.num_replicas_per_host


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """The topology of the slice. The cores need no preparation, so it may be left out and called any number of times.

    >>> import replicax as rx
    >>> rx.experimental.initialize_tpu_system().num_tasks
    1
    """
    return _resolver(cluster_resolver, "initialize_tpu_system(...)").get_tpu_system_metadata().topology


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Kept for programs written for tf.distribute: the cores are free again when the process ends."""
    _resolver(cluster_resolver, "shutdown_tpu_system(...)")


def _resolver(given: Any, call: str) -> TPUClusterResolver:
    if given is None:
        return TPUClusterResolver("")
    if not isinstance(given, TPUClusterResolver):
        raise ClusterError(
            message(
                f"`{call}` needs a TPUClusterResolver",
                [f"got {type(given).__name__}"],
                instead=['rx.cluster_resolver.TPUClusterResolver("local")'],
            )
        )
    return given


def _assignment(named: Any, formerly: Any) -> DeviceAssignment | None:
    """The device assignment, under whichever of its names it was given."""
    if named is not None and formerly is not None:
        raise DeviceError(
            "`rx.TPUStrategy(experimental_device_assignment=..., device_assignment=...)`: two names of one argument. "
            "Pass one of them."
        )
    given = formerly if named is None else named
    if given is not None and not isinstance(given, DeviceAssignment):
        raise DeviceError(
            message(
                "`rx.TPUStrategy(resolver, experimental_device_assignment)` needs a DeviceAssignment",
                [f"got {given!r} of type {type(given).__name__}"],
                instead=[
                    "DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=n)",
                    "rx.TPUStrategy(resolver, steps_per_run=n), if that was meant",
                ],
            )
        )
    return given


def _steps_per_run(given: int | None) -> int:
    if given is not None and not is_count(given):
        raise ValueError(f"rx.TPUStrategy(steps_per_run={given!r}): a number of steps, at least one.")
    return 1 if given is None else given


def _placed(
    metadata: TPUSystemMetadata,
    assignment: DeviceAssignment | None,
    cores: int | None,
    inside: Mapping[str, int] | None,
) -> Placement:
    if assignment is not None:
        if inside:
            raise _two_ways_to_group(inside)
        grid = assignment.devices
        if cores is not None and cores != grid.size:
            raise _cores(cores, f"the device assignment has {grid.shape[0]} x {grid.shape[1]}")
        return _grid(grid.reshape(-1).tolist(), {"model": grid.shape[1]})
    if cores is not None and not (is_count(cores) and cores <= metadata.num_cores):
        raise _cores(cores, f"the slice has {metadata.num_cores}")
    devices = metadata.devices[:cores]
    check_inside(inside or {}, len(devices))
    return _grid(devices, inside or {})


def _grid(devices: Sequence[jax.Device], inside: Mapping[str, int]) -> Placement:
    """Replicas of several cores. An axis like ``"model"`` is made of one for each prime factor, so that each can be cut."""
    axes: dict[str, int] = {}
    for name, size in inside.items():
        factors = _prime_factors(size)
        names = [name] if len(factors) == 1 else [f"{name}_{i}" for i in range(len(factors))]
        axes |= zip(names, factors, strict=True)
    return place_grid(devices, axes) if axes else place(devices)


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _two_ways_to_group(inside: Mapping[str, int]) -> DeviceError:
    return DeviceError(
        f"`rx.TPUStrategy(experimental_device_assignment=..., replica_mesh={inside!r})`: both say which cores form a "
        "replica. Pass one of them."
    )


def _cores(asked: int, there: str) -> DeviceError:
    return DeviceError(
        message(
            f"`rx.TPUStrategy(num_cores={asked!r})` cannot use so many cores",
            [f"asked for {asked!r}, {there}"],
            instead=[
                "leave `num_cores` out to use all",
                "for more CPU devices write `rx.host.configure(cpu_devices=n)`",
            ],
        )
    )
