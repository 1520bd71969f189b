"""Every way of adding up over replicas gives what NumPy gives, in steps and on the host, with the same derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import replicax as rx
from replicax import _host
from replicax._cross import algorithms, packing
from replicax._cross.packing import Packing
from replicax._placement import place

SUM, MEAN, MIN, MAX = rx.ReduceOp.SUM, rx.ReduceOp.MEAN, rx.ReduceOp.MIN, rx.ReduceOp.MAX
D = jax.devices()


class Hooked(rx.CrossDeviceOps):
    """An op as a user would write it: hooks over the components, in NumPy's words."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls.append(reduce_op)
        values = jnp.stack(per_replica_value.values)
        combine = {SUM: jnp.sum, MEAN: jnp.mean, MIN: jnp.min, MAX: jnp.max}[reduce_op]
        return self.broadcast(combine(values, 0).astype(values.dtype), destinations)


OPS = {
    "nccl": rx.NcclAllReduce,
    "nccl-unpacked": lambda: rx.NcclAllReduce(num_packs=0),
    "nccl-3-packs": lambda: rx.NcclAllReduce(num_packs=3),
    "hierarchical": rx.HierarchicalCopyAllReduce,
    "one-device": rx.ReductionToOneDevice,
    "one-device-fn": lambda: rx.ReductionToOneDevice(accumulation_fn=functools.partial(functools.reduce, jnp.add)),
    "hooks": Hooked,
}

# One op of each kind, for tests where the details of packing do not matter.
KINDS = {name: OPS[name] for name in ("nccl", "hierarchical", "one-device", "hooks")}


@pytest.fixture(params=OPS.values(), ids=OPS.keys())
def ops(request):
    return request.param()


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request):
    return request.param()


def mirrored(replicas, ops=None, **options):
    return rx.MirroredStrategy(D[:replicas], cross_device_ops=ops, **options)


def per_device(values, devices=None):
    """One value per device, each on its own."""
    return rx.PerReplica(tuple(jax.device_put(jnp.asarray(v), d) for v, d in zip(values, devices or D, strict=False)))


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def equal_copies(array):
    first, *others = [np.asarray(shard.data) for shard in array.addressable_shards]
    return all(same_bits(first, other) for other in others)


# -- standalone, on values of the host


def destinations(name):
    """What a result may be sent to, and the devices that stand for it."""
    if name == "variable":
        with mirrored(2).scope():
            return rx.Variable(0.0), D[:2]
    if name == "laid out":
        return mirrored(2).run(lambda: rx.get_replica_context().replica_id_in_sync_group), D[:2]
    return {
        "value": (per_device([0.0, 0.0]), D[:2]),
        "array": (jax.device_put(jnp.ones(3), D[1]), D[1:2]),
        "word": ("CPU:0", D[:1]),
        "device": (D[2], D[2:3]),
        "list": (["cpu:0", D[1]], D[:2]),
        "slices": (rx.IndexedSlices(jax.device_put(jnp.ones(1), D[1]), jnp.zeros(1, jnp.int32)), D[1:2]),
    }[name]


DESTINATIONS = ["variable", "laid out", "value", "array", "word", "device", "list", "slices"]


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_reduce_puts_the_result_on_the_devices_of_its_destination(ops, destination):
    where, devices = destinations(destination)
    first, second = per_device([0.0, 1.0]), per_device([1.0, 2.0])

    results = [ops.reduce(op, value, where) for op in (MEAN, SUM) for value in (first, second)]

    assert [float(x) for x in results] == [0.5, 1.5, 1.0, 3.0]
    assert all(x.devices() == set(devices) and x.is_fully_replicated for x in results)


@pytest.mark.parametrize("first", DESTINATIONS)
@pytest.mark.parametrize("second", DESTINATIONS)
def test_batch_reduce_treats_each_pair_by_its_own_destination(first, second):
    pairs = [(per_device([0.0, 1.0]), destinations(first)[0]), (per_device([1.0, 2.0]), destinations(second)[0])]

    for ops in (make() for make in KINDS.values()):
        a, b = ops.batch_reduce(MEAN, pairs)
        c, d = ops.batch_reduce(SUM, pairs)

        assert [float(x) for x in (a, b, c, d)] == [0.5, 1.5, 1.0, 3.0]
        assert (a.devices(), b.devices()) == (set(destinations(first)[1]), set(destinations(second)[1]))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_values_0_to_n(ops, n):
    value = per_device(range(n))
    batch = [(value, value), (per_device(range(1, n + 1)), "cpu:0")]

    assert float(ops.reduce(MEAN, per_device(np.arange(n, dtype=np.float32)), value)) == (n - 1) / 2
    assert [int(x) for x in ops.batch_reduce(SUM, batch)] == [n * (n - 1) // 2, n * (n + 1) // 2]
    assert [int(ops.reduce(op, value, "cpu:1")) for op in (MIN, MAX)] == [0, n - 1]


def test_what_a_step_returned_is_reduced_where_it_lies(ops):
    strategy = mirrored(4)
    ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    rows = strategy.run(lambda i: i * jnp.ones((2, 3)), (ids,))

    total, mean = ops.batch_reduce(SUM, [(ids, ids), (rows, rows)])

    assert int(total) == 6
    np.testing.assert_array_equal(mean, np.full((2, 3), 6.0))
    assert mean.devices() == set(D[:4])
    np.testing.assert_array_equal(ops.reduce(MEAN, rows, D[7]), np.full((2, 3), 1.5))


def test_a_mirrored_variable_is_a_value_on_each_of_its_devices(ops):
    with mirrored(2).scope():
        v = rx.Variable(1.0)

    mean = ops.reduce(MEAN, v, v)

    assert isinstance(mean, jax.Array)
    assert [float(shard.data) for shard in mean.addressable_shards] == [1.0, 1.0]
    assert float(ops.reduce(SUM, v, v)) == 2.0
    assert float(ops.reduce(SUM, v.value, "cpu:0")) == 2.0, "an array with two copies counts like the variable"


def test_a_single_array_is_the_value_of_one_replica(ops):
    result = ops.reduce(SUM, 3.0, D[1])

    assert float(result) == 3.0
    assert result.devices() == {D[1]}


def test_components_that_lie_nowhere_in_particular(ops):
    value = rx.PerReplica((1, 2.5, np.float32(3)))

    assert float(ops.reduce(SUM, value, value)) == 6.5


@pytest.mark.parametrize("word", ["SUM", "sum", "mean", rx.VariableAggregation.SUM, None])
def test_ops_take_no_words(ops, word):
    with pytest.raises(ValueError, match="`reduce_op` must be Reduce.SUM or Reduce.MEAN"):
        ops.reduce(word, per_device([1.0, 2.0]), "cpu:0")
    with pytest.raises(ValueError, match="`reduce_op` must be Reduce.SUM or Reduce.MEAN"):
        ops.batch_reduce(word, [(per_device([1.0, 2.0]), "cpu:0")])


@pytest.mark.parametrize(
    ("where", "match"),
    [(3, "must be one of"), ("", "can not be empty"), ([], "can not be empty"), (None, "must be"), ([3], "one of")],
)
def test_destinations_have_devices(ops, where, match):
    for attempt in (
        lambda: ops.reduce(SUM, per_device([1.0, 2.0]), where),
        lambda: ops.batch_reduce(SUM, [(per_device([1.0, 2.0]), where)]),
        lambda: ops.broadcast(1.0, where),
        lambda: ops.gather(per_device([[1.0], [2.0]]), where, axis=0),
    ):
        with pytest.raises(ValueError, match=match):
            attempt()


@pytest.mark.parametrize(
    ("pair", "rule"),
    [(["value", "cpu:0"], "should be a tuple."), (("value",), "should be a tuple of size 2."), (3, "should be a tupl")],
)
def test_batch_reduce_takes_pairs(ops, pair, rule):
    with pytest.raises(ValueError, match=f"Each element of `value_destination_pairs` {rule}"):
        ops.batch_reduce(SUM, [pair])


def test_an_empty_batch_is_empty(ops):
    assert ops.batch_reduce(SUM, []) == []


@pytest.mark.parametrize("value", [[1.0, 2.0], (1.0, 2.0), "12"])
def test_a_list_might_be_one_value_or_many(ops, value):
    with pytest.raises(ValueError, match="rx.PerReplica"):
        ops.reduce(SUM, value, "cpu:0")


def test_what_cannot_be_combined():
    ops = rx.ReductionToOneDevice()

    with pytest.raises(TypeError, match="object"):
        ops.reduce(SUM, rx.PerReplica((object(), object())), "cpu:0")
    with pytest.raises(TypeError, match="key"):
        ops.reduce(SUM, rx.PerReplica((jax.random.key(0), jax.random.key(1))), "cpu:0")
    with pytest.raises(TypeError, match="no order"):
        ops.reduce(MAX, rx.PerReplica((1j, 2j)), "cpu:0")
    with pytest.raises(ValueError, match=r"float32\[3\]"):
        ops.reduce(SUM, rx.PerReplica((jnp.ones(2), jnp.ones(3))), "cpu:0")


def test_the_base_class_says_which_hook_is_missing():
    ops = rx.CrossDeviceOps()
    value = per_device([1.0, 2.0])

    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        ops.reduce(SUM, value, value)
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        ops.batch_reduce(SUM, [(value, value)])


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_broadcast_copies_to_every_device(ops, destination):
    where, devices = destinations(destination)

    copy = ops.broadcast(jnp.arange(3), where)

    assert copy.devices() == set(devices) and copy.is_fully_replicated
    assert ops.broadcast(1.0, where).tolist() == 1.0


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (lambda ops: ops.broadcast(rx.PerReplica((1.0, 2.0)), "cpu:0"), TypeError, "broadcast of a value that differs"),
        (lambda ops: ops.broadcast("a", "cpu:0"), TypeError, '"broadcast" over replicas'),
        (lambda ops: ops.reduce(rx.ReduceOp.SUM, None, "cpu:0"), ValueError, "A NoneType was given"),
        (lambda ops: ops.reduce(rx.ReduceOp.SUM, rx.PerReplica(()), "cpu:0"), ValueError, "of no replicas"),
        (lambda ops: ops.batch_reduce(rx.ReduceOp.SUM, 3), ValueError, "should be a list of tuples"),
    ],
    ids=["value-per-replica", "text", "none", "no-components", "no-pairs"],
)
def test_what_an_op_does_not_take(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt(rx.NcclAllReduce())


def test_a_device_named_twice_gets_one_copy(ops):
    total = ops.reduce(rx.ReduceOp.SUM, rx.PerReplica((1.0, 2.0)), ["cpu:1", "/cpu:1"])

    assert total == 3.0 and total.devices() == {jax.devices()[1]}


def test_gather_concatenates_where_it_is_told(ops):
    ragged = per_device([jnp.ones((2, 1)), jnp.zeros((1, 1))])
    laid_out = mirrored(2).run(lambda: jnp.full((1, 2), rx.get_replica_context().replica_id_in_sync_group))

    np.testing.assert_array_equal(ops.gather(ragged, "cpu:3", axis=0), [[1], [1], [0]])
    np.testing.assert_array_equal(ops.gather(laid_out, laid_out, axis=-1), [[0, 0, 1, 1]])
    with pytest.raises(ValueError, match="Shape mismatch"):
        ops.gather(ragged, "cpu:0", axis=1)
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        ops.gather(rx.PerReplica((slices([1], [[1.0]]), slices([0], [[1.0]]))), "cpu:0", axis=0)


def test_num_packs_cannot_be_negative():
    for make in (rx.NcclAllReduce, rx.HierarchicalCopyAllReduce):
        with pytest.raises(ValueError, match=f"{make.__name__}.*cannot be negative"):
            make(num_packs=-1)


def test_reduce_to_device_is_where_the_sum_is_made():
    where = []

    def accumulate(arrays):
        where.extend(arrays)
        return sum(arrays)

    ops = rx.ReductionToOneDevice("cpu:3", accumulation_fn=accumulate)
    result = ops.reduce(MEAN, per_device([1.0, 2.0]), "cpu:1")

    assert float(result) == 1.5
    assert result.devices() == {D[1]}
    assert len(where) == 2


# -- slices


def slices(indices, values, dense_shape=(5, 2)):
    return rx.IndexedSlices(jnp.asarray(values), jnp.asarray(indices), dense_shape)


T0, T1 = slices([1], [[1.0, 2.0]]), slices([1, 3], [[3.0, 4.0], [5.0, 6.0]])
EXPECTED = {SUM: {1: [4.0, 6.0], 3: [5.0, 6.0]}, MEAN: {1: [2.0, 3.0], 3: [2.5, 3.0]}}


def check_slices(result, op):
    dense = np.zeros((5, 2))
    for row, values in EXPECTED[op].items():
        dense[row] = values
    assert np.asarray(result.indices).tolist() == [1, 1, 3], "an index that occurs twice stays twice"
    assert result.dense_shape == (5, 2)
    np.testing.assert_array_equal(result.to_dense(), dense)


@pytest.mark.parametrize("op", [SUM, MEAN])
def test_slices_are_laid_one_after_the_other(op):
    for ops in (make() for name, make in OPS.items() if name != "hooks"):
        value = rx.PerReplica((jax.device_put(T0, D[0]), jax.device_put(T1, D[1])))

        check_slices(ops.reduce(op, value, "cpu:0"), op)
        both = ops.batch_reduce(op, [(value, value), (value, D[3])])
        for result in both:
            check_slices(result, op)
        assert both[1].values.devices() == both[1].indices.devices() == {D[3]}
        check_slices(mirrored(2, ops).reduce(op, value), op)


def test_slices_beside_a_dense_component_make_slices():
    result = rx.NcclAllReduce().reduce(SUM, rx.PerReplica((jnp.ones((5, 2)), T1)), "cpu:0")

    np.testing.assert_array_equal(result.to_dense(), 1 + np.asarray(T1.to_dense()))


def test_slices_of_a_step(kind):
    strategy = mirrored(3, kind)

    def step(x):
        row = jnp.reshape(x.astype(jnp.int32), 1)
        gradient = slices(row, jnp.stack([x, x])[None])
        dense, sparse = rx.get_replica_context().all_reduce("mean", (x, gradient))
        return dense, sparse, gradient

    dense, sparse, gradient = strategy.run(step, (rx.PerReplica((3.0, 0.0, 3.0)),))

    assert float(dense) == 2.0
    assert sparse.dense_shape == (5, 2)
    assert sparse.indices.tolist() == [3, 0, 3]
    np.testing.assert_array_equal(sparse.values, [[1, 1], [0, 0], [1, 1]])
    outside = strategy.reduce("mean", gradient)
    np.testing.assert_array_equal(outside.to_dense(), sparse.to_dense())
    mixed = rx.IndexedSlices(gradient.values, jnp.array([2]), (5, 2))  # the same row everywhere
    np.testing.assert_array_equal(strategy.reduce("sum", mixed).to_dense()[2], [6, 6])


def test_the_mean_of_one_row_twice():
    strategy = mirrored(2)

    def step(x):
        return rx.get_replica_context().all_reduce("mean", rx.IndexedSlices(jnp.reshape(x, (1, 1)), jnp.zeros(1, int)))

    result = strategy.run(step, (rx.PerReplica((1.0, 2.0)),))

    assert result.indices.tolist() == [0, 0]
    assert result.values.tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize("op", ["min", "max"])
def test_slices_have_no_smallest(op):
    with pytest.raises(NotImplementedError, match="to_dense"):
        mirrored(2).run(lambda: rx.get_replica_context().all_reduce(op, T0))
    with pytest.raises(NotImplementedError, match="to_dense"):
        mirrored(2).reduce(op, rx.PerReplica((T0, T1)))


# -- in steps: any tree, any dtype, any number of replicas

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "complex64"]
SHAPES = [(), (1,), (0,), (3,), (4, 2), (2, 0, 3), (5, 7, 2)]
trees = st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=6)


def component(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 2 if dtype == "bool" else 10, shape)
    return np.asarray(whole, jnp.dtype(dtype))


def combined(op, parts):
    """What NumPy makes of the components, and in which dtype it should come back."""
    stack, dtype = np.stack(parts), parts[0].dtype
    wide = stack.astype(np.complex128 if dtype == np.complex64 else np.float64)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    if op is SUM:
        return wide.sum(0), (np.dtype("int32") if dtype.kind == "b" else dtype)
    if op is MEAN:
        return wide.mean(0), (dtype if inexact else np.dtype("float32"))
    return (wide.real.min(0) if op is MIN else wide.real.max(0)), dtype


def tolerance(dtype):
    return {"bfloat16": 1e-2, "float16": 1e-3}.get(str(dtype), 1e-6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(OPS)), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([SUM, MEAN, MIN, MAX]), trees)
def test_every_op_agrees_with_numpy(name, replicas, op, tree):
    if op in (MIN, MAX):
        tree = [(dtype, shape) for dtype, shape in tree if dtype != "complex64"]
    strategy = mirrored(replicas, OPS[name]())
    columns = [[component(dtype, shape, 10 * k + r) for r in range(replicas)] for k, (dtype, shape) in enumerate(tree)]
    values = [strategy.experimental_distribute_values_from_function(
        lambda c, column=column: column[c.replica_id_in_sync_group]) for column in columns]  # fmt: skip

    inside = strategy.run(lambda values: rx.get_replica_context().all_reduce(op, values), (values,))
    outside = strategy.reduce(op, values) if replicas > 1 else inside

    for a, b, column in zip(inside, outside, columns, strict=True):
        expected, dtype = combined(op, column)
        for result in (a, b):
            assert isinstance(result, jax.Array) and result.dtype == dtype and equal_copies(result)
            np.testing.assert_allclose(np.asarray(result, expected.dtype), expected, rtol=tolerance(dtype))


LARGE = [1_000_003, 2**18, 65_537, 40_000, 100]


@pytest.mark.parametrize("keeps_buffers", [True, False], ids=["tuned", "untuned"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_large_arrays_take_other_roads_to_the_same_sums(kind, replicas, keeps_buffers, monkeypatch):
    monkeypatch.setattr(_host, "keeps_buffers", lambda: keeps_buffers)
    strategy = mirrored(replicas, kind)
    parts = [[component("float32", (n,), n + r) for r in range(replicas)] for n in LARGE]
    values = [rx.PerReplica(tuple(column)) for column in parts]

    sums = strategy.run(lambda values: rx.get_replica_context().all_reduce("sum", values), (values,))

    for column, result in zip(parts, sums, strict=True):
        np.testing.assert_array_equal(result, np.sum(column, 0))
        assert equal_copies(result)


def collectives(strategy, step, *args):
    text, names = strategy.lower(step, args).as_text(), ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    return {name: text.count(f'stablehlo.{name}"') for name in names}


def all_reduce_all(arrays):
    return rx.get_replica_context().all_reduce("sum", arrays)


def one_each(sizes, replicas=2):
    return [rx.PerReplica(tuple(np.zeros(n, np.float32) for _ in range(replicas))) for n in sizes]


def test_what_travels_together(monkeypatch):
    monkeypatch.setattr(_host, "keeps_buffers", lambda: True)
    small, large = [100] * 50, [packing.SMALL_BYTES]

    count = lambda ops, sizes: collectives(mirrored(2, ops), all_reduce_all, one_each(sizes))  # noqa: E731

    assert count(rx.NcclAllReduce(), small + large)["all_reduce"] == 2
    assert count(rx.NcclAllReduce(num_packs=0), small)["all_reduce"] == 50
    assert count(rx.NcclAllReduce(num_packs=7), small)["all_reduce"] == 7
    assert count(rx.ReductionToOneDevice(), small + large) == {
        "all_reduce": 0, "reduce_scatter": 0, "all_gather": 2, "all_to_all": 1
    }  # fmt: skip


def test_large_arrays_are_halved_only_where_buffers_are_given_back(monkeypatch):
    strategy, value = mirrored(2), one_each([algorithms.SCATTER_BYTES // 4])
    monkeypatch.setattr(_host, "keeps_buffers", lambda: False)
    untuned = collectives(strategy, lambda x: all_reduce_all(x), value)
    monkeypatch.setattr(_host, "keeps_buffers", lambda: True)
    tuned = collectives(mirrored(2), lambda x: all_reduce_all(x), value)

    assert untuned == {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 0}
    assert tuned == {"all_reduce": 1, "reduce_scatter": 0, "all_gather": 0, "all_to_all": 0}


def test_bytes_per_pack_of_a_call_beats_the_strategy():
    options = rx.CommunicationOptions(bytes_per_pack=200)
    values = one_each([32, 8, 200, 1])  # 128, 32, 800 and 4 bytes

    def step(values):
        return rx.get_replica_context().all_reduce("sum", values, options=options)

    assert collectives(mirrored(2), step, values)["all_reduce"] == 2


def test_one_replica_needs_no_exchange(kind):
    if not isinstance(kind, Hooked):
        text = mirrored(1, kind).lower(all_reduce_all, (one_each([10, 10], 1),)).compile().as_text()
        assert "concatenate" not in text


def test_replicas_of_several_devices(kind):
    strategy = rx.MirroredStrategy(D[:4], cross_device_ops=kind, replica_mesh={"model": 2})

    def step(x):
        both = {"x": x, "half": x.astype(jnp.bfloat16)}
        return [rx.get_replica_context().all_reduce(op, both) for op in ("sum", "mean", "min", "max")]

    results = strategy.run(step, (rx.PerReplica((jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0]))),))

    for result, expected in zip(results, ([4, 8], [2, 4], [1, 2], [3, 6]), strict=True):
        assert result["x"].tolist() == result["half"].astype(float).tolist() == expected


# -- groups of the two-level sum


@pytest.mark.parametrize(
    ("replicas", "inside"),
    [(1, [[0]]), (2, [[0, 1]]), (3, [[0, 1, 2]]), (4, [[0, 1], [2, 3]]), (6, [[0, 1, 2], [3, 4, 5]])],
)
def test_groups_of_about_half(replicas, inside):
    assert algorithms.groups(place(D[:replicas]))[0] == inside


def test_each_second_group_takes_one_of_each_first():
    inside, across = algorithms.groups(place(D))

    assert all(len(set(group) & set(members)) == 1 for group in inside for members in across)


def test_two_levels_in_the_program():
    text = mirrored(4, rx.HierarchicalCopyAllReduce()).lower(all_reduce_all, (one_each([8], 4),)).as_text()

    assert "[[0, 1], [2, 3]]" in text and "[[0, 2], [1, 3]]" in text


# -- the same bits


def noisy(dtype, replicas):
    """Values whose sum depends on the order, in arrays small and large."""
    rng = np.random.default_rng(0)
    return [
        [np.asarray(rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n), jnp.dtype(dtype)) for _ in range(replicas)]
        for n in (7, 1001, algorithms.EXCHANGE_BYTES + 5)
    ]


@pytest.mark.parametrize("op", [SUM, MEAN])
@pytest.mark.parametrize(
    ("dtype", "replicas"), [*(("float32", n) for n in (2, 3, 5, 8)), ("bfloat16", 5), ("float16", 5)]
)
def test_one_device_gives_the_same_bits_everywhere(dtype, replicas, op):
    columns = noisy(dtype, replicas)
    ops = rx.ReductionToOneDevice()
    strategy, eager = mirrored(replicas, ops), mirrored(replicas, ops, eager=True)
    values = [rx.PerReplica(tuple(column)) for column in columns]

    def step(values):
        return rx.get_replica_context().all_reduce(op, values)

    def fused(values):  # what is done with the result must not reach back into it
        reduced = rx.get_replica_context().all_reduce(op, values)
        return reduced, [x * 0.1 + 1 for x in reduced]

    compiled = strategy.run(step, (values,))
    others = {
        "again": strategy.run(step, (values,)),
        "eager": eager.run(step, (values,)),
        "host": strategy.reduce(op, strategy.run(lambda values: [x + 0 for x in values], (values,))),
        "parts": strategy.reduce(op, values),
        "by itself": [ops.reduce(op, value, "cpu:4") for value in values],
        "in a batch": ops.batch_reduce(op, [(per_device(c), per_device(c)) for c in columns]),
        "used further": strategy.run(fused, (values,))[0],
    }

    for i, column in enumerate(columns):
        expected = functools.reduce(np.add, [part.astype(np.float32) for part in column])
        expected = (expected / np.float32(replicas) if op is MEAN else expected).astype(column[0].dtype)
        assert same_bits(compiled[i], expected) and equal_copies(compiled[i])
        assert [name for name, results in others.items() if not same_bits(results[i], expected)] == []


@pytest.mark.parametrize("replicas", [3, 5, 6, 7])
def test_the_mean_of_equal_values_is_that_value(kind, replicas):
    if not isinstance(kind, Hooked):  # which leaves the division to XLA
        values = rx.PerReplica((np.arange(100, dtype=np.float32),) * replicas)

        assert same_bits(mirrored(replicas, kind).reduce("mean", values), np.arange(100, dtype=np.float32))


# -- derivatives


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", lambda c, x: np.full(3, c.sum())),
        ("mean", lambda c, x: np.full(3, c.mean())),
        ("max", lambda c, x: np.where(x == x.max(), c.sum(), 0)),
        ("min", lambda c, x: np.where(x == x.min(), c.sum(), 0)),
    ],
    ids=["sum", "mean", "max", "min"],
)
def test_the_gradient_of_a_reduction_is_the_reduction_of_the_gradients(kind, op, expected):
    c, x = np.array([1.0, 10.0, 100.0], np.float32), np.array([2.0, 5.0, 3.0], np.float32)
    strategy = mirrored(3, kind)

    def step(x, c):
        return jax.grad(lambda x: (rx.get_replica_context().all_reduce(op, {"x": x, "n": 3})["x"] * c).sum())(x)

    gradients = strategy.run(step, (rx.PerReplica(tuple(x)), rx.PerReplica(tuple(c))))

    found = [float(g) for g in strategy.experimental_local_results(gradients)]
    np.testing.assert_allclose(found, expected(c, x), rtol=3e-7)
    if op in ("sum", "mean"):
        assert isinstance(gradients, jax.Array), "equal on all replicas, and known to be"


def test_a_shared_extreme_shares_its_gradient():
    strategy = mirrored(4)
    step = lambda x: jax.grad(lambda x: rx.get_replica_context().all_reduce("max", x))(x)  # noqa: E731

    gradients = strategy.run(step, (rx.PerReplica((1.0, 3.0, 3.0, 2.0)),))

    assert [float(g) for g in gradients.values] == [0, 2, 2, 0]


def test_the_gradient_of_a_gather_is_each_replicas_share():
    """x = [[3], [5]] gathered on axis 1 and multiplied by the replica's number gives [[3], [3]] on two replicas."""
    for replicas in (2, 4):
        strategy = mirrored(replicas)

        def step(x):
            context = rx.get_replica_context()
            c = context.replica_id_in_sync_group + 1.0
            one = jax.grad(lambda x: (context.all_gather(x, axis=1) * c).sum())(x)
            nest = jax.grad(lambda t: sum(y.sum() * c for y in context.all_gather([t[0], [t[1]]], axis=1)[:1]))((x, x))
            return one, nest[0]

        one, nest = strategy.run(step, (jnp.array([[3.0], [5.0]]),))

        total = replicas * (replicas + 1) / 2
        for gradient in (*strategy.experimental_local_results(one), *strategy.experimental_local_results(nest)):
            assert np.asarray(gradient).tolist() == [[total], [total]]


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_every_transformation_of_jax_applies(kind, op):
    strategy = mirrored(2, kind)
    reference = {"sum": sum, "mean": lambda xs: sum(xs) / 2, "max": lambda xs: jnp.maximum(*xs)}
    xs = [jnp.array([1.0, 4.0]), jnp.array([2.0, 3.0])]

    def step(x):
        def f(x):
            return rx.get_replica_context().all_reduce(op, x)

        return {
            "vmap": jax.vmap(f)(jnp.stack([x, 2 * x])),
            "jvp": jax.jvp(f, (x,), (jnp.ones(2),))[1],
            "jacobian": jax.jacfwd(f)(x),
            "hessian": jax.hessian(lambda x: (f(x) ** 2).sum())(x),
            "remat": jax.grad(jax.checkpoint(lambda x: (f(x) ** 2).sum()))(x),
            "scan": lax.scan(lambda c, _: (f(c) / 2, f(c)), x, None, length=1)[1][0],
        }

    out = strategy.run(step, (rx.PerReplica(tuple(xs)),))
    y = reference[op](xs)

    def mine(name):
        return [np.asarray(v) for v in strategy.experimental_local_results(out[name])]

    np.testing.assert_allclose(mine("vmap")[0], jnp.stack([y, 2 * y]))
    np.testing.assert_allclose(mine("scan")[0], y)
    np.testing.assert_allclose(mine("jvp")[0], reference[op]([jnp.ones(2), jnp.ones(2)]))
    shares = [(x == y) if op == "max" else np.full(2, 1.0 if op == "sum" else 0.5) for x in xs]
    upstream = {"sum": 2, "mean": 1, "max": 2}[op]  # how often 2y comes back: from both replicas, averaged under a mean
    for i, share in enumerate(np.asarray(s, float) for s in shares):
        expected = 2 * np.asarray(y) * (share * upstream if op == "max" else upstream)
        np.testing.assert_allclose(mine("remat")[i], expected, rtol=1e-6)


# -- hooks of a user


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_hooks_are_called_in_steps_on_the_host_and_line_by_line(eager):
    ops = Hooked()
    strategy = mirrored(3, ops, eager=eager)
    value = rx.PerReplica((1.0, 2.0, 6.0))
    with strategy.scope():
        v = rx.Variable(0.0, aggregation="sum")

    first, second = strategy.run(lambda x: rx.get_replica_context().all_reduce("mean", [x, 2 * x]), (value,))

    assert (float(first), float(second)) == (3.0, 6.0)
    assert set(ops.calls) == {MEAN}
    assert eager or len(ops.calls) == 2, "one call for each leaf, traced once for all replicas"
    ops.calls.clear()
    assert float(strategy.reduce("max", value)) == 6.0
    assert ops.calls == [MAX]
    strategy.run(lambda x: v.assign_add(x), (value,))
    assert float(v.value) == 9.0


def test_a_hook_over_one_of_ours_is_called_in_steps_as_well():
    class Counting(rx.ReductionToOneDevice):
        count = 0

        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            Counting.count += 1
            return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    class Named(rx.NcclAllReduce):
        """Overrides no hook, so that sums travel as they did."""

    assert float(mirrored(2, Counting()).run(all_reduce_all, (rx.PerReplica((1.0, 2.0)),))) == 3.0
    assert Counting.count == 1
    assert "all_reduce" in mirrored(2, Named()).lower(all_reduce_all, (one_each([4]),)).as_text()


def test_a_batch_hook_sees_the_whole_batch():
    class Batched(rx.CrossDeviceOps):
        sizes = []

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            self.sizes.append((len(value_destination_pairs), options.bytes_per_pack))
            return [sum(value.values) for value, _ in value_destination_pairs]

    options = rx.CommunicationOptions(bytes_per_pack=7)
    step = lambda x: rx.get_replica_context().all_reduce("sum", {"a": x, "b": x, "c": x}, options)  # noqa: E731

    assert float(mirrored(2, Batched()).run(step, (rx.PerReplica((1.0, 2.0)),))["b"]) == 3.0
    assert Batched.sizes == [(3, 7)]


def test_a_hook_may_use_another_op_and_reject_outliers():
    class Median(rx.CrossDeviceOps):
        inner = rx.NcclAllReduce()

        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            if reduce_op is MEAN:
                return jnp.median(jnp.stack(per_replica_value.values), 0)
            return self.inner.reduce(reduce_op, per_replica_value, destinations, options)

    for eager in (False, True):
        strategy = mirrored(3, Median(), eager=eager)
        step = lambda x: [rx.get_replica_context().all_reduce(op, x) for op in ("mean", "sum")]  # noqa: E731

        assert [float(x) for x in strategy.run(step, (rx.PerReplica((1.0, 2.0, 600.0)),))] == [2.0, 603.0]


def test_what_a_hook_returns_is_one_value_of_the_same_shape():
    class Wrong(rx.CrossDeviceOps):
        def __init__(self, result):
            self.result = result

        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return self.result(per_replica_value)

    value = rx.PerReplica((1.0, 2.0))
    with pytest.raises(TypeError, match=r"Wrong.reduce_implementation.*one value per replica"):
        mirrored(2, Wrong(lambda value: value)).run(all_reduce_all, (value,))
    with pytest.raises(ValueError, match="another shape"):
        mirrored(2, Wrong(lambda value: jnp.stack(value.values))).run(all_reduce_all, (value,))
    copies = Wrong(lambda value: rx.PerReplica((value.values[1],) * 2))
    assert float(mirrored(2, copies).run(all_reduce_all, (value,))) == 2.0


# -- inside runs


def test_ops_by_themselves_in_a_merge_function(kind):
    def merge(strategy, x):
        assert kind.gather(jax.tree.map(lambda y: y[None], x), x, axis=0).shape == (2,)
        with strategy.scope():
            return [kind.reduce(MEAN, x, x), *kind.batch_reduce(SUM, [(x, "cpu:0"), (v, v)])]

    strategy = mirrored(2, kind)
    with strategy.scope():
        v = rx.Variable(1.0)

    results = strategy.run(lambda x: rx.get_replica_context().merge_call(merge, (x,)), (rx.PerReplica((1.0, 2.0)),))

    assert [float(x) for x in results] == [1.5, 3.0, 2.0]


# -- given to strategies


def test_strategies_take_an_op(kind):
    strategy = mirrored(2, kind)

    assert strategy.cross_device_ops is kind
    assert isinstance(mirrored(2).cross_device_ops, rx.NcclAllReduce)


def test_a_class_or_a_word_is_no_op():
    with pytest.raises(TypeError, match=r"cross_device_ops=ReductionToOneDevice\(\)"):
        mirrored(2, rx.ReductionToOneDevice)
    with pytest.raises(TypeError, match="'nccl'"):
        mirrored(2, "nccl")


def test_small_runs_of_2018_are_a_packing_too():
    algorithm = algorithms.AllReduceAlgorithm(Packing(num_packs=0, small_bytes=64, small_group=2))
    strategy = mirrored(2, _collective(algorithm))

    assert collectives(strategy, all_reduce_all, one_each([4, 4, 4, 100]))["all_reduce"] == 3
    sums = strategy.run(all_reduce_all, ([rx.PerReplica((1.0 * i, 2.0 * i)) for i in range(4)],))
    assert [float(x) for x in sums] == [0, 3, 6, 9]


def _collective(algorithm):
    from replicax._cross.ops import Collective

    return Collective(algorithm)
