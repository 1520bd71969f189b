"""The algorithms that add up values of towers, by themselves and in a strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.compat import tower

D0, D1, D2 = jax.devices()[:3]
SUM, MEAN = tower.VariableAggregation.SUM, tower.VariableAggregation.MEAN

OPS = {
    "one-device": tower.ReductionToOneDeviceCrossTowerOps,
    "on-a-device": lambda: tower.ReductionToOneDeviceCrossTowerOps("cpu:2", accumulation_fn=sum),
    "nccl": tower.AllReduceCrossTowerOps,
    "packs": lambda: tower.AllReduceCrossTowerOps("nccl", num_packs=4),
    "small-grads": lambda: tower.AllReduceCrossTowerOps("nccl", 0, agg_small_grads_max_bytes=64),
    "hierarchical": lambda: tower.AllReduceCrossTowerOps("hierarchical_copy", num_packs=2),
}


@pytest.fixture(params=OPS.values(), ids=OPS.keys())
def ops(request):
    return request.param()


def values(start, shape=()):
    return tower.PerDevice(tuple(jax.device_put(jnp.full(shape, start + i), d) for i, d in enumerate((D0, D1))))


DESTINATIONS = {"nothing": (None, {D0, D1}), "a-word": ("cpu:0", {D0}), "a-list": ([D1, D2], {D1, D2})}


@pytest.mark.parametrize(("destinations", "devices"), DESTINATIONS.values(), ids=DESTINATIONS.keys())
def test_sums_and_means(ops, destinations, devices):
    total, mean = ops.reduce(SUM, values(0.0), destinations), ops.reduce("mean", values(1.0), destinations)

    assert (float(total), float(mean)) == (1.0, 1.5)
    assert total.devices() == mean.devices() == devices


def test_many_at_once(ops):
    first, second, third = ops.batch_reduce(
        MEAN, [(values(0.0, (3,)), None), (values(1.0, (2, 2)), "cpu:0"), (values(2.0), [D0, D1])]
    )

    np.testing.assert_array_equal(first, [0.5] * 3)
    np.testing.assert_array_equal(second, [[1.5] * 2] * 2)
    assert third == 2.5
    assert [x.devices() for x in (first, second, third)] == [{D0, D1}, {D0}, {D0, D1}]
    assert ops.batch_reduce(MEAN, []) == []


def test_a_broadcast(ops):
    copy = ops.broadcast(jnp.ones(2), [D0, D2])

    assert copy.devices() == {D0, D2}


def test_sparse_rows(ops):
    value = tower.PerDevice(
        (
            rx.IndexedSlices(jnp.array([[1.0, 2.0]]), jnp.array([1]), (5, 2)),
            rx.IndexedSlices(jnp.array([[3.0, 4.0], [5.0, 6.0]]), jnp.array([1, 3]), (5, 2)),
        )
    )

    total, mean = ops.reduce(SUM, value, "cpu:0").to_dense(), ops.reduce(MEAN, value, "cpu:0").to_dense()

    np.testing.assert_array_equal(total[jnp.array([1, 3])], [[4, 6], [5, 6]])
    np.testing.assert_array_equal(mean[jnp.array([1, 3])], [[2, 3], [2.5, 3]])
    assert float(total.sum()) == 21.0


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ops.reduce(tower.VariableAggregation.NONE, values(0.0), "cpu:0"),
        lambda ops: ops.reduce(tower.VariableAggregation.ONLY_FIRST_TOWER, values(0.0), "cpu:0"),
        lambda ops: ops.reduce(SUM, [1.0, 2.0], "cpu:0"),
        lambda ops: ops.reduce(SUM, values(0.0), 3),
        lambda ops: ops.reduce(SUM, values(0.0), ""),
        lambda ops: ops.reduce(SUM, values(0.0), []),
        lambda ops: ops.batch_reduce(SUM, [[values(0.0), "cpu:0"]]),
        lambda ops: ops.batch_reduce(SUM, [values(0.0)]),
    ],
    ids=["no-method", "first-tower", "a-list", "no-device", "empty-word", "empty-list", "a-pair-as-a-list", "no-pair"],
)
def test_what_cannot_be_reduced_is_refused(ops, call):
    with pytest.raises(ValueError):
        call(ops)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tower.AllReduceCrossTowerOps(None), "all_reduce_alg=None"),
        (lambda: tower.AllReduceCrossTowerOps(num_packs=1.5), "num_packs=1.5"),
        (lambda: tower.AllReduceCrossTowerOps(num_packs=-1), "num_packs=-1"),
        (lambda: tower.AllReduceCrossTowerOps(agg_small_grads_max_group=-1), "agg_small_grads_max_group=-1"),
        (lambda: tower.AllReduceCrossTowerOps(agg_small_grads_max_bytes="1"), "agg_small_grads_max_bytes='1'"),
        (lambda: tower.ReductionToOneDeviceCrossTowerOps(accumulation_fn="add_n"), "accumulation_fn='add_n'"),
    ],
    ids=["algorithm", "packs", "fewer-than-none", "group", "bytes", "accumulation"],
)
def test_arguments_that_make_no_sense_are_named(make, word):
    with pytest.raises((ValueError, TypeError), match=word):
        make()


def test_what_map_returned_counts_by_item(ops):
    mapped = tower.PerDevice((tower.MapOutput([1.0, 2.0]), tower.MapOutput([6.0])))

    assert ops.reduce(SUM, mapped, "cpu:0") == 9.0
    assert ops.reduce(MEAN, mapped, "cpu:0") == 3.0


def test_a_strategy_uses_them(ops):
    distribution = tower.MirroredStrategy([D0, D1], cross_tower_ops=ops)

    def merge_fn(distribution, x):
        return distribution.reduce("mean", x)

    with distribution.scope():
        inside = distribution.call_for_each_tower(
            lambda x: tower.get_tower_context().merge_call(merge_fn, x), tower.PerDevice((1.0, 2.0))
        )
        outside = distribution.reduce("sum", tower.PerDevice((1.0, 2.0)))

    assert (float(inside), float(outside)) == (1.5, 3.0)


class Largest(tower.CrossTowerOps):
    def __init__(self):
        super().__init__()
        self.asked = []

    def _reduce(self, aggregation, per_device_value, destinations):
        self.asked.append(aggregation)
        return jnp.stack(list(per_device_value.values)).max(0)


def test_hooks_of_ones_own_are_asked_everywhere():
    ops = Largest()
    distribution = tower.MirroredStrategy([D0, D1], cross_tower_ops=ops)

    def merge_fn(distribution, x):
        return distribution.reduce("sum", x)

    with distribution.scope():
        assert distribution.reduce("mean", tower.PerDevice((1.0, 5.0))) == 5.0
        assert distribution.call_for_each_tower(
            lambda x: tower.get_tower_context().merge_call(merge_fn, x), tower.PerDevice((1.0, 5.0))
        ) == 5.0  # fmt: skip
    assert MEAN in ops.asked and SUM in ops.asked


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("base", [tower.ReductionToOneDeviceCrossTowerOps, tower.AllReduceCrossTowerOps])
def test_an_algorithm_may_be_listened_to(base, eager):
    class Listening(base):
        asked = []

        def _reduce(self, aggregation, per_device_value, destinations):
            self.asked.append(aggregation)
            return super()._reduce(aggregation, per_device_value, destinations)

    distribution = tower.MirroredStrategy([D0, D1], cross_tower_ops=Listening(), eager=eager)

    def merge_fn(distribution, x):
        return distribution.batch_reduce("mean", [(x, None), (x, "cpu:0")])

    with distribution.scope():
        value = tower.PerDevice((1.0, 5.0))
        assert distribution.reduce("sum", value) == 6.0
        assert distribution.reduce("max", value) == 5.0
        inside = distribution.call_for_each_tower(lambda x: tower.get_tower_context().merge_call(merge_fn, x), value)

    assert [float(x) for x in inside] == [3.0, 3.0]
    assert Listening.asked[:2] == [SUM, rx.ReduceOp.MAX] and set(Listening.asked[2:]) == {MEAN}


def test_the_base_class_says_what_to_fill_in():
    with pytest.raises(NotImplementedError, match="_reduce"):
        tower.CrossTowerOps().reduce("sum", values(0.0), "cpu:0")
