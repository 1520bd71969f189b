"""Each member of a strategy of 2018, on each strategy: the answers depend on the number of towers and on nothing else."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower

D0, D1 = jax.devices()[:2]
LOCAL = rx.cluster_resolver.TPUClusterResolver("local")

STRATEGIES = {
    "mirrored": lambda: tower.MirroredStrategy([D0, D1]),
    "one-device": lambda: tower.OneDeviceStrategy("cpu:0"),
    "collective": lambda: tower.CollectiveAllReduceStrategy(num_gpus_per_worker=0),
    "parameter-server": lambda: tower.ParameterServerStrategy(num_gpus_per_worker=0),
    "tpu": lambda: tower.TPUStrategy(LOCAL, steps_per_run=10, num_cores=2),
}
TOWERS = {"mirrored": 2, "one-device": 1, "collective": 1, "parameter-server": 1, "tpu": 2}


@pytest.fixture(params=STRATEGIES)
def name(request):
    return request.param


@pytest.fixture
def distribution(name):
    return STRATEGIES[name]()


def one_each(distribution):
    """1.0 on the first tower, 2.0 on the second."""
    return distribution.call_for_each_tower(lambda: tower.get_tower_context().tower_id + 1.0)


def numbers(values):
    return [float(value) for value in values]


def test_places_and_counts(name, distribution):
    towers = TOWERS[name]

    assert distribution.num_towers == distribution.num_replicas_in_sync == towers
    assert distribution.is_single_tower == (towers == 1)
    assert distribution.worker_devices == distribution.parameter_devices == [D0, D1][:towers]
    assert distribution.extended.worker_devices == tuple(distribution.worker_devices)
    assert distribution.between_graph == (name in ("collective", "parameter-server"))
    assert distribution.should_init and distribution.should_checkpoint and distribution.should_save_summary


def test_a_function_is_called_for_each_tower(distribution):
    with distribution.scope():
        assert tower.get_cross_tower_context() is distribution
        index = distribution.worker_device_index
        ids = distribution.call_for_each_tower(lambda i, add: i + add, index, run_concurrently=False, add=10)

        assert numbers(distribution.unwrap(ids)) == [10.0, 11.0][: distribution.num_towers]
        assert distribution.unwrap("plain") == ["plain"]


def test_towers_meet(distribution):
    def tower_fn(x):
        context = tower.get_tower_context()
        total = context.merge_call(lambda d, y: sum(d.unwrap(y)), x + context.tower_id)
        return total + context.num_towers

    with distribution.scope():
        totals = distribution.call_for_each_tower(tower_fn, 3.0)

    assert numbers(distribution.unwrap(totals)) == ([9.0, 9.0] if distribution.num_towers == 2 else [4.0])


def test_values_are_combined(distribution):
    towers = distribution.num_towers
    with distribution.scope():
        v = rx.Variable(0.0)
        total = distribution.reduce("sum", one_each(distribution), v)
        mean, first = (
            distribution.batch_reduce(how, [(one_each(distribution), v)])[0]
            for how in (tower.VariableAggregation.MEAN, tower.VariableAggregation.ONLY_FIRST_TOWER)
        )
        copies = distribution.unwrap(distribution.broadcast(jnp.asarray(5.0)))

    assert (float(total), float(mean), float(first)) == ({1: 1.0, 2: 3.0}[towers], {1: 1.0, 2: 1.5}[towers], 1.0)
    assert numbers(copies) == [5.0] * towers


def test_what_towers_return_can_be_waited_for(distribution):
    with distribution.scope():
        waited = distribution.group(one_each(distribution))

        assert waited is None if distribution.num_towers == 2 else float(waited) == 1.0
        assert distribution.group(one_each(distribution), name="train_op") is None


def test_a_list_is_mapped(distribution):
    with distribution.scope():
        squares = distribution.map([1.0, 2.0, 3.0], lambda x, power: x**power, power=2)

        assert float(distribution.reduce("sum", squares, "cpu:0")) == 14.0


def test_variables_are_updated_where_they_lie(distribution):
    towers = distribution.num_towers
    with distribution.scope():
        v = rx.Variable(1.0, name="v")
        with distribution.colocate_vars_with(v):
            beside = rx.Variable(2.0, name="beside")
        total = distribution.reduce("sum", one_each(distribution), v)
        same = distribution.update(v, lambda v, g, scale: v.assign_sub(scale * g), total, scale=0.5)
        apart = distribution.update(beside, lambda b: b.value * 2, grouped=False)
        where = distribution.non_slot_devices([v, beside])
        count = distribution.update_non_slot(where, lambda step: step + 1, 4)

    assert same is v and v.numpy() == {1: 0.5, 2: -0.5}[towers]
    assert beside.devices == v.devices
    assert numbers(apart) == [4.0] * towers
    assert count == 5
    assert distribution.read_var(v) == v.numpy() and distribution.value_container(v) is v


def test_a_tower_local_variable_is_read_combined(distribution):
    towers = distribution.num_towers
    with distribution.scope():
        with distribution.tower_local_var_scope("sum"):
            seen = rx.Variable(0.0, name="seen")
        distribution.call_for_each_tower(lambda: seen.assign_add(tower.get_tower_context().tower_id + 1.0))

        assert float(distribution.read_var(seen)) == float(distribution.fetch(seen)) == {1: 1.0, 2: 3.0}[towers]
    assert not seen.trainable


def test_data_reaches_the_towers(distribution):
    towers = distribution.num_towers
    batches = [np.full((2,), float(i), np.float32) for i in range(2 * towers)]
    with distribution.scope():
        iterator = distribution.distribute_dataset(lambda: batches).make_one_shot_iterator()
        first = distribution.unwrap(iterator.get_next())
        again = distribution.distribute_dataset(lambda: batches).make_initializable_iterator()
        again.initializer()

        assert [x.tolist() for x in first] == [[0.0, 0.0], [1.0, 1.0]][:towers]
        assert distribution.unwrap(again.get_next())[0].tolist() == [0.0, 0.0]


def test_data_of_2019_reaches_the_towers(distribution):
    towers = distribution.num_towers

    def input_fn(context):
        assert context.num_replicas_in_sync == towers
        return [np.ones(1, np.float32)] * towers

    halves = distribution.make_dataset_iterator([np.arange(2.0 * towers, dtype=np.float32)])
    sums = distribution.experimental_run(lambda x: x.sum(), halves)
    whole = distribution.make_input_fn_iterator(input_fn, rx.InputReplicationMode.PER_WORKER)

    assert numbers(distribution.unwrap(sums)) == ([1.0, 5.0] if towers == 2 else [1.0])
    assert [x.tolist() for x in distribution.unwrap(whole.get_next())] == [[1.0]] * towers


def test_several_steps_are_one_call(distribution):
    towers = distribution.num_towers

    def step_fn(context, x):
        losses = distribution.call_for_each_tower(lambda x: x.sum(), x)
        context.set_last_step_output("mean", losses, aggregation=tower.VariableAggregation.MEAN)
        context.set_last_step_output("apart", losses)
        context.set_non_tensor_output("words", "kept")

    with distribution.scope():
        data = [np.full((1,), float(i), np.float32) for i in range(4)]
        iterator = distribution.distribute_dataset(lambda: data).make_one_shot_iterator()
        context = distribution.run_steps_on_dataset(step_fn, iterator, iterations=2, initial_loop_values={"mean": 0.0})
        apart = distribution.unwrap(context.last_step_outputs["apart"])

    assert float(context.last_step_outputs["mean"]) == {1: 1.0, 2: 2.5}[towers]
    assert numbers(apart) == {1: [1.0], 2: [2.0, 3.0]}[towers]
    assert context.non_tensor_outputs == {"words": "kept"} and context.run_op is None


def test_starting_copying_and_ending(distribution):
    config = {"devices": ["a"]}
    twin = copy.deepcopy(distribution)

    assert distribution.configure(session_config=config) is None
    assert distribution.initialize() is None and distribution.finalize() is None
    assert distribution.experimental_initialize() == distribution.experimental_finalize() == []
    assert distribution.update_config_proto(config) == config, "it was given what the strategy needs"
    assert distribution.update_config_proto(config) is not config
    assert type(twin) is type(distribution) and twin.worker_devices == distribution.worker_devices
    with twin.scope():
        assert tower.get_distribution_strategy() is twin
