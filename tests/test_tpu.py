"""TPUStrategy over the devices of this process, whatever they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.cluster import ClusterSpec, DeviceAssignment, Topology
from replicax.cluster_resolver import SimpleClusterResolver, TPUClusterResolver


def of_cores(cores, replicas, **options):
    """`replicas` replicas of `cores` cores each."""
    shape = {1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 4: [2, 1, 1, 2], 8: [2, 2, 1, 2]}[cores]
    topology = Topology.from_devices(jax.local_devices())
    assignment = DeviceAssignment.build(topology, computation_shape=shape, num_replicas=replicas)
    return rx.TPUStrategy(TPUClusterResolver("local"), assignment, **options)


def test_a_replica_on_each_core_by_default():
    strategy = rx.TPUStrategy()

    assert strategy.num_replicas_in_sync == strategy.num_replicas_per_host == len(jax.local_devices())
    assert strategy.num_hosts == 1
    assert strategy.steps_per_run == 1
    assert strategy.host_cpu_devices == ("/replica:0/task:0/device:CPU:0",)
    assert isinstance(strategy.cluster_resolver, TPUClusterResolver)


def test_steps_per_run_is_kept_for_training_loops():
    assert rx.TPUStrategy(steps_per_run=100).steps_per_run == 100


def test_extended_tells_about_the_slice():
    extended = of_cores(2, 4, steps_per_run=5).extended

    assert (extended.steps_per_run, extended.num_hosts, extended.num_replicas_per_host) == (5, 1, 4)
    assert len(extended.worker_devices) == 4


def test_a_device_assignment_has_had_two_names():
    cores = DeviceAssignment.build(Topology.from_devices(jax.local_devices()), num_replicas=2)

    assert rx.TPUStrategy(steps_per_run=3, device_assignment=cores).num_replicas_in_sync == 2
    with pytest.raises(ValueError, match="both say which cores form a replica"):
        rx.TPUStrategy(None, cores, replica_mesh={"model": 2})
    with pytest.raises(ValueError, match="two names of one argument"):
        rx.TPUStrategy(None, cores, device_assignment=cores)
    with pytest.raises(ValueError, match="got 100 of type int"):
        rx.TPUStrategy(None, 100)


def test_the_host_of_a_single_process_is_always_the_first():
    assert rx.TPUStrategy().get_host_cpu_device(3) == "/replica:0/task:0/device:CPU:0"


def test_hosts_of_a_slice_have_the_name_of_their_job():
    resolver = TPUClusterResolver(["10.0.0.1:8470"], job_name="tpu_worker")

    assert rx.TPUStrategy(resolver).get_host_cpu_device(3) == "/job:tpu_worker/task:3/device:CPU:0"


def test_fewer_cores_can_be_asked_for():
    strategy = rx.TPUStrategy(num_cores=2)

    assert strategy.extended.worker_devices == tuple(jax.devices()[:2])


@pytest.mark.parametrize("cores", [0, 9, 2.0, "2", True], ids=repr)
def test_cores_that_are_not_there_are_refused(cores):
    with pytest.raises(rx.DeviceError, match=f"asked for {cores!r}, the slice has 8"):
        rx.TPUStrategy(num_cores=cores)


@pytest.mark.parametrize("steps", [0, 2.5, "2"], ids=repr)
def test_what_is_no_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match="steps_per_run"):
        rx.TPUStrategy(steps_per_run=steps)


def test_other_resolvers_are_refused():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["localhost:1"]}))
    with pytest.raises(ValueError, match="SimpleClusterResolver"):
        rx.TPUStrategy(resolver)


def test_preparing_the_slice_is_optional_and_can_be_repeated():
    for _ in range(2):
        topology = rx.experimental.initialize_tpu_system(TPUClusterResolver("local"))
        assert topology.num_tasks == 1
    for _ in range(2):
        rx.experimental.shutdown_tpu_system()

    assert rx.TPUStrategy(num_cores=2).reduce("sum", rx.PerReplica((1, 2))) == 3


def test_squares_through_two_strategies():
    def square(x):
        return x * x

    x = jnp.array([[2.0, 2.0]])
    for cores in (2, 1):
        strategy = rx.TPUStrategy(num_cores=cores)
        x = strategy.experimental_local_results(strategy.run(square, (x,)))[0]

    np.testing.assert_array_equal(x, [[16.0, 16.0]])


def test_variables_may_be_arguments():
    strategy = rx.TPUStrategy(num_cores=2)
    with strategy.scope():
        w = rx.Variable(0.0, aggregation="mean")

    def step(variable, amount):
        for _ in range(2):
            variable.assign_add(amount)
        return variable.value

    assert strategy.run(step, args=(w, 1.0)) == 2
    assert strategy.run(step, kwargs={"variable": w, "amount": 1.0}) == 4


def test_sums_of_chained_runs():
    strategy = rx.TPUStrategy(num_cores=4)
    x = strategy.experimental_distribute_values_from_function(lambda context: np.float32(0))
    for _ in range(10):
        x = strategy.run(lambda x: x + 1, (x,))

    assert strategy.reduce("sum", x) == 40


@pytest.mark.parametrize(("cores", "parts"), [(2, [1, 2]), (4, [2, 2]), (4, [4, 1]), (8, [2, 4])])
def test_advice_for_cores_does_not_change_values(cores, parts):
    strategy = of_cores(cores, 8 // cores)

    def step(x):
        x = strategy.experimental_split_to_logical_devices(x * 2, parts)
        x = strategy.experimental_replicate_to_logical_devices(x + 1)
        return strategy.experimental_assign_to_logical_device(x, cores - 1)

    x = np.arange(32.0, dtype=np.float32).reshape(4, 8)

    np.testing.assert_array_equal(strategy.run(step, (x,)), x * 2 + 1)


def test_a_value_that_is_split_lies_in_parts():
    strategy = of_cores(2, 1)

    x = strategy.run(lambda: strategy.experimental_split_to_logical_devices(jnp.ones((4, 6)), [1, 2]))

    assert {shard.data.shape for shard in x.addressable_shards} == {(4, 3)}


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([2], r"1 numbers, x of shape \[4, 6\] has 2 axes"),
        ([1, 4], r"axis 1 of size 6 in 4 parts"),
        ([0, 2], r"axis 0 of size 4 in 0 parts"),
        ([2, 2], r"2 x 2 = 4 parts, 2 logical devices"),
        ([1, 1], r"1 x 1 = 1 parts, 2 logical devices"),
        (["a", 2], r"\['a', 2\] of type list"),
        (2, r"2 of type int"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_numbers(parts, found):
    with pytest.raises(ValueError, match=found):
        of_cores(2, 4).experimental_split_to_logical_devices(jnp.ones((4, 6)), parts)


def test_a_list_is_split_like_an_array():
    strategy = of_cores(2, 4)

    split = strategy.experimental_split_to_logical_devices

    assert strategy.run(lambda: split([1.0, 2.0], [2]).sum()) == 3.0
    assert strategy.run(lambda: split([1.0, 2.0], np.array([2])).sum()) == 3.0


def test_a_pytree_is_not_split():
    strategy = of_cores(2, 4)
    for split in (lambda x: strategy.experimental_split_to_logical_devices(x, [2]),
                  strategy.experimental_replicate_to_logical_devices):  # fmt: skip
        with pytest.raises(ValueError, match="one array"):
            split({"a": jnp.ones(2)})


@pytest.mark.parametrize("number", [-1, 2, 0.5, "a"])
def test_a_core_that_is_not_there_is_refused(number):
    strategy = of_cores(2, 4)
    with pytest.raises(ValueError, match=f"logical device {number}; a replica has 2"):
        strategy.experimental_assign_to_logical_device(jnp.ones(2), number)
    with pytest.raises(ValueError, match=f"logical device {number}; a replica has 2"):
        strategy.extended.experimental_logical_device(number).__enter__()


def test_nothing_can_be_assigned_to_one_core_where_xla_partitions():
    strategy = of_cores(2, 4, experimental_spmd_xla_partitioning=True)
    with pytest.raises(ValueError, match="experimental_spmd_xla_partitioning"):
        strategy.experimental_assign_to_logical_device(jnp.ones(2), 0)


def test_worker_devices_are_those_of_the_logical_device_in_force():
    strategy = of_cores(2, 4)
    first = strategy.extended.worker_devices

    with strategy.extended.experimental_logical_device(1):
        second = strategy.extended.worker_devices

    assert set(first) | set(second) == set(jax.devices())
    seen = []

    def step():
        with rx.get_replica_context().experimental_logical_device(1):
            seen.append(strategy.extended.worker_devices)

    strategy.run(step)
    assert seen == [second]
    assert strategy.extended.worker_devices == first


@pytest.mark.parametrize("cores", [2, 4, 8])
def test_rules_cut_over_all_cores_of_a_replica(cores):
    strategy = of_cores(cores, 8 // cores, variables=rx.partition_rules([(".*", P(None, "model"))]))
    with strategy.scope():
        w = rx.Variable(np.ones((4, 16), np.float32), name="w")

    strategy.run(lambda: w.assign_add(jnp.ones((4, 16)), read_value=False))

    assert {shard.data.shape for shard in w.value.addressable_shards} == {(4, 16 // cores)}
    assert w.numpy().sum() == 128


def test_line_by_line_needs_replicas_of_one_core():
    with pytest.raises(rx.NotAvailableError):
        of_cores(2, 4, eager=True)
    assert of_cores(1, 2, eager=True).eager
