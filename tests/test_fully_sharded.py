"""Variables cut over the replicas between steps: a part of the memory, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import replicax as rx

ROWS = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def trained(strategy, steps=10):
    with strategy.scope():
        w = rx.Variable(np.full((16, 64), 0.1, np.float32), name="w")
        bias = rx.Variable(np.zeros(3, np.float32), name="bias")
        optimizer = rx.Optimizer(optax.adam(0.01), gradients="mean")

    def step(x):
        gradients = rx.grad(lambda: ((x @ w.value) ** 2).mean() + (bias.value**2 - bias.value).sum(), [w, bias])()
        optimizer.apply_gradients(zip(gradients, [w, bias], strict=True))

    parts = np.split(ROWS, strategy.num_replicas_in_sync)
    x = strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    for _ in range(steps):
        strategy.run(step, (x,))
    return step, x, w, bias, optimizer


def bytes_per_device(strategy):
    held = {}
    for variable in strategy.made:
        for shard in variable.value.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_numbers_are_those_of_one_device(replicas):
    *_, expected, expected_bias, _ = trained(rx.OneDeviceStrategy("cpu:0"))
    strategy = rx.MirroredStrategy(jax.devices()[:replicas], variables=rx.fully_sharded(min_size=2))

    *_, w, bias, _ = trained(strategy)

    np.testing.assert_allclose(w.numpy(), expected.numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(bias.numpy(), expected_bias.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_device_holds_its_share_of_parameters_and_slots(replicas):
    whole = rx.MirroredStrategy(jax.devices()[:replicas])
    kept_whole = trained(whole)
    cut = rx.MirroredStrategy(jax.devices()[:replicas], variables=rx.fully_sharded())
    kept_cut = trained(cut)

    share = max(bytes_per_device(cut).values()) / max(bytes_per_device(whole).values())

    assert kept_whole[2].shape == kept_cut[2].shape
    assert 1 / replicas <= share < 1.02 / replicas, "the bias and two counts stay whole"


def test_the_largest_even_axis_is_cut_and_small_variables_stay_whole():
    strategy = rx.MirroredStrategy(jax.devices()[:4], variables=rx.fully_sharded(min_size=16))
    with strategy.scope():
        shapes = [(8, 4), (4, 8), (3, 16), (3, 5), (4,), ()]
        layouts = [rx.Variable(np.zeros(shape)).layout for shape in shapes]

    assert layouts == [P("replica"), P(None, "replica"), P(None, "replica"), P(), P(), P()]


@pytest.mark.parametrize("size", [-1, 2.5, None], ids=repr)
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(rx.VariableError, match="a number of elements"):
        rx.fully_sharded(size)


def test_a_variable_may_say_otherwise():
    strategy = rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded(min_size=2))
    with strategy.scope():
        assert rx.Variable(np.zeros(4), layout=P()).layout == P()


def test_every_replica_sees_whole_values_and_the_host_too():
    strategy = rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded(min_size=2))
    with strategy.scope():
        w = rx.Variable(jnp.arange(4.0))

    shape = strategy.run(lambda: jnp.asarray(w.value.shape[0]))

    assert shape == 4
    assert [copy.tolist() for copy in w.values] == [[0, 1, 2, 3]] * 2
    assert [copy.devices() for copy in w.values] == [{device} for device in jax.devices()[:2]]


def test_assignments_from_anywhere_keep_the_layout():
    strategy = rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded(min_size=2))
    with strategy.scope():
        w = rx.Variable(jnp.arange(4.0), aggregation="mean")

    w.assign(np.ones(4))
    with strategy.scope():
        strategy.extended.update(w, lambda w: w.assign_add(np.ones(4)))
    strategy.run(lambda: w.assign_add(jnp.ones(4), read_value=False))

    assert w.numpy().tolist() == [3] * 4
    assert {shard.data.shape for shard in w.value.addressable_shards} == {(2,)}


def test_the_second_step_compiles_nothing(compilations):
    strategy = rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded())
    step, x, *_ = trained(strategy, steps=2)

    with compilations() as names:
        strategy.run(step, (x,))

    assert names == []


def test_slots_alone_are_cut_with_shard_state():
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(np.ones((4, 4), np.float32))
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), gradients="mean", shard_state=True)
        optimizer.build([w])
    (slot,) = (leaf for leaf in jax.tree.leaves(optimizer.state) if isinstance(leaf, rx.Variable))

    assert {shard.data.shape for shard in w.value.addressable_shards} == {(4, 4)}
    assert {shard.data.shape for shard in slot.value.addressable_shards} == {(2, 4)}
