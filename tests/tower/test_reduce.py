"""`reduce`, `batch_reduce`, `broadcast`, `fetch` and `map`, under every name and with every destination."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower

D0, D1, D2 = DEVICES = jax.devices()[:3]
SUM, MEAN = tower.VariableAggregation.SUM, tower.VariableAggregation.MEAN
FIRST, NONE = tower.VariableAggregation.ONLY_FIRST_TOWER, tower.VariableAggregation.NONE


@pytest.fixture
def distribution():
    return tower.MirroredStrategy(devices=DEVICES)


@pytest.fixture
def single():
    return tower.OneDeviceStrategy(D0)


def ids(distribution):
    return distribution.call_for_each_tower(lambda: tower.get_tower_context().tower_id + 1.0)


DESTINATIONS = {
    "nothing": (lambda value, v: None, set(DEVICES)),
    "the-value": (lambda value, v: value, set(DEVICES)),
    "a-variable": (lambda value, v: v, set(DEVICES)),
    "a-word": (lambda value, v: "/device:CPU:0", {D0}),
    "a-device": (lambda value, v: D1, {D1}),
    "a-list": (lambda value, v: ["/cpu:0", D2], {D0, D2}),
}


@pytest.mark.parametrize(("destination", "devices"), DESTINATIONS.values(), ids=DESTINATIONS.keys())
@pytest.mark.parametrize(
    ("aggregation", "expected"), [(SUM, 6.0), (MEAN, 2.0), (FIRST, 1.0)], ids=["sum", "mean", "first"]
)
def test_a_reduction_is_on_its_destinations(distribution, destination, devices, aggregation, expected):
    with distribution.scope():
        value, v = ids(distribution), rx.Variable(0.0)

        result = distribution.reduce(aggregation, value, destination(value, v))

        assert result.devices() == devices
        assert [float(x) for x in distribution.unwrap(result)] == [expected] * len(devices)
        assert isinstance(result, tower.Mirrored)


@pytest.mark.parametrize(
    "named",
    [
        {"aggregation": SUM},
        {"aggregation": "sum"},
        {"method_string": "sum"},
        {"method_string": SUM},
        {"reduce_op": rx.ReduceOp.SUM},
    ],
    ids=repr,
)
def test_a_reduction_has_had_several_names(distribution, named):
    with distribution.scope():
        assert distribution.reduce(**named, value=ids(distribution), destinations="cpu:0") == 6.0
        assert distribution.batch_reduce(**named, value_destination_pairs=[(ids(distribution), None)]) == [6.0]


def test_words_and_enums_mean_the_same(distribution):
    with distribution.scope():
        for word, expected in {"sum": 6.0, "Mean": 2.0, "only_first_tower": 1.0, rx.ReduceOp.MAX: 3.0}.items():
            assert distribution.reduce(word, ids(distribution)) == expected


def test_what_names_no_reduction_is_refused(distribution):
    with distribution.scope():
        value = ids(distribution)
        with pytest.raises(AssertionError, match="says nothing about how to combine"):
            distribution.reduce(NONE, value)
        with pytest.raises(ValueError, match="not a valid ReduceOp"):
            distribution.reduce("median", value)
        for refusal in (TypeError, AssertionError):
            with pytest.raises(refusal, match="takes one aggregation"):
                distribution.reduce(None, value)
        with pytest.raises(TypeError, match="takes one aggregation"):
            distribution.reduce("sum", value, method_string="mean")
        with pytest.raises(TypeError, match="'value'"):
            distribution.reduce("sum")


def test_many_reductions_keep_their_destinations(distribution):
    with distribution.scope():
        value, v = ids(distribution), rx.Variable(0.0)

        on_all, on_one, on_two = distribution.batch_reduce("mean", [(value, v), (value, "cpu:1"), (value, [D0, D2])])

    assert [x.devices() for x in (on_all, on_one, on_two)] == [set(DEVICES), {D1}, {D0, D2}]
    assert [float(x) for x in (on_all, on_one, on_two)] == [2.0, 2.0, 2.0]
    with distribution.scope():
        assert distribution.batch_reduce("sum", []) == []
        with pytest.raises(ValueError, match="should be a tuple"):
            distribution.batch_reduce("sum", [[value, v]])


def test_reductions_in_a_merge_function(distribution):
    def merge_fn(distribution, x):
        first = distribution.reduce(FIRST, x)
        return *distribution.batch_reduce("sum", [(x, None), (2 * first, "cpu:0")][:1]), first

    def fn():
        return tower.get_tower_context().merge_call(merge_fn, tower.get_tower_context().tower_id + 1.0)

    with distribution.scope():
        assert [float(x) for x in distribution.call_for_each_tower(fn)] == [6.0, 1.0]


def test_what_is_the_same_everywhere(distribution, single):
    with distribution.scope():
        assert distribution.reduce("sum", 0, "cpu:0") == 0
        assert distribution.reduce("mean", 5.0, "cpu:0") == 5.0
        assert distribution.reduce(FIRST, 5.0, "cpu:0") == 5.0
        with pytest.raises(ValueError, match="counted once"):
            distribution.reduce("sum", 5.0, "cpu:0")
    with single.scope():
        assert single.reduce("sum", 5.0, "cpu:0") == 5.0
        assert single.batch_reduce("mean", [(1.0, None), (2.0, None)]) == [1.0, 2.0]


def test_sparse_rows(distribution):
    rows = rx.IndexedSlices(
        tower.PerDevice(tuple(jnp.full((1, 2), i + 1.0) for i in range(3))),
        tower.PerDevice(tuple(np.array([i % 2]) for i in range(3))),
        (3, 2),
    )
    with distribution.scope():
        summed = distribution.reduce("sum", rows, "cpu:0").to_dense()
        averaged = distribution.reduce("mean", rows, "cpu:0").to_dense()

    np.testing.assert_allclose(summed, [[4, 4], [2, 2], [0, 0]])
    np.testing.assert_allclose(averaged, np.array([[4, 4], [2, 2], [0, 0]]) / 3)


def test_a_destination_that_is_none_is_refused(distribution):
    with distribution.scope():
        value = ids(distribution)
        with pytest.raises(ValueError, match="destinations must be one of"):
            distribution.reduce("sum", value, 3)
        for empty in ("", []):
            with pytest.raises(ValueError, match="can not be empty"):
                distribution.reduce("sum", value, empty)


def test_a_broadcast_has_a_copy_for_each_destination(distribution, single):
    with distribution.scope():
        v = rx.Variable(0.0)
        assert distribution.unwrap(distribution.broadcast(3.0)) == [3.0, 3.0, 3.0]
        assert distribution.broadcast(jnp.ones(2), v).devices() == set(DEVICES)
        assert distribution.broadcast(jnp.ones(2), ["cpu:1", "cpu:2"]).devices() == {D1, D2}
        with pytest.raises(AssertionError, match="which of these"):
            distribution.broadcast(ids(distribution))
    with single.scope():
        assert single.broadcast(3.0) == 3.0


def test_fetch_gets_a_value_onto_one_device(distribution):
    with distribution.scope():
        v = rx.Variable(4.0)
        with distribution.tower_local_var_scope("sum"):
            local = rx.Variable(2.0)

        assert distribution.fetch(v).devices() == {D0}
        assert distribution.fetch(v, "/device:CPU:2", fn=lambda x: x + 1) == 5.0
        assert distribution.fetch(v, "/device:CPU:2").devices() == {D2}
        assert distribution.fetch(local) == 6.0, "a tower-local variable is combined first"
        with pytest.raises(AssertionError, match="differs per tower"):
            distribution.fetch(ids(distribution))


def test_map_goes_round_the_devices(distribution):
    seen = []

    def fn(x, factor):
        seen.append(jnp.zeros(()).devices())
        return jnp.asarray(x) * factor

    with distribution.scope():
        mapped = distribution.map([1.0, 2.0, 3.0, 4.0], fn, 10.0)

        assert [len(items.get()) for items in distribution.unwrap(mapped)] == [2, 1, 1]
        assert seen == [{D0}, {D1}, {D2}, {D0}]
        assert distribution.reduce("sum", mapped, "cpu:1") == 100.0
        assert distribution.reduce("mean", mapped) == 25.0, "the mean over items, not over devices"
        few = distribution.map([1.0], lambda x: x)
        assert distribution.reduce("mean", few) == 1.0
        with pytest.raises(TypeError, match="differs per tower"):
            distribution.map([1.0], fn, ids(distribution))


def test_nothing_mapped_cannot_be_reduced(distribution):
    with distribution.scope(), pytest.raises(AssertionError, match="nothing to combine"):
        distribution.reduce("sum", distribution.map([], lambda x: x), "cpu:0")


def test_map_on_one_device_is_a_list(single):
    with single.scope():
        mapped = single.map([1.0, 2.0], lambda x: x)

        assert mapped == [1.0, 2.0] and isinstance(mapped, tower.MapOutput)
        assert single.reduce("sum", mapped) == 3.0
        assert single.reduce("mean", mapped) == 1.5
        with pytest.raises(AssertionError):
            single.reduce(FIRST, mapped)
        with pytest.raises(ValueError, match="no items"):
            single.reduce("sum", single.map([], lambda x: x))
