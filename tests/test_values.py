"""A value per replica: whose it is, how it is opened, and what happens when it has been taken off its replicas."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

D = jax.devices()


@pytest.fixture
def two():
    return rx.MirroredStrategy(D[:2])


def rows(strategy):
    """Two rows for each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.full((2, 2), c.replica_id_in_sync_group, jnp.float32)
    )


def ids(strategy):
    return strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * 1.0)


def listed(values):
    return [np.asarray(value).tolist() for value in values]


OTHERS = {
    "more of them": lambda: rx.MirroredStrategy(D[:4]),
    "other devices": lambda: rx.MirroredStrategy(D[2:4]),
    "another order": lambda: rx.MirroredStrategy([D[1], D[0]]),
    "several devices each": lambda: rx.MirroredStrategy(D[:4], replica_mesh={"model": 2}),
    "one of them": lambda: rx.OneDeviceStrategy(D[0]),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_a_value_of_other_replicas_reaches_no_replica(two, make):
    other = make()
    for value in (rows(two), ids(two)):
        for attempt in (
            lambda value=value: other.run(lambda x: x, (value,)),
            lambda value=value: other.run(lambda x: x["a"], ({"a": value},)),
            lambda value=value: other.lower(lambda x: x, (value,)),
            lambda value=value: other.reduce("sum", value),
            lambda value=value: other.gather(value, axis=0),
        ):
            with pytest.raises(
                rx.InputError, match=r"(?s)other replicas than the strategy's.*2 replicas, on cpu:0, cpu:1"
            ):
                attempt()


def test_values_over_as_many_devices_are_not_dealt_out_anew():
    four, grid = rx.MirroredStrategy(D[:4]), OTHERS["several devices each"]()

    with pytest.raises(rx.InputError, match=r"args\[0\]  4 replicas, on cpu:0, cpu:1, cpu:2, cpu:3"):
        grid.run(lambda x: x, (ids(four),))
    with pytest.raises(rx.InputError, match="2 replicas, on cpu:0, cpu:1, cpu:2, cpu:3"):
        four.run(lambda x: x, (rows(grid),))


def test_an_eager_run_takes_no_value_of_other_replicas(two):
    turned = rx.MirroredStrategy([D[1], D[0]], eager=True)

    with pytest.raises(rx.InputError, match="argument 'x'  2 replicas, on cpu:0, cpu:1"):
        turned.run(lambda x: x, (rows(two),))


TAKEN_OFF = {
    "device_get": jax.device_get,
    "device_put": lambda value: jax.device_put(value, D[5]),
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "jit": jax.jit(lambda value: jax.tree.map(jnp.zeros_like, value)),
}


@pytest.mark.parametrize("take", TAKEN_OFF.values(), ids=TAKEN_OFF.keys())
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_value_that_was_taken_off_its_replicas_is_laid_over_them_again(take, eager):
    strategy = rx.MirroredStrategy(D[:2], eager=eager)
    whole, scale = rows(strategy), 0.0 if take is TAKEN_OFF["jit"] else 1.0
    value = take(whole)

    assert "PerReplica(" in repr(value), "it cannot be opened, and says so without an error"
    with pytest.raises(rx.InputError, match=r"cannot be told apart.*\n\n.*float32\[4, 2\]"):
        _ = value.values
    assert listed(strategy.experimental_local_results(value)) == [[[0, 0]] * 2, [[scale, scale]] * 2]
    assert strategy.run(lambda x: rx.get_replica_context().all_reduce("sum", x), (value,)).tolist() == [[scale] * 2] * 2
    assert strategy.reduce("sum", value).tolist() == [[scale] * 2] * 2
    assert strategy.gather(value, axis=0).tolist() == [[0, 0]] * 2 + [[scale] * 2] * 2


def test_a_value_whose_buffer_is_gone_is_not_combined(two):
    value = rows(two)
    value.data.delete()

    for attempt in (
        lambda: two.reduce("sum", value),
        lambda: two.gather(value, axis=0),
        lambda: two.experimental_local_results(value),
    ):
        with pytest.raises(rx.InputError, match=r"(?s)buffer is gone.*float32\[4, 2\]"):
            attempt()


def test_what_jit_leaves_on_every_device_is_opened_all_the_same(two):
    whole = jax.tree.map(lambda x: jax.device_put(x, two.placement.mirrored), rows(two))

    assert listed(whole.values) == [[[0, 0]] * 2, [[1, 1]] * 2]


@pytest.mark.parametrize("change", [lambda x: x.sum(), lambda x: x[:3], lambda x: 1.0], ids=["sum", "fewer", "number"])
def test_a_value_with_another_number_of_rows_is_no_replicas(two, change):
    value = jax.tree.map(change, rows(two))

    for attempt in (
        lambda: value.values,
        lambda: two.run(lambda x: x, (value,)),
        lambda: two.reduce("sum", value),
        lambda: two.experimental_local_results({"a": value}),
    ):
        with pytest.raises(rx.InputError, match="cannot be told apart"):
            attempt()
    assert repr(value)


@pytest.mark.parametrize("data", [3, "ab", np.ones(2), {"a": 1}], ids=["number", "text", "array", "dict"])
def test_components_come_as_a_tuple(two, data):
    value = rx.PerReplica(data)

    for attempt in (lambda: value.values, lambda: two.run(lambda x: x, (value,)), lambda: two.reduce("mean", value)):
        with pytest.raises(rx.InputError, match=r"rx.PerReplica\(components\) takes a tuple"):
            attempt()
    assert repr(value).startswith("PerReplica(")
    assert repr(rx.PerReplica(1.0, 2.0)) == "PerReplica(1.0, 2.0)"  # type: ignore[arg-type]


def test_components_that_are_structures_make_a_structure_of_values():
    slices = [rx.IndexedSlices(jnp.full((1, 2), i + 1.0), jnp.array([i]), (2, 2)) for i in range(2)]
    for eager in (False, True):
        strategy = rx.MirroredStrategy(D[:2], eager=eager)

        dense = strategy.run(
            lambda x, y: (x.to_dense(), y["a"]), (rx.PerReplica(tuple(slices)), rx.PerReplica(({"a": 1.0}, {"a": 2.0})))
        )

        assert listed(dense[0].values) == [[[1, 1], [0, 0]], [[0, 0], [2, 2]]]
        assert listed(dense[1].values) == [1, 2]


def test_rows_of_each_replica_stay_its_own(two):
    value = two.experimental_distribute_values_from_function(
        lambda c: rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([c.replica_id_in_sync_group]), (2, 2))
    )

    assert listed(two.run(lambda x: x.to_dense(), (value,)).values) == [[[1, 1], [0, 0]], [[0, 0], [1, 1]]]
    for wrong in (jnp.array(0), jnp.array([0, 1])):
        with pytest.raises(rx.InputError, match=r"(?s)do not belong together.*indices      int32"):
            rx.IndexedSlices(jnp.ones((1, 2)), wrong, (2, 2)).to_dense()


# -- local results


def test_what_is_no_replicas_is_the_only_local_result(two):
    array = jnp.ones(2)

    for value in (3, "a", None, array, np.ones(2)):
        (only,) = two.experimental_local_results(value)
        assert only is value


def test_what_all_replicas_have_is_a_local_result_of_each(two):
    total = two.reduce("sum", ids(two))
    with two.scope():
        v = rx.Variable(4.0)

    copies = two.experimental_local_results(total)
    assert [(float(x), *x.devices()) for x in copies] == [(1.0, D[0]), (1.0, D[1])]
    assert [float(x) for x in two.experimental_local_results(v)] == [4.0, 4.0]
    assert [float(entry["v"]) for entry in two.experimental_local_results({"v": v, "n": None})] == [4.0, 4.0]
    assert (
        two.run(lambda: rx.get_replica_context().merge_call(lambda s: len(s.experimental_local_results(v.value)))) == 2
    )


def test_a_structure_becomes_one_for_each_replica(two):
    value = {"a": ids(two), "b": 3, "c": [None, "x"]}

    first, second = two.experimental_local_results(value)

    assert (float(first["a"]), first["b"], first["c"]) == (0.0, 3, [None, "x"])
    assert (float(second["a"]), second["b"], second["c"]) == (1.0, 3, [None, "x"])
    assert two.experimental_local_results([]) == ([], [])
    with pytest.raises(rx.InputError, match="a part of the structure  2 replicas"):
        rx.MirroredStrategy(D[:4]).experimental_local_results({"a": ids(two)})


def test_values_made_inside_an_rx_function_are_constants_of_it(two):
    @rx.function
    def squares():
        value = two.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group + 2)
        return two.run(lambda x: x**2, (value,))

    assert listed(squares().values) == [4, 9]
    with pytest.raises(TypeError, match="the value_fn is not a function"):
        two.experimental_distribute_values_from_function(3)


# -- taken for one array


VALUE = rx.PerReplica((1.0, 2.0))

USES = {
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "array * x": lambda x: jnp.ones(3) * x,
    "numpy * x": lambda x: np.ones(3) * x,
    "-x": lambda x: -x,
    "x < 1": lambda x: x < 1,
    "x[0]": lambda x: x[0],
    "for ... in x": list,
    "if x": bool,
    "float(x)": float,
    "f'{x:.2f}'": lambda x: f"{x:.2f}",
    "np.asarray(x)": np.asarray,
    "jnp.asarray(x)": jnp.asarray,
    "jnp.sum(x)": jnp.sum,
    "jax.jit(f)(x), x.dtype": lambda x: jax.jit(lambda y: y + 1)(x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_value_per_replica_is_no_number_and_says_what_to_write(use):
    with pytest.raises(rx.LocalityError, match="using a PerReplica object while not inside") as refused:
        use(VALUE)

    assert isinstance(refused.value, TypeError)
    assert 'strategy.reduce("mean", value)' in str(refused.value)


def test_an_attribute_of_arrays_is_not_there_and_says_whose_is():
    with pytest.raises(AttributeError, match=r"value.values\[0\].shape"):
        _ = VALUE.shape
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = VALUE.nonsense
    assert not hasattr(VALUE, "dtype")


def test_printing_formats_without_a_specification():
    assert f"{VALUE}" == repr(VALUE) == "PerReplica:{\n  0: 1.0,\n  1: 2.0\n}"


def test_numpy_and_round_are_refused_in_words():
    value = rx.PerReplica((1.0, 2.0))

    with pytest.raises(AttributeError, match=r"(?s)no `numpy`.*np\.asarray\(value\.values\[0\]\)"):
        value.numpy()
    with pytest.raises(rx.LocalityError, match="while not inside a replica context"):
        round(value, 3)
