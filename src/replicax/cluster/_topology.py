"""How do the cores of a TPU slice lie, and which replica computes on which of them?

A `Topology` is the mesh of cores: coordinates (x, y, z, core of the chip), and for each the host it hangs on and its
number there. A `DeviceAssignment` gives each replica a block of cores in that mesh. Everything works on coordinates
alone; devices that have none, such as the CPU devices of a laptop, are laid out as a slice of their number would be.
"""

# Blocks (`_blocks`): the replicas are counted off in a box as close to a cube as their number allows, the two cores of
# a chip first, then x, y and z, so that neighbours in number are neighbours in the mesh.
#
# Rings (`_ring`): when blocks fill the whole mesh and use whole chips, consecutive replicas, and consecutive chips
# inside a replica, are laid along a closed walk. Ring reductions then only ever travel between neighbours. The walk
# leaves the origin, covers everything but one line in layers there and back, and comes home along that line.

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from replicax._devices import local_devices_default
from replicax._errors import TopologyError, message

Coordinates = tuple[int, ...]

SINGLE_CORE_ASSIGNMENT = [[[0, 0, 0, 0]]]
"""The core assignment of one replica on one core."""


class DeviceOrderMode(enum.Enum):
    """In which order an assignment visits the mesh: a ring where one exists (AUTO), always a ring, never a ring."""

    AUTO = 0
    RING = 1
    MESH = 2


class Topology:
    """The mesh of cores of a TPU slice, and which host and which device each of them is.

    Usually you get it from `from_devices`, or from a resolver; build it by hand to plan for a slice you do not have.

    Args:
      serialized: What `serialized()` returned, in this process or another; the other arguments are then not needed.
      mesh_shape: The size of the mesh along each axis; the last axis counts the cores of a chip.
      device_coordinates: For each host a list of the coordinates of its devices, all hosts having equally many.
      devices: The devices themselves, laid out likewise, if they can be reached from here.

    Raises:
      TopologyError: If a device lies outside the mesh, or two lie in one place.

    Example:
      >>> from replicax.cluster import Topology
      >>> Topology(mesh_shape=(1, 1, 1, 2), device_coordinates=[[(0, 0, 0, 0), (0, 0, 0, 1)]])
      Topology(1x1x1x2, 1 host with 2 cores)
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: ArrayLike | None = None,
        device_coordinates: ArrayLike | None = None,
        devices: Sequence[Sequence[jax.Device]] | None = None,
    ) -> None:
        if serialized is not None:
            fields = _deserialized(serialized)
            mesh_shape, device_coordinates = fields["mesh_shape"], fields["device_coordinates"]
        if mesh_shape is None or device_coordinates is None:
            raise _needs_both()
        self._mesh_shape = _whole_numbers(mesh_shape)
        if self._mesh_shape.ndim != 1 or not self._mesh_shape.size or (self._mesh_shape < 1).any():
            raise _bad_argument("mesh_shape", mesh_shape, "a list of positive sizes, such as (2, 2, 1, 2)")
        self._device_coordinates = _whole_numbers(device_coordinates)
        if self._device_coordinates.ndim != 3 or self._device_coordinates.shape[2] != self.mesh_rank:
            raise _bad_argument(
                "device_coordinates",
                f"an array of shape {self._device_coordinates.shape}",
                f"an array of shape (hosts, devices of a host, {self.mesh_rank})",
            )
        self._places = _places(self._device_coordinates, self._mesh_shape)
        self._devices = devices

    @classmethod
    def from_devices(cls, devices: Sequence[jax.Device] | None = None) -> Topology:
        """The topology of real devices, by default all that this process can address.

        TPU devices know where they lie. Others are given the coordinates of a slice of that many cores, in their order:
        eight CPU devices become a 2x2 square of chips with two cores each, so that a program for such a slice can be
        tried without one.

        >>> import jax
        >>> from replicax.cluster import Topology
        >>> Topology.from_devices(jax.devices()[:1])
        Topology(1x1x1x1, 1 host with 1 core)
        """
        hosts = devices_by_host(local_devices_default() if devices is None else devices)
        if len({len(host) for host in hosts}) > 1:
            raise _unequal_hosts(hosts)
        flat = [device for host in hosts for device in host]
        coordinates = _own_coordinates(flat) if flat[0].platform == "tpu" else _made_up_coordinates(len(flat))
        return cls(
            mesh_shape=coordinates.max(axis=0) + 1,
            device_coordinates=coordinates.reshape(len(hosts), -1, coordinates.shape[1]),
            devices=hosts,
        )

    @property
    def mesh_shape(self) -> np.ndarray:
        """The size of the mesh along each axis."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of axes of the mesh."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """Coordinates by host and device, of shape ``(hosts, devices of a host, mesh_rank)``."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates at which there is no device, one row for each."""
        holes = [point for point in np.ndindex(*self._mesh_shape) if point not in self._places]
        return np.array(holes, dtype=np.int32).reshape(-1, self.mesh_rank)

    @property
    def num_tasks(self) -> int:
        """The number of hosts."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores on each host."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Iterable[int]) -> int:
        """The number of the host of the core at these coordinates."""
        return self._place(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Iterable[int]) -> int:
        """The number, on its host, of the core at these coordinates."""
        return self._place(device_coordinates)[1]

    def cpu_device_name_at_coordinates(self, device_coordinates: Iterable[int], job: str | None = None) -> str:
        """The name of the CPU of the host of the core at these coordinates."""
        return _device_name(job, self.task_ordinal_at_coordinates(device_coordinates), "CPU", 0)

    def tpu_device_name_at_coordinates(self, device_coordinates: Iterable[int], job: str | None = None) -> str:
        """The name of the core at these coordinates."""
        task, ordinal = self._place(device_coordinates)
        return _device_name(job, task, "TPU", ordinal)

    def device_at_coordinates(self, device_coordinates: Iterable[int]) -> jax.Device:
        """The device at these coordinates."""
        task, ordinal = self._place(device_coordinates)
        if self._devices is None:
            raise TopologyError(
                message(
                    f"`device_at_coordinates({tuple(device_coordinates)})`: this topology was made without devices",
                    instead=["Topology.from_devices(jax.devices())"],
                )
            )
        return self._devices[task][ordinal]

    def serialized(self) -> bytes:
        """The shape and the coordinates as bytes, to be sent to another process; devices stay behind."""
        return json.dumps(
            {"mesh_shape": self._mesh_shape.tolist(), "device_coordinates": self._device_coordinates.tolist()}
        ).encode()

    def __repr__(self) -> str:
        hosts, cores = self.num_tasks, self.num_tpus_per_task
        return (
            f"Topology({_by(self._mesh_shape)}, {hosts} host{'s' * (hosts > 1)} with {cores} core{'s' * (cores > 1)})"
        )

    def _place(self, device_coordinates: Iterable[int]) -> tuple[int, int]:
        point = tuple(int(axis) for axis in device_coordinates)
        if point not in self._places:
            raise _no_core_there(point, self._mesh_shape)
        return self._places[point]


class DeviceAssignment:
    """Which cores each replica computes on.

    Give one to `TPUStrategy` to use fewer replicas than there are cores, or several cores for each replica. `build`
    makes a good one; the constructor takes any.

    Args:
      topology: The mesh.
      core_assignment: The coordinates of each core, of shape ``(replicas, cores of a replica, mesh rank)``.

    Raises:
      TopologyError: If the array has another shape, or names a core that does not exist or is named already.

    Example:
      Four replicas of two cores on a slice of eight:

      >>> from replicax.cluster import DeviceAssignment, Topology
      >>> square = [[(x, y, 0, core) for y in (0, 1) for x in (0, 1) for core in (0, 1)]]
      >>> slice_of_eight = Topology(mesh_shape=(2, 2, 1, 2), device_coordinates=square)
      >>> cores = DeviceAssignment.build(slice_of_eight, computation_shape=(1, 1, 1, 2), num_replicas=4)
      >>> cores.coordinates(1, 0), cores.coordinates(1, 1)
      ((1, 0, 0, 0), (1, 0, 0, 1))
      >>> cores.tpu_device(replica=1, logical_core=1)
      '/task:0/device:TPU:3'
    """

    def __init__(self, topology: Topology, core_assignment: ArrayLike) -> None:
        _check_topology(topology)
        self._topology = topology
        self._core_assignment = np.asarray(core_assignment, dtype=np.int32)
        shape = self._core_assignment.shape
        if len(shape) != 3 or shape[2] != topology.mesh_rank:
            raise _bad_argument(
                "core_assignment",
                self._core_assignment,
                f"an array of shape (replicas, cores of a replica, {topology.mesh_rank})",
            )
        self._check_cores()

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: ArrayLike | None = None,
        computation_stride: ArrayLike | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """An assignment in which replicas and the cores of each replica lie close together.

        Args:
          topology: The mesh, or its serialized form.
          computation_shape: How many cores one replica uses along each axis; one core by default.
          computation_stride: How far apart they lie along each axis; next to each other by default.
          num_replicas: The number of replicas.
          device_order_mode: Whether replicas must, may or must not follow a ring. A ring needs whole chips and replicas
            that fill a mesh of rank 4.

        Raises:
          TopologyError: If so many replicas of this shape do not fit, or no ring exists.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        _check_topology(topology)
        if not isinstance(num_replicas, (int, np.integer)):
            raise _bad_argument("num_replicas", num_replicas, "a whole number")
        if not isinstance(device_order_mode, DeviceOrderMode):
            raise _bad_argument("device_order_mode", device_order_mode, "a member of DeviceOrderMode")
        shape = _sizes("computation_shape", computation_shape, topology)
        stride = _sizes("computation_stride", computation_stride, topology)
        counts = _check_fit(topology, shape, stride, num_replicas)
        if topology.missing_devices.size:
            _check_simple_order(topology, shape, stride, num_replicas, device_order_mode)
            flat = topology.device_coordinates.reshape(-1, topology.mesh_rank)
            used = flat[: num_replicas * math.prod(shape)]
            return DeviceAssignment(topology, used.reshape(num_replicas, -1, topology.mesh_rank))
        ring = _ring_is_possible(topology, shape, stride, num_replicas, math.prod(counts))
        if device_order_mode is DeviceOrderMode.RING and not ring:
            raise _no_ring(topology, shape, stride, num_replicas)
        box = _near_cube(num_replicas, counts)
        if ring and device_order_mode is not DeviceOrderMode.MESH:
            return DeviceAssignment(topology, _along_rings(shape, box))
        return DeviceAssignment(topology, _blocks(shape, stride, box, num_replicas))

    @property
    def topology(self) -> Topology:
        """The mesh in which the cores lie."""
        return self._topology

    @property
    def core_assignment(self) -> np.ndarray:
        """The coordinates of each core, of shape ``(replicas, cores of a replica, mesh rank)``."""
        return self._core_assignment

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """The number of cores of each replica, also called its logical devices."""
        return self._core_assignment.shape[1]

    @property
    def devices(self) -> np.ndarray:
        """The devices themselves, as an array of shape ``(replicas, cores of a replica)``."""
        grid = np.empty((self.num_replicas, self.num_cores_per_replica), dtype=object)
        for replica, core in np.ndindex(grid.shape):
            grid[replica, core] = self.device(replica, core)
        return grid

    def coordinates(self, replica: int, logical_core: int) -> Coordinates:
        """Where a core of a replica lies."""
        if not (0 <= replica < self.num_replicas and 0 <= logical_core < self.num_cores_per_replica):
            raise _no_such_core(replica, logical_core, self)
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas whose core of this number is on this host."""
        found: list[int] = []
        if 0 <= logical_core < self.num_cores_per_replica:
            hosts = map(self._topology.task_ordinal_at_coordinates, self._core_assignment[:, logical_core])
            found = [replica for replica, host in enumerate(hosts) if host == task_id]
        if not found:
            raise _no_replica_there(task_id, logical_core, self)
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The number, on its host, of the device of a core."""
        return self._topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """The name of the CPU of the host on which a core is."""
        return self._topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """The name of the device of a core."""
        return self._topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def device(self, replica: int = 0, logical_core: int = 0) -> jax.Device:
        """The device of a core."""
        return self._topology.device_at_coordinates(self.coordinates(replica, logical_core))

    def __repr__(self) -> str:
        return f"DeviceAssignment({self.num_replicas} x {self.num_cores_per_replica} cores of {self._topology})"

    def _check_cores(self) -> None:
        owner: dict[Coordinates, tuple[int, int]] = {}
        for replica, core in np.ndindex(self.num_replicas, self.num_cores_per_replica):
            point = self.coordinates(replica, core)
            self._topology.task_ordinal_at_coordinates(point)
            if point in owner:
                raise _core_given_twice(point, owner[point], (replica, core))
            owner[point] = (replica, core)


def devices_by_host(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each process, in the order of the processes' numbers."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return [hosts[process] for process in sorted(hosts)]


def _own_coordinates(devices: Sequence[Any]) -> np.ndarray:
    """Where TPU devices say they lie, moved so that a part of a slice starts at the origin."""
    coordinates = np.array([[*device.coords, device.core_on_chip] for device in devices], dtype=np.int32)
    return coordinates - coordinates.min(axis=0)


def _made_up_coordinates(count: int) -> np.ndarray:
    """The coordinates of a slice of `count` cores: chips of two in a rectangle, counted cores first, then x, then y."""
    cores = 2 if count % 2 == 0 else 1
    chips = count // cores
    height = max(side for side in range(1, math.isqrt(chips) + 1) if chips % side == 0)
    points = itertools.product(range(height), range(chips // height), range(cores))
    return np.array([(x, y, 0, core) for y, x, core in points], dtype=np.int32)


def _places(coordinates: np.ndarray, mesh_shape: np.ndarray) -> dict[Coordinates, tuple[int, int]]:
    """The host and the number on it of the device at each point."""
    places: dict[Coordinates, tuple[int, int]] = {}
    for task, ordinal in np.ndindex(*coordinates.shape[:2]):
        point = tuple(coordinates[task, ordinal].tolist())
        if any(not 0 <= axis < size for axis, size in zip(point, mesh_shape, strict=True)):
            raise _no_core_there(point, mesh_shape)
        if point in places:
            raise _core_given_twice(point, places[point], (task, ordinal), "device {1} of host {0}")
        places[point] = (task, ordinal)
    return places


def _whole_numbers(given: Any) -> np.ndarray:
    """`given` as an array; an empty one if there is anything but whole numbers in it, which fits nowhere."""
    try:
        array = np.asarray(given)
    except ValueError:  # a ragged list
        array = np.zeros(0)
    return array.astype(np.int32) if array.dtype.kind in "iu" else np.zeros(0, np.int32)


def _deserialized(serialized: Any) -> dict[str, Any]:
    try:
        fields = json.loads(serialized)
        return {name: fields[name] for name in ("mesh_shape", "device_coordinates")}
    except (TypeError, ValueError, KeyError):
        raise _bad_argument("serialized", repr(serialized)[:60], "what `Topology.serialized()` returned") from None


def _sizes(name: str, given: ArrayLike | None, topology: Topology) -> Coordinates:
    sizes = np.ones(topology.mesh_rank, np.int32) if given is None else _whole_numbers(given)
    if sizes.shape != (topology.mesh_rank,) or (sizes < 1).any():
        raise _bad_argument(name, given, f"{topology.mesh_rank} positive sizes, one for each axis of the mesh")
    return tuple(sizes.tolist())


def _check_fit(topology: Topology, shape: Coordinates, stride: Coordinates, num_replicas: int) -> Coordinates:
    """How many replicas fit along each axis."""
    # Cores `stride` apart leave room for stride - 1 further replicas in between.
    footprint = [size * step for size, step in zip(shape, stride, strict=True)]
    mesh = topology.mesh_shape.tolist()
    counts = tuple(size // foot * step for size, foot, step in zip(mesh, footprint, stride, strict=True))
    if not 1 <= num_replicas <= math.prod(counts):
        raise _does_not_fit(topology, shape, stride, footprint, num_replicas, math.prod(counts))
    return counts


def _ring_is_possible(
    topology: Topology, shape: Coordinates, stride: Coordinates, num_replicas: int, most_replicas: int
) -> bool:
    whole_chips = topology.mesh_rank == 4 and shape[-1] == topology.mesh_shape[-1]
    return whole_chips and math.prod(stride) == 1 and num_replicas == most_replicas


def _near_cube(num_replicas: int, counts: Coordinates) -> Coordinates:
    """The sides of a box that holds `num_replicas`, as equal as `counts`, the most along each axis, allows."""
    # The tightest axis is settled first, so that what it cannot take is known when the roomier ones are settled. Among
    # equally tight ones the last, which counts the cores of a chip, goes first.
    rank = len(counts)
    tightest_first = sorted(range(rank), key=lambda axis: (counts[axis], (axis + 1) % rank))
    box = [1] * rank
    missing = num_replicas
    for settled, axis in enumerate(tightest_first):
        even = next(side for side in itertools.count(1) if side ** (rank - settled) >= missing)
        box[axis] = min(even, counts[axis])
        missing = -(-missing // box[axis])
    return tuple(box)


def _blocks(shape: Coordinates, stride: Coordinates, box: Coordinates, num_replicas: int) -> np.ndarray:
    """Replicas counted off in the box, each with its own cores counted off in its block."""
    step = np.array(stride)
    cores = np.array(list(np.ndindex(*shape))) * step
    # The cores of a chip count fastest, then x, y and z.
    slowest_first = [*range(len(box) - 2, -1, -1), len(box) - 1]
    position = np.empty((num_replicas, len(box)), dtype=np.int32)
    position[:, slowest_first] = list(
        itertools.islice(np.ndindex(*(box[axis] for axis in slowest_first)), num_replicas)
    )
    corners = position // step * (np.array(shape) * step) + position % step
    return corners[:, None, :] + cores[None, :, :]


def _along_rings(shape: Coordinates, box: Coordinates) -> np.ndarray:
    """Replicas along a ring through the box, the chips of each along a ring through its block."""
    *block, cores = shape
    return np.array(
        [
            [
                [*(o * size + i for o, i, size in zip(outer, inner, block, strict=True)), core]
                for inner in _ring(block)
                for core in range(cores)
            ]
            for outer in _ring(box[:-1])
        ]
    )


def _ring(sizes: Sequence[int]) -> list[Coordinates]:
    """All points of a grid, so that each is a neighbour of the one before, and the last of the first.

    No such walk exists on a line, which is walked from end to end, nor, with this construction, on a grid with an odd
    side, which is read line by line.
    """
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    long = [sizes[axis] for axis in axes]
    if len(long) > 1 and any(size % 2 for size in long):
        walk = [point[::-1] for point in np.ndindex(*long[::-1])]
    else:
        walk = [(0,) * len(long), *_there_and_back(long)]
    points = np.zeros((len(walk), len(sizes)), dtype=int)
    points[:, axes] = walk
    return [tuple(point) for point in points.tolist()]


def _there_and_back(sizes: Sequence[int]) -> list[Coordinates]:
    """A walk over all points of a grid but the origin, from one neighbour of it to another."""
    if len(sizes) < 2:
        return [(x,) for size in sizes for x in range(1, size)]
    layer = _there_and_back(sizes[:-1])
    origin = (0,) * (len(sizes) - 1)
    there = [(*point, k) for k in range(sizes[-1]) for point in (layer[::-1] if k % 2 else layer)]
    return there + [(*origin, k) for k in range(sizes[-1] - 1, 0, -1)]


def _check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise _bad_argument("topology", topology, "a `Topology`")


def _check_simple_order(
    topology: Topology, shape: Coordinates, stride: Coordinates, num_replicas: int, mode: DeviceOrderMode
) -> None:
    """A mesh with holes has no blocks to speak of: its cores are handed out host by host."""
    wanted, there = num_replicas * math.prod(shape), topology.num_tasks * topology.num_tpus_per_task
    if math.prod(stride) > 1 or mode is DeviceOrderMode.RING or wanted > there:
        raise TopologyError(
            message(
                f"`DeviceAssignment.build(...)` on a slice of which {len(topology.missing_devices)} cores are missing",
                [
                    f"{wanted} cores are wanted, {there} are there",
                    f"computation_stride={stride}, device_order_mode={mode}",
                ],
                "Where cores are missing they are handed out host by host, without a stride and without a ring.",
                [f"num_replicas={there // math.prod(shape)} or fewer, and leave the other arguments out"],
            )
        )


def _device_name(job: str | None, task: int, kind: str, ordinal: int) -> str:
    return f"{'' if job is None else f'/job:{job}'}/task:{task}/device:{kind}:{ordinal}"


def _by(sizes: Iterable[int]) -> str:
    return "x".join(str(size) for size in sizes)


def _needs_both() -> TopologyError:
    return TopologyError(
        message(
            "`Topology(...)` needs a mesh shape and the coordinates of the devices in it",
            instead=["Topology.from_devices()", "Topology(mesh_shape=(1, 1), device_coordinates=[[(0, 0)]])"],
        )
    )


def _bad_argument(name: str, given: object, needed: str) -> TopologyError:
    found = (
        f"an array of shape {given.shape}"
        if isinstance(given, np.ndarray)
        else f"{given} of type {type(given).__name__}"
    )
    return TopologyError(message(f"`{name}` must be {needed}", [f"got {found}"]))


def _unequal_hosts(hosts: list[list[jax.Device]]) -> TopologyError:
    return TopologyError(
        message(
            "`Topology.from_devices(...)` needs equally many devices of every process",
            [f"process {host[0].process_index}: {len(host)} devices" for host in hosts],
        )
    )


def _no_core_there(point: Coordinates, mesh_shape: np.ndarray) -> TopologyError:
    return TopologyError(message(f"There is no core at {point} in a mesh of {_by(mesh_shape)}"))


def _core_given_twice(
    point: Coordinates, first: tuple[int, int], second: tuple[int, int], words: str = "core {1} of replica {0}"
) -> TopologyError:
    return TopologyError(message(f"The core at {point} is named twice", [words.format(*first), words.format(*second)]))


def _no_replica_there(task_id: int, logical_core: int, assignment: DeviceAssignment) -> TopologyError:
    return TopologyError(
        message(
            f"`lookup_replicas({task_id}, {logical_core})`: no replica has that logical core on that task",
            [f"there are {assignment.topology.num_tasks} tasks and {assignment.num_cores_per_replica} cores a replica"],
        )
    )


def _no_such_core(replica: int, logical_core: int, assignment: DeviceAssignment) -> TopologyError:
    return TopologyError(
        message(
            f"There is no core {logical_core} of replica {replica}",
            [
                f"there are {assignment.num_replicas} replicas of {assignment.num_cores_per_replica} cores each, "
                "both counted from 0"
            ],
        )
    )


def _does_not_fit(
    topology: Topology, shape: Coordinates, stride: Coordinates, footprint: list[int], num_replicas: int, most: int
) -> TopologyError:
    return TopologyError(
        message(
            f"`DeviceAssignment.build(...)`: requested {num_replicas} replicas but only {most} fit in the mesh",
            [
                f"mesh {_by(topology.mesh_shape)}",
                f"a replica of {_by(shape)} cores at stride {_by(stride)} takes up {_by(footprint)}",
            ],
            instead=[f"num_replicas={most} or fewer, and at least one" if most else "make a replica smaller"],
        )
    )


def _no_ring(topology: Topology, shape: Coordinates, stride: Coordinates, num_replicas: int) -> TopologyError:
    return TopologyError(
        message(
            "`DeviceAssignment.build(device_order_mode=DeviceOrderMode.RING)` cannot lay a ring",
            [
                f"mesh {_by(topology.mesh_shape)}",
                f"{num_replicas} replicas of {_by(shape)} cores at stride {_by(stride)}",
            ],
            "A ring needs a mesh of rank 4, replicas of whole chips without a stride, and replicas that fill the mesh.",
            ["device_order_mode=DeviceOrderMode.AUTO takes a ring where there is one"],
        )
    )
