"""`strategy.reduce` and `strategy.gather`: any value, any axis, on the host, in merge functions and in `rx.function`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.strategies import STRATEGIES

D = jax.devices()

MANY = {
    "mirrored_3": lambda: rx.MirroredStrategy(D[:3]),
    "central_2": STRATEGIES["central_2"],
    "mirrored_2x2": STRATEGIES["mirrored_2x2"],
}
ONE = {name: STRATEGIES[name] for name in ("default", "one_device", "mirrored_1")}


@pytest.fixture(params=MANY)
def strategy(request):
    return MANY[request.param]()


@pytest.fixture(params=ONE)
def single(request):
    return ONE[request.param]()


@pytest.fixture
def two():
    return STRATEGIES["mirrored_2"]()


def laid_out(strategy, make):
    """One value per replica, where a run would have left it."""
    return strategy.experimental_distribute_values_from_function(lambda c: make(c.replica_id_in_sync_group))


def parts(strategy, make):
    """The same, held one by one."""
    return rx.PerReplica(tuple(make(i) for i in range(strategy.num_replicas_in_sync)))


HELD = {"laid out": laid_out, "one by one": parts}


@pytest.fixture(params=HELD)
def held(request):
    return HELD[request.param]


def merged(strategy, merge_fn, *args):
    """What a merge function returns."""
    return strategy.run(lambda *args: rx.get_replica_context().merge_call(merge_fn, args), args)


# -- along axes


AXES = [0, -1, (0, 1), [0, 2], (-1, 0), (), None, np.int64(1), (np.int32(0), 1)]


@pytest.mark.parametrize(
    ("op", "axis"), [*(("mean", axis) for axis in AXES), ("sum", (0, -1)), ("min", -2), ("max", (0, 2))], ids=repr
)
def test_an_axis_is_reduced_as_numpy_reduces_it(strategy, held, op, axis):
    n = strategy.num_replicas_in_sync
    whole = np.stack([np.arange(24, dtype=np.float32).reshape(2, 3, 4) * (-1) ** i + i for i in range(n)])
    value = held(strategy, lambda i: whole[i])
    inner = () if axis is None else np.atleast_1d(np.array(axis, int)).tolist()
    expected = getattr(np, op)(whole, axis=(0, *(1 + a % 3 for a in inner)))

    np.testing.assert_allclose(strategy.reduce(op, value, axis=axis), expected, rtol=1e-6)
    if held is laid_out:
        inside = merged(strategy, lambda s, x: s.reduce(op, x, axis=axis), value)
        np.testing.assert_allclose(inside, expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [3, -4, (0, 3)])
def test_an_axis_that_the_value_has_not(strategy, held, axis):
    value = held(strategy, lambda i: np.zeros((2, 3, 4)))
    for what in (value, np.zeros((2, 3, 4))):
        with pytest.raises(ValueError, match=r"has rank 3, so its axes are -3\.\.2"):
            strategy.reduce("mean", what, axis=axis)
    with pytest.raises(ValueError, match="its axes are"):
        merged(strategy, lambda s, x: s.reduce("mean", x, axis=axis), laid_out(strategy, lambda i: np.zeros((2, 3, 4))))


def refuse_twice_and_none(s, held):
    with pytest.raises(ValueError, match="occurs twice"):
        s.reduce("sum", held(s, lambda i: np.zeros((2, 3))), axis=(0, -2))
    with pytest.raises(ValueError, match="is a scalar and has no axis"):
        s.reduce("sum", held(s, lambda i: np.float32(i)), axis=0)


def test_an_axis_twice_and_an_axis_of_a_scalar(strategy, held):
    refuse_twice_and_none(strategy, held)


def test_a_single_replica_refuses_them_too(single, held):
    refuse_twice_and_none(single, held)


@pytest.mark.parametrize("axis", ["0", 1.0, True, (0, True)], ids=repr)
def test_what_is_no_axis(strategy, axis):
    with pytest.raises(TypeError, match="an axis is an int"):
        strategy.reduce("sum", laid_out(strategy, lambda i: np.zeros((2, 3))), axis=axis)


def test_uneven_replicas_count_by_their_elements(two):
    assert float(two.reduce("mean", parts(two, lambda r: np.full(r + 1, r, np.float32)), axis=0)) == np.float32(2 / 3)
    assert float(two.reduce("mean", rx.PerReplica((jnp.ones(1), jnp.array([1.0, 2.0]))), axis=0)) == np.float32(4 / 3)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_replica_with_r_plus_1_copies_of_r(strategy, dtype):
    n = strategy.num_replicas_in_sync
    value = parts(strategy, lambda r: np.full(r + 1, r, dtype))
    total = sum(r * (r + 1) for r in range(n))

    assert float(strategy.reduce("sum", value, axis=0)) == total
    assert float(strategy.reduce("mean", value, axis=0)) == pytest.approx(total / sum(range(1, n + 1)))


def test_no_elements_at_all(strategy, held):
    empty = held(strategy, lambda i: np.zeros(0, np.float32))

    assert np.isnan(strategy.reduce("mean", empty, axis=0))
    assert float(strategy.reduce("sum", empty, axis=0)) == 0
    assert strategy.reduce("sum", empty).shape == (0,)
    with pytest.raises(ValueError, match="no smallest and no largest"):
        strategy.reduce("max", empty, axis=0)


def test_a_replica_without_elements_leaves_the_word_to_the_others(strategy):
    value = parts(strategy, lambda i: np.full(i, -7, np.int32))

    assert [int(strategy.reduce(op, value, axis=0)) for op in ("min", "max")] == [-7, -7]
    assert float(strategy.reduce("mean", value, axis=0)) == -7.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "bool"])
def test_the_mean_of_a_thousand_narrow_numbers_does_not_overflow(strategy, held, dtype):
    each = 1 if dtype == "bool" else 100
    value = held(strategy, lambda i: np.full(1000, each, jnp.dtype(dtype)))

    mean = strategy.reduce("mean", value, axis=0)

    assert float(mean) == each
    assert mean.dtype == (dtype if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact) else np.float32)


# -- what is the same everywhere


def test_plain_numbers(strategy):
    assert strategy.reduce("mean", 3.0) == strategy.reduce("max", 3.0) == 3.0
    assert strategy.reduce("sum", np.float32(0)) == strategy.reduce("sum", 0) == 0
    assert strategy.reduce("sum", np.zeros(2)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="A non-DistributedValues value cannot be reduced"):
        strategy.reduce("sum", 3.0)
    with pytest.raises(rx.LocalityError):
        strategy.reduce("sum", np.array([0.0, 1.0]))


def test_a_single_replica_has_the_sum_of_its_number(single):
    assert single.reduce("sum", 3.0) == 3.0
    assert single.reduce("sum", rx.PerReplica((3.0,))) == 3.0


def test_with_an_axis_a_plain_array_counts_for_each_replica(strategy):
    n = strategy.num_replicas_in_sync

    assert strategy.reduce("sum", np.ones((2, 3)), axis=0).tolist() == [2 * n] * 3
    assert strategy.reduce("mean", np.ones((2, 3)), axis=(0, 1)) == 1
    with pytest.raises(TypeError, match="random keys, text and objects"):
        strategy.reduce("mean", "abc", axis=0)


def test_variables(strategy):
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        mirrored = rx.Variable([1.0, 2.0])
        local = rx.Variable([1.0, 2.0], synchronization="on_read", aggregation="sum")

    assert strategy.reduce("mean", mirrored).tolist() == [1, 2]
    assert float(strategy.reduce("sum", mirrored, axis=0)) == 3 * n
    with pytest.raises(AssertionError):
        strategy.reduce("sum", mirrored)
    assert strategy.reduce("sum", local).tolist() == [n, 2 * n]
    assert strategy.gather(mirrored, axis=0).tolist() == strategy.gather(local, axis=0).tolist() == [1, 2] * n


# -- nests


def test_a_nest_is_one_exchange_on_the_host(two, compilations):
    values = [laid_out(two, lambda i, k=k: np.full(k + 1, i, np.float32)) for k in range(3)]
    with compilations() as names:
        results = two.reduce("sum", {"a": values[0], "b": [values[1], None, (values[2],)]})

    assert names == ["jit(body)"]
    assert results["b"][0].tolist() == [1, 1] and results["b"][1] is None and results["b"][2][0].tolist() == [1, 1, 1]


def test_a_nest_is_one_exchange_in_a_merge_function(two):
    values = [laid_out(two, lambda i, k=k: np.full(k + 1, i, np.float32)) for k in range(3)]

    def lowered(options):
        def merge(s, values):
            return s.reduce("sum", {"a": values[0], "b": values[1:]}, options=options)

        step = lambda values: rx.get_replica_context().merge_call(merge, (values,))  # noqa: E731
        return two.lower(step, (values,)).as_text().count('stablehlo.all_reduce"')

    assert lowered(None) == 1
    assert lowered(rx.CommunicationOptions(bytes_per_pack=1)) == 3, "options of the call are heeded"


def test_mixed_leaves_keep_their_places(strategy):
    n = strategy.num_replicas_in_sync
    value = laid_out(strategy, lambda i: np.float32(i))
    nest = {"differs": value, "same": 2.0, "held": parts(strategy, lambda i: i)}
    expected = {"differs": (n - 1) / 2, "same": 2.0, "held": (n - 1) / 2}

    assert jax.tree.map(float, strategy.reduce("mean", nest)) == expected
    inside = merged(strategy, lambda s, x: s.reduce("mean", nest | {"differs": x}), value)
    assert jax.tree.map(float, inside) == expected


# -- whose value is it


def test_a_value_of_other_replicas_is_refused(strategy):
    n = strategy.num_replicas_in_sync
    other = laid_out(rx.MirroredStrategy(D[:8]), lambda i: np.ones(2, np.float32))
    too_many = rx.PerReplica((np.ones(2),) * (n + 1))

    for value in (other, too_many, rx.PerReplica(())):
        for attempt in (
            lambda value=value: strategy.reduce("sum", value),
            lambda value=value: strategy.reduce("sum", value, axis=0),
            lambda value=value: strategy.gather(value, axis=0),
        ):
            with pytest.raises(ValueError, match=rf"(?s)other replicas than the strategy's.*{n} replicas"):
                attempt()


def test_options_are_options(strategy):
    value = laid_out(strategy, lambda i: np.ones(2, np.float32))
    context = rx.get_replica_context
    for attempt in (
        lambda: strategy.reduce("sum", value, options="ring"),
        lambda: strategy.gather(value, 0, options="ring"),
        lambda: strategy.run(lambda x: context().all_reduce("sum", x, "ring"), (value,)),
        lambda: strategy.run(lambda x: context().all_gather(x, 0, "ring"), (value,)),
        lambda: rx.NcclAllReduce().reduce(rx.ReduceOp.SUM, value, value, "ring"),
    ):
        with pytest.raises(TypeError, match=r"options='ring': expected an rx.CommunicationOptions"):
            attempt()


@pytest.mark.parametrize(
    "wrong",
    [{"bytes_per_pack": -1}, {"bytes_per_pack": "1"}, {"bytes_per_pack": 1.5}, {"timeout_seconds": 0},
     {"timeout_seconds": -1}, {"timeout_seconds": "1"}, {"timeout_seconds": float("nan")}, {"implementation": 3},
     {"implementation": "mpi"}],
    ids=repr,
)  # fmt: skip
def test_options_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=f"CommunicationOptions\\({next(iter(wrong))}="):
        rx.CommunicationOptions(**wrong)


def test_options_merge_by_what_is_not_default():
    base = rx.CommunicationOptions(bytes_per_pack=10, timeout_seconds=2.0, implementation="nccl")

    assert base.merge(None) == base.merge(rx.CommunicationOptions()) == base
    assert base.merge(rx.CommunicationOptions(implementation="Ring")) == rx.CommunicationOptions(10, 2.0, "RING")


# -- gather


def test_rows_of_all_replicas_in_order(strategy, held):
    n = strategy.num_replicas_in_sync
    blocks = [np.full((2, 3), i, np.float32) for i in range(n)]
    value = held(strategy, lambda i: blocks[i])
    for axis in (0, 1, -1, -2, np.int64(1)):
        np.testing.assert_array_equal(strategy.gather(value, axis=axis), np.concatenate(blocks, axis))


def test_ragged_rows(strategy):
    n = strategy.num_replicas_in_sync
    rows = n * (n + 1) // 2

    assert strategy.gather(parts(strategy, lambda r: np.ones((r + 1, 1))), axis=0).shape == (rows, 1)
    assert strategy.gather(parts(strategy, lambda r: np.ones((1, r + 1))), axis=1).shape == (1, rows)
    with pytest.raises(ValueError, match=r"Shape mismatch.*of different shape.*must be equal"):
        strategy.gather(parts(strategy, lambda r: np.ones((1, r + 1))), axis=0)
    with pytest.raises(ValueError, match="of different rank"):
        strategy.gather(parts(strategy, lambda r: np.ones((1,) * (r + 1))), axis=0)


def same():
    return jnp.arange(2.0)


def test_what_is_equal_on_all_replicas_is_there_for_each(strategy):
    n = strategy.num_replicas_in_sync

    assert strategy.gather(strategy.run(same), axis=0).tolist() == [0, 1] * n
    assert rx.function(lambda: strategy.gather(strategy.run(same), axis=0))().tolist() == [0, 1] * n
    assert strategy.run(lambda: rx.get_replica_context().all_gather(same(), axis=0)).tolist() == [0, 1] * n
    keys = strategy.gather(strategy.run(lambda: jax.random.split(jax.random.key(0), 1)), axis=0)
    assert keys.shape == (n,)


def test_a_single_replica_gathers_its_own(single):
    assert single.gather(single.run(same), axis=0).tolist() == [0, 1]


def test_what_no_replica_computed_is_gathered_as_it_is(strategy):
    array = jnp.arange(2.0)

    assert strategy.gather(array, axis=0) is array
    assert strategy.gather({"a": 1.0, "b": None}, axis=0) == {"a": 1.0, "b": None}


@pytest.mark.parametrize(
    ("make", "axis", "error", "text"),
    [
        (lambda i: np.float32(i), 0, ValueError, "concatenates along an axis and .* scalar"),
        (lambda i: np.zeros((2, 3)), 2, ValueError, r"its axes are -2\.\.1"),
        (lambda i: np.zeros((2, 3)), None, TypeError, "an axis is an int"),
        (lambda i: np.zeros((2, 3)), "0", TypeError, "an axis is an int"),
    ],
    ids=["scalars", "no-such-axis", "none", "a-word"],
)
def test_what_cannot_be_gathered(strategy, held, make, axis, error, text):
    value = held(strategy, make)
    for attempt in (
        lambda: strategy.gather(value, axis=axis),
        lambda: strategy.run(lambda x: rx.get_replica_context().all_gather(x, axis=axis), (value,)),
    ):
        with pytest.raises(error, match=text):
            attempt()


def test_objects_and_slices_are_not_gathered(strategy):
    slices = rx.IndexedSlices(jnp.ones((1, 3)), jnp.array([0]), (4, 3))
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        strategy.gather(slices, axis=0)
    with pytest.raises(NotImplementedError, match="all_gather does not support IndexedSlices"):
        strategy.run(lambda: rx.get_replica_context().all_gather(slices, axis=0))
    with pytest.raises(TypeError, match='"gather" over replicas'):
        strategy.gather(parts(strategy, lambda i: "a"), axis=0)
    with pytest.raises(TypeError, match='"all_gather" over replicas'):
        strategy.run(lambda: rx.get_replica_context().all_gather("a", axis=0))
    with pytest.raises(NotImplementedError, match="axis=...\\) of IndexedSlices"):
        strategy.reduce("sum", slices, axis=0)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_every_dtype_is_gathered_as_it_is(strategy, dtype):
    value = laid_out(strategy, lambda i: np.full(2, i % 2).astype(jnp.dtype(dtype)))
    expected = np.repeat(np.arange(strategy.num_replicas_in_sync) % 2, 2)

    for result in (
        strategy.gather(value, axis=0),
        strategy.run(lambda x: rx.get_replica_context().all_gather(x, axis=0), (value,)),
    ):
        assert result.dtype == dtype
        np.testing.assert_array_equal(np.asarray(result, np.complex64), expected)


def test_keys_of_random_numbers(strategy):
    n = strategy.num_replicas_in_sync
    keys = laid_out(strategy, lambda i: jax.random.split(jax.random.key(i), 1))

    gathered = strategy.gather(keys, axis=0)

    assert [jax.random.key_data(k).tolist() for k in gathered] == [
        jax.random.key_data(jax.random.split(jax.random.key(i), 1)[0]).tolist() for i in range(n)
    ]


# -- in steps


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("word", ["SUM", "Mean", "min", rx.ReduceOp.MAX], ids=repr)
def test_an_op_may_be_named_in_any_case(eager, word):
    strategy = rx.MirroredStrategy(D[:2], eager=eager)
    expected = {"SUM": 3.0, "MEAN": 1.5, "MIN": 1.0, "MAX": 2.0}[rx.ReduceOp.parse(word).name]
    value = rx.PerReplica((1.0, 2.0))

    assert float(strategy.run(lambda x: rx.get_replica_context().all_reduce(word, x), (value,))) == expected
    assert float(strategy.reduce(word, value)) == expected
    assert float(strategy.extended.reduce_to(word, value, "cpu:1")) == expected


@pytest.mark.parametrize("word", ["prod", None, 3, rx.VariableAggregation.SUM], ids=repr)
def test_what_names_no_op(strategy, word):
    for attempt in (
        lambda: strategy.reduce(word, rx.PerReplica((1.0,) * strategy.num_replicas_in_sync)),
        lambda: strategy.run(lambda: rx.get_replica_context().all_reduce(word, 1.0)),
    ):
        with pytest.raises(ValueError, match="is not a valid ReduceOp"):
            attempt()


def test_a_value_that_stands_where_the_op_belongs_is_named_by_its_type():
    with pytest.raises(ValueError, match=r"^The first argument, of type ndarray, is not a valid ReduceOp"):
        rx.OneDeviceStrategy("cpu:0").reduce(np.arange(100.0), "mean")


def test_a_mirrored_variable_and_the_replicas_number(strategy):
    """All replicas hold 2, and add their number: 2 * N + id."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = rx.Variable(2.0)

    def step():
        context = rx.get_replica_context()
        return context.all_reduce("SUM", v) + context.replica_id_in_sync_group

    results = strategy.experimental_local_results(strategy.run(step))
    assert [float(x) for x in results] == [2.0 * n + i for i in range(n)]
