"""The examples of the 2018 documents, as printed there apart from `tf.`, and what they have to give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower

DEVICES = jax.devices()[:2]


@pytest.fixture(params=[2, 1], ids=["two-towers", "one-tower"])
def distribution(request):
    return tower.MirroredStrategy(devices=DEVICES[: request.param])


def test_merge_call(distribution, capsys):
    # Called once in "cross-tower" context.
    def merge_fn(distribution, three_plus_tower_id):
        # sum the values across towers
        return sum(distribution.unwrap(three_plus_tower_id))

    # Called once per tower in `distribution`, in a "tower" context.
    def fn(three):
        tower_ctx = tower.get_tower_context()
        v = three + tower_ctx.tower_id
        # Computes the sum of the `v` values across all towers.
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with distribution.scope():
        # in "cross-tower" context
        merged_results = distribution.call_for_each_tower(fn, 3)
        # merged_results has the values from every tower execution of `fn`.
        values = distribution.unwrap(merged_results)

    assert isinstance(values, list)
    assert [int(value) for value in values] == ([10, 11] if distribution.num_towers == 2 else [6])


def test_update_with_variables_on_the_same_devices(distribution):
    distribution_strategy = distribution
    with distribution_strategy.scope():
        var1 = rx.Variable(1.0)
        with distribution_strategy.colocate_vars_with(var1):
            # var2 and var3 will be created on the same device(s) as var1
            var2 = rx.Variable(2.0)
            var3 = rx.Variable(3.0)

        def fn(v1, v2, v3):
            # operates on v1 from var1, v2 from var2, and v3 from var3
            v1.assign(v2.value + v3.value)

        # `fn` runs on every device `v1` is on, `v2` and `v3` will be there too.
        distribution_strategy.update(var1, fn, var2, var3)

    assert var1.devices == var2.devices == var3.devices == tuple(distribution.worker_devices)
    assert [float(x) for x in var1.values] == [5.0] * distribution.num_towers


def test_worker_device_index(distribution):
    distribution_strategy = distribution
    with distribution_strategy.scope():

        def fn(device_id):
            # device_id is an integer. `fn` is being executed on device:
            #    distribution_strategy.worker_devices[device_id].
            return device_id

        ids = distribution_strategy.call_for_each_tower(fn, distribution_strategy.worker_device_index)

        assert [int(i) for i in distribution.unwrap(ids)] == list(range(distribution.num_towers))
        if distribution.is_single_tower:
            assert distribution.worker_device_index == 0


def test_ordinary_model_code(distribution):
    def dataset_fn():
        return [np.full((2, 1), i + 1.0, np.float32) for i in range(2)]

    def tower_fn(x):
        w = rx.Variable(jnp.ones((1, 1)), name="w", aggregation="mean")
        loss = (x @ w.value).mean()
        w.assign_sub(0.5 * x.mean(axis=0, keepdims=True))
        return loss

    my_distribution = distribution
    with my_distribution.scope():
        iterator = my_distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()
        tower_train_ops = my_distribution.call_for_each_tower(tower_fn, iterator.get_next())
        train_op = my_distribution.group(tower_train_ops)
        losses = [float(x) for x in my_distribution.unwrap(tower_train_ops)]

    assert losses == [1.0, 2.0][: distribution.num_towers]
    assert train_op is None if distribution.num_towers == 2 else float(train_op) == 1.0


def test_an_initializable_iterator(distribution):
    with distribution.scope():
        iterator = distribution.distribute_dataset(lambda: [np.ones(1), np.ones(1)]).make_initializable_iterator()
        iterator.initializer()
        elements = [distribution.unwrap(element) for element in iterator]
        iterator.initializer()
        again = [distribution.unwrap(element) for element in iterator]

    assert len(elements) == len(again) == 2 // distribution.num_towers


def test_wrapped_values(distribution):
    x = "x"

    def fn(w):
        v = rx.Variable(0.0, name="v")
        return x, w, v

    with distribution.scope():
        merged = distribution.call_for_each_tower(fn, distribution.worker_device_index)

    assert merged[0] is x
    assert isinstance(merged[1], tower.PerDevice) == (distribution.num_towers == 2)
    assert isinstance(merged[2], rx.Variable)


def test_the_standard_pattern_for_updating_variables(distribution):
    data = [np.array([[1.0], [2.0]], np.float32), np.array([[3.0], [4.0]], np.float32)]

    with distribution.scope():
        w = rx.Variable(1.0, name="w")
        # 1. Wrap your input dataset in `d.distribute_dataset()` and create an iterator.
        iterator = distribution.distribute_dataset(lambda: data).make_one_shot_iterator()

        # 2. Define each tower up to the point of getting a list of gradient, variable pairs.
        def tower_fn(x):
            (gradient,) = rx.grad(lambda: (w.value * x).sum(), [w])()
            return [(gradient, w)]

        pairs = distribution.call_for_each_tower(tower_fn, iterator.get_next())
        # 3. Sum the gradients (with locality T) into values with locality V(`v`).
        (gradient,) = distribution.batch_reduce("sum", pairs)
        # 4. Call `d.update(v)` for each variable to update its value.
        distribution.update(w, lambda v, g: v.assign_sub(0.1 * g), gradient)

    total = sum(float(x.sum()) for x in data[: distribution.num_towers])
    np.testing.assert_allclose(w.numpy(), 1.0 - 0.1 * total, rtol=1e-6)


def test_a_reduction_in_the_middle_of_a_tower(distribution):
    def merge_fn(distribution, value):
        return distribution.reduce("mean", value, value)

    def fn(x):
        return x - tower.get_tower_context().merge_call(merge_fn, x)

    with distribution.scope():
        centred = distribution.call_for_each_tower(fn, distribution.worker_device_index)

    assert [float(x) for x in distribution.unwrap(centred)] == ([-0.5, 0.5] if distribution.num_towers == 2 else [0.0])


def test_code_that_knows_nothing_of_strategies():
    assert tower.get_tower_context().is_single_tower
    assert tower.get_tower_context().merge_call(lambda distribution, x: distribution.reduce("mean", x), 3.0) == 3.0
