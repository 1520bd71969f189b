"""Cores lie where a topology says, and replicas get cores of their own that lie close together."""

import itertools
import math
from types import SimpleNamespace as Record

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._errors import TopologyError
from replicax.cluster import SINGLE_CORE_ASSIGNMENT, DeviceAssignment, DeviceOrderMode, Topology

AUTO, RING, MESH = DeviceOrderMode.AUTO, DeviceOrderMode.RING, DeviceOrderMode.MESH


def full(*shape):
    """A mesh on one host that has every core, in the order of `np.ndindex`."""
    return Topology(mesh_shape=shape, device_coordinates=[list(np.ndindex(*shape))])


def two_hosts():
    """2 x 2 chips with two cores each: host 0 has the chips with y = 0, host 1 those with y = 1."""
    hosts = [[(x, y, 0, core) for x in (0, 1) for core in (0, 1)] for y in (0, 1)]
    return Topology(mesh_shape=(2, 2, 1, 2), device_coordinates=hosts)


# Topologies.


def test_a_core_is_found_by_its_coordinates():
    topology = two_hosts()

    assert topology.task_ordinal_at_coordinates((1, 1, 0, 0)) == 1
    assert topology.tpu_device_ordinal_at_coordinates(np.array([1, 1, 0, 0])) == 2
    assert topology.tpu_device_name_at_coordinates([1, 1, 0, 0]) == "/task:1/device:TPU:2"
    assert topology.tpu_device_name_at_coordinates([1, 1, 0, 0], job="worker") == "/job:worker/task:1/device:TPU:2"
    assert topology.cpu_device_name_at_coordinates([1, 1, 0, 0]) == "/task:1/device:CPU:0"
    assert topology.cpu_device_name_at_coordinates([1, 1, 0, 0], job="worker") == "/job:worker/task:1/device:CPU:0"


def test_a_topology_knows_its_shape():
    topology = two_hosts()

    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert (topology.mesh_rank, topology.num_tasks, topology.num_tpus_per_task) == (4, 2, 4)
    assert topology.device_coordinates.shape == (2, 4, 4)
    assert topology.missing_devices.shape == (0, 4)
    assert repr(topology) == "Topology(2x2x1x2, 2 hosts with 4 cores)"


def test_missing_cores_are_listed():
    topology = Topology(mesh_shape=(2, 1, 2), device_coordinates=[[(0, 0, 0), (1, 0, 1)]])

    assert topology.missing_devices.tolist() == [[0, 0, 1], [1, 0, 0]]


def test_a_topology_can_be_sent_to_another_process():
    copy = Topology(serialized=two_hosts().serialized())

    assert copy.mesh_shape.tolist() == two_hosts().mesh_shape.tolist()
    assert copy.device_coordinates.tolist() == two_hosts().device_coordinates.tolist()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs a mesh shape and the coordinates"),
        ({"mesh_shape": (1, 1)}, "needs a mesh shape and the coordinates"),
        ({"mesh_shape": (0, 1), "device_coordinates": [[(0, 0)]]}, "`mesh_shape` must be a list of positive sizes"),
        ({"mesh_shape": 4, "device_coordinates": [[(0, 0)]]}, "`mesh_shape` must be"),
        ({"mesh_shape": (1.5, 1), "device_coordinates": [[(0, 0)]]}, "`mesh_shape` must be"),
        ({"mesh_shape": (1, 1), "device_coordinates": [[(0, 0)], [(0,)]]}, "`device_coordinates` must be"),
        ({"serialized": b"2x2"}, r"(?s)`serialized` must be what `Topology.serialized\(\)` returned.*2x2"),
        ({"mesh_shape": (1, 1), "device_coordinates": [(0, 0)]}, r"(?s)`device_coordinates` must be.*shape \(1, 2\)"),
        ({"mesh_shape": (1, 1), "device_coordinates": [[(0, 0, 0)]]}, "`device_coordinates` must be"),
        ({"mesh_shape": (1, 1), "device_coordinates": [[(0, 1)]]}, r"no core at \(0, 1\) in a mesh of 1x1"),
        ({"mesh_shape": (1, 1), "device_coordinates": [[(0, -1)]]}, r"no core at \(0, -1\)"),
        (
            {"mesh_shape": (1, 1), "device_coordinates": [[(0, 0)], [(0, 0)]]},
            r"(?s)\(0, 0\) is named twice.*device 0 of host 0.*device 0 of host 1",
        ),
    ],
)
def test_a_topology_that_cannot_be_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Topology(**arguments)


@pytest.mark.parametrize("point", [(2, 0, 0, 0), (0, -1, 0, 0), (0, 0, 0), ()])
def test_there_is_no_core_outside_the_mesh(point):
    with pytest.raises(TopologyError, match="no core at"):
        full(2, 2, 1, 2).tpu_device_ordinal_at_coordinates(point)


def test_there_is_no_core_in_a_hole():
    topology = Topology(mesh_shape=(1, 2), device_coordinates=[[(0, 0)]])

    with pytest.raises(TopologyError, match=r"no core at \(0, 1\)"):
        topology.task_ordinal_at_coordinates((0, 1))


# Topologies of devices.


@pytest.mark.parametrize(
    ("count", "shape"),
    [
        (1, [1, 1, 1, 1]),
        (2, [1, 1, 1, 2]),
        (3, [3, 1, 1, 1]),
        (4, [2, 1, 1, 2]),
        (6, [3, 1, 1, 2]),
        (8, [2, 2, 1, 2]),
    ],
)
def test_devices_without_coordinates_lie_as_a_slice_of_their_number(count, shape):
    devices = jax.devices()[:count]
    topology = Topology.from_devices(devices)

    assert topology.mesh_shape.tolist() == shape
    assert topology.missing_devices.size == 0
    assert [topology.device_at_coordinates(point) for point in topology.device_coordinates[0]] == devices


def test_by_default_a_topology_is_of_all_devices_of_this_process():
    topology = Topology.from_devices()

    assert topology.device_coordinates.shape == (1, 8, 4)
    assert topology.device_at_coordinates((0, 0, 0, 0)) is jax.local_devices()[0]


def chip(process, coords, core=0):
    return Record(platform="tpu", process_index=process, coords=coords, core_on_chip=core)


def test_tpu_devices_lie_where_they_say():
    devices = [chip(y, [x, y, 0], core) for y in (1, 0) for x in (0, 1) for core in (0, 1)]
    topology = Topology.from_devices(devices)

    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert topology.num_tasks == 2
    assert topology.task_ordinal_at_coordinates((0, 1, 0, 0)) == 1
    assert topology.device_at_coordinates((1, 1, 0, 1)) is devices[3]


def test_a_part_of_a_slice_starts_at_its_own_corner():
    topology = Topology.from_devices([chip(0, [x, y, 0]) for x in (2, 3) for y in (1, 3)])

    assert topology.mesh_shape.tolist() == [2, 3, 1, 1]
    assert topology.missing_devices.tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]


def test_processes_must_have_equally_many_devices():
    with pytest.raises(ValueError, match="(?s)equally many devices.*process 0: 1 devices.*process 1: 2 devices"):
        Topology.from_devices([chip(0, [0, 0, 0]), chip(1, [1, 0, 0]), chip(1, [2, 0, 0])])


def test_a_topology_made_without_devices_has_none_to_give():
    with pytest.raises(TopologyError, match=r"(?s)made without devices.*Topology.from_devices\(jax.devices\(\)\)"):
        two_hosts().device_at_coordinates((0, 0, 0, 0))


# Assignments by hand.


def test_an_assignment_answers_for_each_core_of_each_replica():
    cores = DeviceAssignment(two_hosts(), [[(0, 0, 0, 0), (0, 0, 0, 1)], [(1, 1, 0, 0), (1, 1, 0, 1)]])

    assert (cores.num_replicas, cores.num_cores_per_replica) == (2, 2)
    assert cores.core_assignment.shape == (2, 2, 4)
    assert cores.coordinates(1, 1) == (1, 1, 0, 1)
    assert [cores.tpu_ordinal(replica, core) for replica in (0, 1) for core in (0, 1)] == [0, 1, 2, 3]
    assert cores.tpu_ordinal() == 0
    assert cores.tpu_device(1, 1) == "/task:1/device:TPU:3"
    assert cores.tpu_device(1, 1, job="worker") == "/job:worker/task:1/device:TPU:3"
    assert cores.host_device(1, 1) == "/task:1/device:CPU:0"
    assert cores.host_device(0, 0, job="worker") == "/job:worker/task:0/device:CPU:0"
    assert repr(cores) == "DeviceAssignment(2 x 2 cores of Topology(2x2x1x2, 2 hosts with 4 cores))"


def test_replicas_are_found_by_host_and_core():
    topology = two_hosts()
    cores = DeviceAssignment(topology, [[point] for host in topology.device_coordinates[::-1] for point in host])

    assert cores.topology is topology
    assert cores.lookup_replicas(task_id=0, logical_core=0) == [4, 5, 6, 7]
    assert cores.lookup_replicas(task_id=1, logical_core=0) == [0, 1, 2, 3]


@pytest.mark.parametrize(("task", "core"), [(2, 0), (0, 1), (0, -1)])
def test_where_no_replica_is_none_is_found(task, core):
    cores = DeviceAssignment(two_hosts(), SINGLE_CORE_ASSIGNMENT)

    with pytest.raises(ValueError, match=rf"`lookup_replicas\({task}, {core}\)`: no replica"):
        cores.lookup_replicas(task, core)


def test_a_single_core_is_an_assignment():
    cores = DeviceAssignment(Topology.from_devices(), SINGLE_CORE_ASSIGNMENT)

    assert cores.devices.tolist() == [[jax.local_devices()[0]]]


@pytest.mark.parametrize(
    ("topology", "assignment", "text"),
    [
        ("2x2", SINGLE_CORE_ASSIGNMENT, "(?s)`topology` must be a `Topology`.*of type str"),
        (full(2, 2, 1, 2), [[0, 0, 0, 0]], r"(?s)`core_assignment` must be.*\(replicas, cores.*, 4\).*shape \(1, 4\)$"),
        (full(2, 2, 1, 2), [[[0, 0, 0]]], r"(?s)`core_assignment` must be.*shape \(1, 1, 3\)"),
        (full(2, 2, 1, 2), [[[0, 0, 0, 2]]], r"no core at \(0, 0, 0, 2\) in a mesh of 2x2x1x2"),
        (full(2, 1), [[[0, 0]], [[0, 0]]], r"(?s)\(0, 0\) is named twice.*core 0 of replica 0.*core 0 of replica 1"),
    ],
)
def test_an_assignment_that_cannot_be_is_refused(topology, assignment, text):
    with pytest.raises(ValueError, match=text):
        DeviceAssignment(topology, assignment)


# Assignments that are built.


def corners(cores):
    return [cores.coordinates(replica, 0) for replica in range(cores.num_replicas)]


def test_one_replica_on_one_core_is_the_default():
    assert DeviceAssignment.build(full(2, 2, 1, 2)).core_assignment.tolist() == SINGLE_CORE_ASSIGNMENT


def test_a_serialized_topology_will_do():
    assert DeviceAssignment.build(full(2, 2, 1, 2).serialized(), num_replicas=8).num_replicas == 8


def test_replicas_take_the_cores_of_a_chip_first_then_x_then_y_then_z():
    cores = DeviceAssignment.build(full(2, 2, 2, 2), num_replicas=16)

    assert corners(cores) == [(x, y, z, core) for z in (0, 1) for y in (0, 1) for x in (0, 1) for core in (0, 1)]


def test_a_few_replicas_stay_close_together():
    cores = DeviceAssignment.build(full(4, 4, 1, 2), num_replicas=4)

    assert corners(cores) == [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)]


def test_the_replicas_of_this_process_are_its_devices_in_order():
    cores = DeviceAssignment.build(Topology.from_devices(), num_replicas=8)

    assert cores.devices[:, 0].tolist() == jax.local_devices()


def test_two_cores_of_a_chip_make_one_replica():
    cores = DeviceAssignment.build(Topology.from_devices(), computation_shape=[1, 1, 1, 2], num_replicas=4)

    chips = [jax.local_devices()[start : start + 2] for start in (0, 2, 6, 4)]  # round the square
    assert cores.devices.tolist() == chips


def test_the_cores_of_a_replica_are_counted_along_the_last_axis_first():
    cores = DeviceAssignment.build(full(2, 2, 2), computation_shape=(1, 2, 2), num_replicas=2)

    assert cores.core_assignment.tolist() == [[[x, 0, 0], [x, 0, 1], [x, 1, 0], [x, 1, 1]] for x in (0, 1)]


def test_cores_at_a_stride_leave_room_for_replicas_in_between():
    cores = DeviceAssignment.build(
        full(4, 1, 1, 1), computation_shape=(2, 1, 1, 1), computation_stride=(2, 1, 1, 1), num_replicas=2
    )

    assert cores.core_assignment[:, :, 0].tolist() == [[0, 2], [1, 3]]


def test_replicas_that_fill_the_mesh_with_whole_chips_follow_a_ring():
    cores = DeviceAssignment.build(full(4, 4, 1, 2), computation_shape=(1, 1, 1, 2), num_replicas=16)

    ring = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (1, 2), (2, 2), (3, 2), (3, 3), (2, 3), (1, 3)]
    assert [(x, y) for x, y, _, _ in corners(cores)] == [*ring, (0, 3), (0, 2), (0, 1)]


def test_a_mesh_order_can_be_asked_for():
    cores = DeviceAssignment.build(full(2, 2, 1, 2), (1, 1, 1, 2), num_replicas=4, device_order_mode=MESH)

    assert corners(cores) == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]


@pytest.mark.parametrize("mode", [AUTO, RING])
@pytest.mark.parametrize("chips", [(2, 2, 1), (4, 4, 1), (2, 4, 2), (4, 1, 4), (1, 2, 6), (4, 4, 4), (2, 1, 1)])
def test_a_ring_comes_back_to_where_it_started(chips, mode):
    whole = {"computation_shape": (1, 1, 1, 2), "num_replicas": math.prod(chips), "device_order_mode": mode}
    points = corners(DeviceAssignment.build(full(*chips, 2), **whole))

    steps = [sum(abs(a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(points, points[1:], strict=False)]
    assert set(steps) == {1}
    assert sum(abs(a - b) for a, b in zip(points[-1], points[0], strict=True)) == 1


def test_a_line_is_walked_from_end_to_end_and_odd_sides_line_by_line():
    whole = {"computation_shape": (1, 1, 1, 1), "device_order_mode": RING}

    line = DeviceAssignment.build(full(1, 4, 1, 1), num_replicas=4, **whole)
    assert [y for _, y, _, _ in corners(line)] == [0, 1, 2, 3]
    odd = DeviceAssignment.build(full(3, 2, 1, 1), num_replicas=6, **whole)
    assert [(x, y) for x, y, _, _ in corners(odd)] == [(x, y) for y in (0, 1) for x in (0, 1, 2)]


def test_the_chips_inside_a_replica_follow_a_ring_too():
    cores = DeviceAssignment.build(full(4, 2, 1, 2), computation_shape=(2, 2, 1, 2), num_replicas=2)

    square = [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert cores.core_assignment.tolist() == [
        [[shift + x, y, 0, core] for x, y in square for core in (0, 1)] for shift in (0, 2)
    ]


@pytest.mark.parametrize(
    ("topology", "arguments"),
    [
        (full(2, 2, 1, 2), {"num_replicas": 8}),
        (full(2, 2, 1, 2), {"computation_shape": (1, 1, 1, 2), "num_replicas": 3}),
        (full(2, 2, 2), {"computation_shape": (1, 1, 2), "num_replicas": 4}),
        (full(4, 1, 1, 1), {"computation_shape": (2, 1, 1, 1), "computation_stride": (2, 1, 1, 1), "num_replicas": 2}),
    ],
    ids=["half-chips", "not-full", "rank-3", "stride"],
)
def test_a_ring_that_does_not_exist_is_refused_when_asked_for(topology, arguments):
    with pytest.raises(ValueError, match="cannot lay a ring"):
        DeviceAssignment.build(topology, **arguments, device_order_mode=RING)

    assert DeviceAssignment.build(topology, **arguments).num_replicas == arguments["num_replicas"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_replicas": 9}, "requested 9 replicas but only 8 fit"),
        ({"num_replicas": 0}, "requested 0 replicas"),
        ({"computation_shape": (1, 1, 1, 2), "num_replicas": 5}, "(?s)requested 5 replicas but only 4 fit.*1x1x1x2"),
        ({"computation_shape": (3, 1, 1, 1)}, "(?s)only 0 fit.*mesh 2x2x1x2.*takes up 3x1x1x1.*make a replica smaller"),
        ({"computation_stride": (4, 1, 1, 1)}, "(?s)only 0 fit.*stride 4x1x1x1 takes up 4x1x1x1"),
        ({"computation_shape": (1, 1)}, "`computation_shape` must be 4 positive sizes"),
        ({"computation_shape": (1, 1, 1, 0)}, "`computation_shape` must be 4 positive sizes"),
        ({"computation_stride": (1, 1, 1, -1)}, "`computation_stride` must be 4 positive sizes"),
        ({"computation_shape": "2x2"}, "`computation_shape` must be 4 positive sizes"),
        ({"num_replicas": 2.0}, "`num_replicas` must be a whole number"),
        ({"device_order_mode": 1}, "`device_order_mode` must be a member of DeviceOrderMode"),
        ({"topology": "2x2"}, "`topology` must be a `Topology`"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        DeviceAssignment.build(**{"topology": full(2, 2, 1, 2)} | arguments)


shapes = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@given(shapes, st.data())
def test_every_replica_gets_a_block_of_cores_of_its_own(mesh, data):
    shape = [data.draw(st.integers(1, size)) for size in mesh]
    stride = [data.draw(st.integers(1, size // block)) for size, block in zip(mesh, shape, strict=True)]
    most = math.prod(m // (b * s) * s for m, b, s in zip(mesh, shape, stride, strict=True))
    replicas = data.draw(st.integers(1, most))

    cores = DeviceAssignment.build(full(*mesh), shape, stride, replicas).core_assignment

    block = np.array(list(np.ndindex(*shape))) * stride
    assert len({tuple(point) for point in cores.reshape(-1, len(mesh))}) == replicas * math.prod(shape)
    for replica in cores:
        assert sorted((replica - replica.min(axis=0)).tolist()) == sorted(block.tolist())


def test_cores_are_counted_from_zero_and_no_further():
    assignment = DeviceAssignment.build(full(2, 1, 1, 2), computation_shape=(1, 1, 1, 2), num_replicas=2)

    for ask in (assignment.coordinates, assignment.tpu_ordinal, assignment.host_device, assignment.tpu_device):
        for replica, core in ((2, 0), (-1, 0), (0, 2), (0, -1)):
            with pytest.raises(ValueError, match="2 replicas of 2 cores each, both counted from 0"):
                ask(replica, core)


# Slices with missing chips.


def degraded():
    """2 x 2 chips of two cores, of which the last is gone, on three hosts."""
    hosts = [[(x, y, 0, core) for core in (0, 1)] for x, y in [(1, 0), (0, 0), (0, 1)]]
    return Topology(mesh_shape=(2, 2, 1, 2), device_coordinates=hosts)


def test_a_slice_with_holes_is_handed_out_host_by_host():
    cores = DeviceAssignment.build(degraded(), computation_shape=(1, 1, 1, 2), num_replicas=3)

    assert corners(cores) == [(1, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0)]
    assert list(itertools.chain(*(cores.lookup_replicas(host, 0) for host in range(3)))) == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments",
    [{"num_replicas": 7}, {"computation_stride": (2, 1, 1, 1)}, {"device_order_mode": RING}],
    ids=["too-many", "stride", "ring"],
)
def test_a_slice_with_holes_has_no_stride_no_ring_and_fewer_cores(arguments):
    with pytest.raises(ValueError, match="(?s)of which 2 cores are missing.*num_replicas=6 or fewer"):
        DeviceAssignment.build(degraded(), **arguments)
