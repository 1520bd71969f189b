"""Variables in towers: mirrored, tower-local, aggregated, made there and updated from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower

D0, D1, D2 = jax.devices()[:3]
ON_READ, ON_WRITE = tower.VariableSynchronization.ON_READ, tower.VariableSynchronization.ON_WRITE
SUM, MEAN = tower.VariableAggregation.SUM, tower.VariableAggregation.MEAN
FIRST = tower.VariableAggregation.ONLY_FIRST_TOWER


@pytest.fixture
def distribution():
    return tower.MirroredStrategy(devices=[D0, D1])


def tower_id():
    return tower.get_tower_context().tower_id


def components(distribution, variable):
    return [np.asarray(x).tolist() for x in distribution.unwrap(variable)]


# -- made in towers


@pytest.mark.parametrize("towers", [2, 3])
def test_a_variable_made_in_towers_is_one_variable_on_all_devices(towers):
    distribution = tower.MirroredStrategy(devices=jax.devices()[:towers])

    def fn():
        v = rx.Variable(1.0, name="foo")
        return tower.get_tower_context().merge_call(lambda distribution: v)

    with distribution.scope():
        v = distribution.call_for_each_tower(fn)

    assert isinstance(v, rx.Variable) and v.name == "foo"
    assert v.devices == tuple(distribution.worker_devices)
    assert distribution.value_container(v) is v


def test_a_variable_without_a_name_is_called_variable(distribution):
    with distribution.scope():
        assert distribution.call_for_each_tower(lambda: rx.Variable(1.0)).name == "Variable"


def test_variables_made_one_after_the_other_stay_apart(distribution):
    names = ["foo/bar", "foo_1/bar", "foo_1/bar_1", "foo/bar_1"]

    with distribution.scope():
        made = distribution.call_for_each_tower(lambda: [rx.Variable(float(i), name=n) for i, n in enumerate(names)])

    assert [v.name for v in made] == names
    assert [float(v) for v in made] == [0.0, 1.0, 2.0, 3.0]


def test_a_variable_made_in_a_merge_function(distribution):
    def merge_fn(distribution):
        return rx.Variable(2.0, name="merged")

    with distribution.scope():
        v = distribution.call_for_each_tower(lambda: tower.get_tower_context().merge_call(merge_fn))

    assert isinstance(v, rx.Variable) and components(distribution, v) == [2.0, 2.0]


@pytest.mark.parametrize("options", [{}, {"synchronization": ON_READ, "aggregation": SUM}], ids=["mirrored", "local"])
def test_a_random_initial_value_is_the_same_everywhere(distribution, options):
    with distribution.scope():
        v = distribution.call_for_each_tower(
            lambda: rx.Variable(lambda: jax.random.normal(jax.random.key(1), (4,)), **options)
        )

    first, second = distribution.unwrap(v)
    np.testing.assert_array_equal(first, second)


def test_kinds_of_variables(distribution):
    def fn():
        local = rx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        mirrored = rx.Variable(1.0, synchronization=ON_WRITE, aggregation=MEAN)
        return local, mirrored

    with distribution.scope():
        local, mirrored = distribution.call_for_each_tower(fn)

    assert (local.synchronization, local.aggregation, local.trainable) == (ON_READ, SUM, False)
    assert (mirrored.synchronization, mirrored.aggregation, mirrored.trainable) == (ON_WRITE, MEAN, True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"synchronization": tower.VariableSynchronization.NONE},
            "`NONE` variable synchronization mode is not supported",
        ),
        ({"synchronization": 7}, "Invalid variable synchronization mode"),
        ({"aggregation": 7}, "Invalid variable aggregation mode"),
    ],
)
def test_a_kind_that_is_none_is_refused(distribution, options, text):
    with distribution.scope(), pytest.raises(ValueError, match=text):
        rx.Variable(1.0, name="v", **options)


# -- tower-local


def test_tower_local_variables_are_written_apart_and_read_together(distribution):
    with distribution.scope():
        v_sum = rx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        v_mean = rx.Variable(4.0, synchronization=ON_READ, aggregation=MEAN)

        def fn():
            v_sum.assign_add(2.0 + tower_id())
            v_mean.assign(6.0 * tower_id())
            return v_sum, v_mean

        assert distribution.call_for_each_tower(fn) == (v_sum, v_mean)
        assert components(distribution, v_sum) == [3.0, 4.0]
        assert components(distribution, v_mean) == [0.0, 6.0]
        assert (distribution.read_var(v_sum), distribution.read_var(v_mean)) == (7.0, 3.0)
        assert (v_sum.value, v_mean.value) == (7.0, 3.0)


def test_the_scope_of_tower_local_variables(distribution):
    with distribution.scope():
        with distribution.tower_local_var_scope("mean"):
            v = rx.Variable(1.0)

        def fn():
            with tower.get_tower_context().tower_local_var_scope("sum"):
                return rx.Variable(2.0)

        inside = distribution.call_for_each_tower(fn)

    assert (v.synchronization, v.aggregation, v.trainable) == (ON_READ, MEAN, False)
    assert (inside.synchronization, inside.aggregation) == (ON_READ, SUM)
    assert distribution.read_var(inside) == 4.0
    with pytest.raises(rx.ContextError), distribution.tower_local_var_scope("sum"):
        pass


def test_only_the_first_tower_counts(distribution):
    with distribution.scope():
        v0 = rx.Variable(2.0, synchronization=ON_READ, aggregation=FIRST)
        v1 = rx.Variable(3.0, synchronization=ON_WRITE, aggregation=FIRST)

        def fn(by0, by1):
            v0.assign_add(by0 * (tower_id() + 1.0))
            v1.assign_add(by1 * (tower_id() + 1.0))

        distribution.call_for_each_tower(fn, 5.0, 7.0)
        assert components(distribution, v0) == [7.0, 12.0] and distribution.read_var(v0) == 7.0
        assert components(distribution, v1) == [10.0, 10.0]

        distribution.call_for_each_tower(fn, 11.0, 13.0)
        assert components(distribution, v0) == [18.0, 34.0] and distribution.read_var(v0) == 18.0
        assert components(distribution, v1) == [23.0, 23.0]


def test_a_tower_local_variable_written_across_towers(distribution):
    with distribution.scope():
        v = rx.Variable(1.0, synchronization=ON_READ, aggregation=SUM)
        v.assign(6.0)

        assert components(distribution, v) == [3.0, 3.0] and distribution.read_var(v) == 6.0
        with pytest.raises(ValueError, match="does not support `assign_add` in cross-replica context"):
            v.assign_add(1.0)
        distribution.update(v, lambda component: component.assign(5.0))
        assert distribution.read_var(v) == 10.0, "an update sees the components themselves"


# -- assigned


def test_a_mirrored_variable_written_across_towers(distribution):
    with distribution.scope():
        v = rx.Variable(1.0)
        v.assign(6.0)
        assert components(distribution, v) == [6.0, 6.0]
        v.assign_add(6.0)
        assert components(distribution, v) == [12.0, 12.0]
        assert v.assign_sub(2.0, read_value=False) is None
        assert components(distribution, v) == [10.0, 10.0]


@pytest.mark.parametrize(
    ("method", "start", "by_tower", "constant"),
    [("assign", 1.0, 0.5, 5.0), ("assign_add", 1.0, 1.5, 6.0), ("assign_sub", 5.0, 4.5, 0.0)],
)
def test_a_mirrored_variable_aggregates_what_towers_write(distribution, method, start, by_tower, constant):
    with distribution.scope():
        v, w = rx.Variable(start, aggregation=MEAN), rx.Variable(start, aggregation=MEAN)
        distribution.call_for_each_tower(lambda: getattr(v, method)(tower_id() * 1.0, read_value=False))
        distribution.call_for_each_tower(lambda: getattr(w, method)(5.0, read_value=False))

    assert components(distribution, v) == [by_tower, by_tower]
    assert components(distribution, w) == [constant, constant]


def test_a_mirrored_variable_without_aggregation_refuses_what_differs(distribution):
    with distribution.scope():
        v = rx.Variable(1.0)
        with pytest.raises(rx.LocalityError, match="writes a per-replica value"):
            distribution.call_for_each_tower(lambda: v.assign(tower_id() * 1.0))


def test_increment_var_counts_steps_not_towers(distribution):
    with distribution.scope():
        step = rx.Variable(0)
        distribution.call_for_each_tower(lambda: tower.increment_var(step))
        distribution.call_for_each_tower(lambda: tower.increment_var(step, 5))
        with pytest.raises(rx.ContextError, match="call_for_each_tower"):
            tower.increment_var(step)

    assert int(step) == 6


# -- updated


def test_an_update_sees_its_device_and_no_tower(distribution):
    seen = []

    def fn(component, x, *, y):
        seen.append((tower.get_tower_context(), tower.get_cross_tower_context(), tower.get_update_device()))
        component.assign_add(x + y)

    with distribution.scope():
        v = rx.Variable(1.0)
        distribution.update(v, fn, 2.0, y=3.0)

    assert seen == [(None, distribution, D0)]
    assert components(distribution, v) == [6.0, 6.0], "each component grew once"
    assert tower.get_update_device() is None


def test_an_update_returns_the_variable_or_a_list(distribution):
    with distribution.scope():
        v = rx.Variable(1.0)

        assert distribution.update(v, lambda c: c.assign(2.0)) is v
        assert distribution.update(v, lambda c: c.assign(3.0), grouped=False) == [3.0, 3.0]
        assert distribution.update(v, lambda c: {"value": c.value}, group=False) == {"value": [3.0, 3.0]}


def test_an_update_with_a_value_per_tower_is_refused(distribution):
    with distribution.scope():
        v = rx.Variable(1.0)
        with pytest.raises(TypeError, match="differs per replica"):
            distribution.update(v, lambda c, x: c.assign(x), tower.PerDevice((1.0, 2.0)))


def test_an_update_of_one_device_calls_its_function_once():
    single = tower.OneDeviceStrategy("cpu:1")

    with single.scope():
        v = rx.Variable(1.0)
        assert single.update(v, lambda c, x: (c is v, x), 2.0) == (True, 2.0)
        assert single.update(v, lambda c: c.value, grouped=False) == [1.0]
    assert v.devices == (D1,)


def test_state_of_no_variable_is_updated_on_all_devices(distribution):
    with distribution.scope():
        v = rx.Variable(1.0, name="v")
        devices = distribution.non_slot_devices([v])
        with distribution.colocate_vars_with(devices):
            power = rx.Variable(0.5, name="beta_power")

        distribution.update_non_slot(devices, lambda: power.assign(power.value * 0.5))

        assert devices == [D0, D1]
        assert components(distribution, power) == [0.25, 0.25]
        assert distribution.update_non_slot(devices, lambda x: x, 1.0, grouped=False) == [1.0, 1.0]
        with pytest.raises(AssertionError):
            distribution.update_non_slot("cpu:0", lambda: None)


def test_a_variable_on_given_devices(distribution):
    with distribution.scope():
        with distribution.colocate_vars_with("cpu:1"):
            alone = rx.Variable(1.0)
        with distribution.colocate_vars_with([D0, D1]):
            everywhere = rx.Variable(1.0)

        assert alone.devices == (D1,) and everywhere.devices == (D0, D1)
        assert distribution.update(alone, lambda c: tower.get_update_device(), grouped=False) == [D1]


# -- moving averages, as layers of that time wrote them


def assign_moving_average(variable, value, decay):
    def merge_fn(distribution, v):
        mean = distribution.reduce(MEAN, v, variable)
        distribution.update(variable, lambda c, m: c.assign(c.value * decay + m * (1 - decay)), mean)

    tower.get_tower_context().merge_call(merge_fn, value)


@pytest.mark.parametrize(("towers", "expected"), [(2, [3.625, 3.875]), (1, [3.25, 4.25])])
def test_a_moving_average_follows_the_mean_over_towers(towers, expected):
    distribution = tower.MirroredStrategy(devices=jax.devices()[:towers])

    with distribution.scope():
        v = rx.Variable([10.0, 11.0])
        distribution.call_for_each_tower(
            lambda: assign_moving_average(v, jnp.stack([1.0 + tower_id(), 2.0 - tower_id()]), 0.25)
        )

    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)
