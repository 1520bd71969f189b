"""A variable's rows change alike on every replica, by the rule of its aggregation, in every context and mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax import IndexedSlices

MODES = {"compiled": False, "eager": True}
METHODS = ["add", "sub", "mul", "div", "min", "max", "update"]


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def strategy(request):
    return rx.MirroredStrategy(jax.devices()[:2], eager=request.param)


def variable(strategy, initial, **options):
    with strategy.scope():
        return rx.Variable(initial, **options)


def scatter(v, method, values, indices, **options):
    return getattr(v, f"scatter_{method}")(IndexedSlices(jnp.asarray(values), jnp.asarray(indices)), **options)


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def everywhere(v):
    """The value of a mirrored variable, after a look at each copy of it."""
    copies = [np.asarray(copy) for copy in v.values]
    assert all(np.array_equal(copy, copies[0]) for copy in copies)
    return copies[0].tolist()


# -- inside a replica


def test_sub_with_mean_averages_the_rows_of_all_replicas(strategy):
    v = variable(strategy, jnp.zeros(3), aggregation="mean")

    def step():
        rows = replica_id() + jnp.arange(2)
        scatter(v, "sub", rows.astype(jnp.float32), rows)

    strategy.run(step)

    assert everywhere(v) == [0, -1, -1]


def test_add_with_sum_adds_the_rows_of_all_replicas(strategy):
    v = variable(strategy, jnp.zeros(3, jnp.int32), aggregation="sum")

    def step():
        rows = jnp.reshape(replica_id(), 1)
        scatter(v, "add", jnp.concatenate([rows, rows + 1]), jnp.concatenate([rows, rows + 1]))

    strategy.run(step)

    assert everywhere(v) == [0, 2, 2]


def test_div_with_sum_of_integers(strategy):
    v = variable(strategy, jnp.array([1, 6, 1]), aggregation="sum")

    def step():
        row = jnp.reshape(replica_id(), 1)
        scatter(v, "div", row + 2, row)

    strategy.run(step)

    assert everywhere(v) == [0, 2, 1]


def test_mul_with_mean(strategy):
    v = variable(strategy, jnp.array([2.0, 1.0, 1.0]), aggregation="mean")

    def step():
        row = jnp.reshape(replica_id(), 1)
        scatter(v, "mul", row + 2.0, row)

    strategy.run(step)

    assert everywhere(v) == [2.0, 1.5, 1.0]


def test_only_first_replica_takes_the_rows_of_replica_0(strategy):
    v = variable(strategy, jnp.zeros(3), aggregation="only_first_replica")

    def step():
        row = jnp.reshape(replica_id(), 1)
        scatter(v, "update", row + 5.0, row)

    strategy.run(step)

    assert everywhere(v) == [5, 0, 0]


CHAIN = [("sub", 2), ("add", 4), ("max", 4), ("min", 2), ("mul", 4), ("div", 2), ("update", 2)]


def test_equal_rows_on_every_replica_need_no_aggregation(strategy):
    v = variable(strategy, jnp.array([4.0]))

    def step():
        return [scatter(v, method, [2.0], [0]) for method, _ in CHAIN]

    results = strategy.run(step)

    assert [float(x[0]) for x in results] == [expected for _, expected in CHAIN]
    assert everywhere(v) == [2.0]


def test_rows_that_differ_per_replica_need_an_aggregation(strategy):
    v = variable(strategy, jnp.zeros(3), name="table")

    def step():
        scatter(v, "add", [1.0], jnp.reshape(replica_id(), 1))

    with pytest.raises(rx.LocalityError, match="table"):
        strategy.run(step)


@pytest.mark.parametrize("method", ["min", "max", "update"])
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_min_max_and_update_of_many_replicas_are_refused(strategy, method, aggregation):
    v = variable(strategy, jnp.zeros(3), aggregation=aggregation, name="table")

    def step():
        scatter(v, method, [1.0], [0])

    with pytest.raises(NotImplementedError, match=f"scatter_{method} is only supported for mirrored variable .*table"):
        strategy.run(step)
    with pytest.raises(NotImplementedError, match="only_first_replica"), strategy.scope():
        step()


def test_inside_a_loop_and_under_a_gradient(strategy):
    v = variable(strategy, jnp.zeros(2), aggregation="sum")

    def step(x):
        def loss():
            scatter(v, "add", jnp.reshape(x, 1), [1])
            return (v.value * x).sum()

        return rx.grad(loss, [v])()[0]

    strategy.run(step, (rx.PerReplica((1.0, 2.0)),))

    assert everywhere(v) == [0, 3]


def test_two_dimensional_rows(strategy):
    v = variable(strategy, jnp.zeros((3, 2)), aggregation="sum")

    def step(x):
        scatter(v, "add", jnp.stack([x, x]), [0, 2])

    strategy.run(step, (rx.PerReplica((jnp.array([1.0, 2.0]), jnp.array([10.0, 20.0]))),))

    assert everywhere(v) == [[11, 22], [0, 0], [11, 22]]


# -- across replicas, and on the host


def test_across_replicas_the_rows_given_go_to_every_copy(strategy):
    v = variable(strategy, jnp.array([4.0, 4.0]), aggregation="sum")
    with strategy.scope():
        scatter(v, "add", [1.0], [0])
        scatter(v, "mul", [2.0], [1])

    assert everywhere(v) == [5, 8]


@pytest.mark.parametrize("scope", [True, False], ids=["scope", "top-level"])
def test_the_chain_on_the_host(scope):
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    v = variable(strategy, jnp.array([4.0]))

    def chain():
        return [float(scatter(v, method, [2.0], [0]).value[0]) for method, _ in CHAIN]

    if scope:
        with strategy.scope():
            results = chain()
    else:
        results = chain()

    assert results == [expected for _, expected in CHAIN]


def test_in_a_merge_function(strategy):
    v = variable(strategy, jnp.zeros(3))

    def merge(strategy, x):
        total = strategy.reduce("sum", x)
        scatter(v, "add", jnp.reshape(total, 1), [2])

    strategy.run(lambda x: rx.get_replica_context().merge_call(merge, (x,)), (rx.PerReplica((1.0, 2.0)),))

    assert everywhere(v) == [0, 0, 3]


def test_in_an_update_function(strategy):
    v = variable(strategy, jnp.zeros(3))

    strategy.extended.update(v, lambda v, x: scatter(v, "add", [x], [1], read_value=False), args=(2.0,))

    assert everywhere(v) == [0, 2, 0]


def test_per_replica_rows_across_replicas_are_refused():
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    v = variable(strategy, jnp.zeros(3))
    rows = IndexedSlices(rx.PerReplica((jnp.ones(1), jnp.ones(1))), jnp.array([0]))

    with pytest.raises(rx.LocalityError), strategy.scope():
        v.scatter_add(rows)


# -- what each method does


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16])
@pytest.mark.parametrize("place", ["in a run", "at the top level"])
def test_repeated_indices_count_in_order(method, dtype, place):
    start, values, indices = [12, 24, 7, 5], [2, 3, 2, 9], [1, 0, 1, 3]
    strategy = rx.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = rx.Variable(jnp.asarray(start, dtype))
    expected = np.array(start, np.int64 if dtype == jnp.int32 else np.float64)
    for value, i in zip(values, indices, strict=True):
        before = expected[i]
        expected[i] = {
            "add": before + value, "sub": before - value, "mul": before * value, "update": value,
            "div": before // value if dtype == jnp.int32 else before / value,
            "min": min(before, value), "max": max(before, value),
        }[method]  # fmt: skip

    def step():
        scatter(v, method, jnp.asarray(values, dtype), indices)

    strategy.run(step) if place == "in a run" else step()

    np.testing.assert_allclose(v.numpy().astype(np.float64), expected, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)


def test_integers_are_divided_towards_zero():
    v = rx.Variable(jnp.array([-7, 7]))

    scatter(v, "div", [2, 2], [0, 1])

    assert v.numpy().tolist() == [-3, 3]


@pytest.mark.parametrize("method", METHODS)
def test_rows_outside_are_left_out_and_none_is_nothing(method):
    v = rx.Variable(jnp.array([3.0, 4.0]))

    scatter(v, method, [9.0], [2])
    scatter(v, method, jnp.zeros(0), jnp.zeros(0, jnp.int32))

    assert v.numpy().tolist() == [3, 4]


def test_update_of_negative_indices_counts_from_the_end_and_the_last_row_wins():
    v = rx.Variable(jnp.zeros(3))

    scatter(v, "update", [1.0, 2.0, 3.0, 4.0], [2, 0, -1, 0])

    assert v.numpy().tolist() == [4, 0, 3]


def test_returns_what_assign_returns():
    v = rx.Variable(jnp.zeros(2))

    assert scatter(v, "add", [1.0], [0]) is v
    assert scatter(v, "add", [1.0], [0], read_value=False) is None
    assert rx.get_strategy().run(lambda: scatter(v, "add", [1.0], [0])).tolist() == [3, 0]


# -- refusals


@pytest.mark.parametrize("method", METHODS)
def test_on_read_variables_refuse_all(strategy, method):
    v = variable(strategy, jnp.zeros(2), synchronization="on_read", aggregation="sum")

    with pytest.raises(NotImplementedError, match="ON_READ"):
        strategy.run(lambda: scatter(v, method, [1.0], [0]))
    with pytest.raises(NotImplementedError, match="ON_READ"), strategy.scope():
        scatter(v, method, [1.0], [0])


@pytest.mark.parametrize(
    ("values", "indices", "dense_shape"),
    [
        (jnp.ones((1, 3)), jnp.array([0]), None),
        (jnp.ones((2, 2)), jnp.array([0]), None),
        (jnp.ones(2), jnp.array(0), None),
        (jnp.ones((1, 2)), jnp.array([0.0]), None),
        (jnp.ones((1, 2)), jnp.array([0]), (4, 2)),
    ],
    ids=["width", "length", "scalar-index", "float-index", "dense-shape"],
)
def test_rows_that_do_not_fit_are_refused(values, indices, dense_shape):
    v = rx.Variable(jnp.zeros((3, 2)), name="table")

    with pytest.raises(ValueError, match="table.scatter_add"):
        v.scatter_add(IndexedSlices(values, indices, dense_shape))


def test_a_scalar_has_no_rows():
    with pytest.raises(ValueError, match="do not fit"):
        scatter(rx.Variable(1.0), "add", [1.0], [0])


def test_lists_are_rows_too(strategy):
    table = variable(strategy, jnp.zeros(3), aggregation="sum")
    strategy.run(lambda: table.scatter_add(rx.IndexedSlices([1.0, 2.0], [0, 2])))
    sums = strategy.run(lambda: rx.get_replica_context().all_reduce("sum", rx.IndexedSlices([[1.0]], (1,), (3, 1))))

    assert table.numpy().tolist() == [2.0, 0.0, 4.0]
    assert sums.values.tolist() == [[1.0], [1.0]] and sums.indices.tolist() == [1, 1]


def test_rows_come_as_slices():
    with pytest.raises(TypeError, match="IndexedSlices"):
        rx.Variable(jnp.zeros(2)).scatter_add(jnp.ones(2))
