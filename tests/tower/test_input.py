"""Data for towers: each takes whole batches in turn, and nothing is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower

DEVICES = jax.devices()[:2]


def mirrored(towers=2):
    return tower.MirroredStrategy(DEVICES[:towers])


def batches(count, rows=2):
    return lambda: [np.full((rows,), float(i), np.float32) for i in range(count)]


def elements(distribution, dataset_fn):
    with distribution.scope():
        iterator = distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()
        return [[np.asarray(x).tolist() for x in distribution.unwrap(element)] for element in iterator]


def test_towers_take_batches_in_turn():
    assert elements(mirrored(), batches(4, 1)) == [[[0.0], [1.0]], [[2.0], [3.0]]]
    assert elements(mirrored(1), batches(2, 1)) == [[[0.0]], [[1.0]]]


def test_a_last_batch_without_a_partner_is_not_dropped():
    assert elements(mirrored(), batches(3)) == [[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0], []]]


def test_a_tower_without_a_batch_does_not_count():
    distribution = mirrored()

    with distribution.scope():
        iterator = distribution.distribute_dataset(batches(3)).make_one_shot_iterator()
        losses = []
        for _ in range(2):
            per_tower = distribution.call_for_each_tower(lambda x: rx.mean(x), iterator.get_next())
            losses.append(float(distribution.reduce("mean", per_tower)))
        with pytest.raises(rx.OutOfRangeError):
            iterator.get_next()

    assert losses == [0.5, 2.0]


def test_a_step_that_would_average_padding_is_refused():
    distribution = mirrored()

    with distribution.scope():
        iterator = distribution.distribute_dataset(batches(3)).make_one_shot_iterator()
        distribution.call_for_each_tower(lambda x: x.mean(), iterator.get_next())
        with pytest.raises(rx.LocalityError, match="padded batch"):
            distribution.call_for_each_tower(lambda x: x.mean(), iterator.get_next())


def test_tuples_and_dicts_keep_their_structure():
    distribution = mirrored()

    def dataset_fn():
        return [(np.array([i]), {"square": np.array([i * i])}) for i in range(2)]

    with distribution.scope():
        element = distribution.distribute_dataset(dataset_fn).make_one_shot_iterator().get_next()

    assert [int(x[0]) for x in distribution.unwrap(element[0])] == [0, 1]
    assert [int(x[0]) for x in distribution.unwrap(element[1]["square"])] == [0, 1]


def test_a_dataset_is_made_by_a_function():
    distribution = mirrored()

    with distribution.scope():
        with pytest.raises(TypeError, match="lambda: dataset"):
            distribution.distribute_dataset([np.ones(1)])
        with pytest.raises(ValueError, match=r"distribution.distribute_dataset\(dataset_fn\)` got int 3"):
            distribution.distribute_dataset(lambda: 3)
        dataset = distribution.distribute_dataset(batches(2))

    assert isinstance(dataset, tower.PerDeviceDataset)
    assert isinstance(dataset.make_initializable_iterator(), tower.InputIterator)


def test_global_batches_are_divided():
    distribution = mirrored()
    iterator = distribution.make_dataset_iterator([np.arange(4.0), np.arange(4.0, 7.0)])
    assert isinstance(iterator, tower.InputIterator)
    iterator.initialize()

    first, second = iterator.get_next(), iterator.get_next()

    assert [x.tolist() for x in distribution.unwrap(first)] == [[0.0, 1.0], [2.0, 3.0]]
    assert [x.tolist() for x in distribution.unwrap(second)] == [[4.0, 5.0], [6.0]]


def test_an_input_function_is_told_where_it_is():
    distribution = mirrored()
    told = []

    def input_fn(context):
        told.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return [np.full((context.get_per_replica_batch_size(4),), float(i)) for i in range(2)]

    iterator = distribution.make_input_fn_iterator(input_fn)

    assert [x.tolist() for x in distribution.unwrap(iterator.get_next())] == [[0.0, 0.0], [1.0, 1.0]]
    assert told == [(1, 0, 2)]
    with pytest.raises(ValueError, match="Input replication mode not supported"):
        distribution.make_input_fn_iterator(input_fn, rx.InputReplicationMode.PER_REPLICA)


# -- several steps in one call


@pytest.fixture(params=[False, True], ids=["compiled", "eager"])
def distribution(request):
    return tower.MirroredStrategy(DEVICES, eager=request.param)


def test_outputs_of_the_last_of_several_steps(distribution):
    def step_fn(context, x):
        def tower_fn(x):
            context.set_last_step_output("in_tower", rx.mean(x), aggregation=tower.VariableAggregation.MEAN)
            context.set_non_tensor_output("foo", "bar")
            return rx.mean(x)

        losses = distribution.call_for_each_tower(tower_fn, x)
        context.set_last_step_output("across", losses, aggregation="mean")
        context.set_last_step_output("first", losses, tower.VariableAggregation.ONLY_FIRST_TOWER)
        context.set_last_step_output("per_tower", losses)

    with distribution.scope():
        iterator = distribution.distribute_dataset(batches(4)).make_one_shot_iterator()
        context = distribution.run_steps_on_dataset(step_fn, iterator, iterations=2)

        assert isinstance(context, tower.MultiStepContext) and context.run_op is None
        assert float(context.last_step_outputs["in_tower"]) == float(context.last_step_outputs["across"]) == 2.5
        assert [float(x) for x in distribution.unwrap(context.last_step_outputs["per_tower"])] == [2.0, 3.0]
        assert float(context.last_step_outputs["first"]) == 2.0
        assert context.non_tensor_outputs == {"foo": ["bar"]}


def test_an_output_of_a_tower_needs_an_aggregation(distribution):
    def step_fn(context, x):
        distribution.call_for_each_tower(lambda x: context.set_last_step_output("loss", rx.mean(x)), x)

    with distribution.scope(), pytest.raises(AssertionError):
        distribution.run_steps_on_dataset(step_fn, distribution.distribute_dataset(batches(2)).make_one_shot_iterator())


def test_outputs_are_a_dictionary():
    with pytest.raises(ValueError, match="dictionary"):
        tower.MultiStepContext()._set_last_step_outputs([])


def test_tuples_are_several_inputs_and_state_is_kept(distribution):
    with distribution.scope():
        total = rx.Variable(0.0, aggregation="sum")

        def step_fn(context, x, y):
            distribution.call_for_each_tower(lambda x, y: total.assign_add(jnp.sum(x * y)), x, y)

        dataset = distribution.distribute_dataset(lambda: [(np.ones(1), np.full((1,), float(i))) for i in range(4)])
        distribution.run_steps_on_dataset(step_fn, dataset.make_one_shot_iterator(), 2)

    assert total.numpy() == 6.0


def test_the_name_of_2019_passes_an_element_as_it_is():
    distribution = mirrored()
    seen = []

    def step_fn(context, element):
        seen.append(type(element))

    iterator = distribution.make_dataset_iterator([(np.ones(2), np.ones(2))])
    distribution.extended.experimental_run_steps_on_iterator(step_fn, iterator)

    assert seen == [tuple]
