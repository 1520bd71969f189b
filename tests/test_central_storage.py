"""Central storage: variables once, on the parameter device, updated there once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax._run import trace
from replicax.experimental import CentralStorageStrategy

ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def rows_for(strategy):
    parts = np.split(ROWS, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])


def half_of(strategy, step):
    """The half of `step` that its replicas carry out, and the update."""
    (half,) = strategy.programs.get(step)._steps.values()
    return half, half.results[0].static


def trained(strategy, steps=5):
    with strategy.scope():
        w = rx.Variable(np.ones((4, 2), np.float32), name="w")
        count = rx.Variable(0, name="count")
        optimizer = rx.Optimizer(optax.adam(0.1), gradients="mean")

    def step(x):
        loss, gradients = rx.value_and_grad(lambda: ((x @ w.value) ** 2).mean(), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        count.assign_add(1)
        return loss

    x = rows_for(strategy)
    for _ in range(steps):
        strategy.run(step, (x,))
    return step, w, count, optimizer


PLACES = {
    "on a compute device": lambda d: CentralStorageStrategy(d[:2]),
    "on a device of its own": lambda d: CentralStorageStrategy(d[1:5], d[6]),
    "one replica elsewhere": lambda d: CentralStorageStrategy([d[1]], "cpu:0"),
    "one replica, same device": lambda d: CentralStorageStrategy([d[1]]),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_numbers_are_those_of_one_device(place):
    _, expected, _, _ = trained(rx.OneDeviceStrategy("cpu:0"))
    strategy = PLACES[place](jax.devices())

    _, w, count, _ = trained(strategy)

    np.testing.assert_allclose(w.numpy(), expected.numpy(), atol=1e-6)
    assert count.numpy() == 5


def test_variables_and_slots_are_on_the_parameter_device_alone():
    home = jax.devices()[5]
    _, w, count, optimizer = trained(CentralStorageStrategy(jax.devices()[:2], home))

    slots = [leaf for leaf in jax.tree.leaves(optimizer.state) if isinstance(leaf, rx.Variable)]

    assert len(slots) == 3  # two moments and a count
    assert all(variable.devices == (home,) for variable in (w, count, *slots))
    assert [rx.locality(variable) for variable in (w, count)] == ["V", "V"]


def test_replicas_are_sent_only_what_they_read():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    step, w, _, _ = trained(strategy)

    half, update = half_of(strategy, step)

    assert [source.item for source in half.sources if source.kind == trace.VARIABLE] == [w]
    assert half.written == ()
    assert len(update.written) == 5  # the weight, two moments, the optimizer's count, ours


def test_the_update_is_not_repeated_by_the_replicas():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    step, *_ = trained(strategy)

    half, _ = half_of(strategy, step)

    assert "sqrt" not in {eqn.primitive.name for eqn in half.jaxpr.eqns}, "Adam takes a root, the loss does not"


def test_a_result_that_only_the_update_knows_is_mirrored():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(jnp.zeros(4))

    def step(x):
        mean = rx.get_replica_context().all_reduce("mean", x.mean(0))
        return w.assign_add(mean), "a word", x.sum()

    new, word, sums = strategy.run(step, (rows_for(strategy),))

    assert new.devices() == set(jax.devices()[:2])
    np.testing.assert_allclose(new, ROWS.mean(0), atol=1e-6)
    assert word == "a word"
    assert isinstance(sums, rx.PerReplica)


def test_values_handed_out_survive_the_next_update():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(jnp.zeros(4))

    held, returned = w.value, strategy.run(lambda: w.value)
    for _ in range(3):
        strategy.run(lambda: w.assign_add(jnp.ones(4), read_value=False))

    assert w.numpy().tolist() == [3] * 4
    assert held.tolist() == returned.tolist() == [0] * 4


def test_an_on_read_variable_has_a_component_beside_each_replica():
    strategy = CentralStorageStrategy(jax.devices()[1:3], "cpu:0")
    with strategy.scope():
        total = rx.Variable(0.0, synchronization="on_read", aggregation="sum")

    strategy.run(lambda: total.assign_add(rx.get_replica_context().replica_id_in_sync_group + 1.0, read_value=False))

    assert total.numpy() == 3
    assert [component.devices() for component in total.values] == [{device} for device in jax.devices()[1:3]]


def test_assignment_without_aggregation_takes_a_proven_value_and_refuses_another():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(0.0, name="w")

    strategy.run(lambda: w.assign(7.0, read_value=False))
    assert w.numpy() == 7
    with pytest.raises(rx.LocalityError, match="'w'"):
        strategy.run(lambda: w.assign(rx.get_replica_context().replica_id_in_sync_group * 1.0))


def test_writes_in_a_loop_and_prints_stay_with_the_replicas(capfd):
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(0.0)

    def step():
        jax.lax.fori_loop(0, 3, lambda i, carry: (w.assign_add(1.0), carry)[1], 0)
        jax.debug.print("replica {}", rx.get_replica_context().replica_id_in_sync_group)

    strategy.run(step)
    jax.effects_barrier()

    assert w.numpy() == 3
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "replica 0", "replica 1"]


def test_sum_aggregation_counts_every_replica():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(1.0, aggregation="sum")

    strategy.run(lambda x: w.assign_add(x, read_value=False), (rx.PerReplica((1.0, 2.0)),))

    assert w.numpy() == 4


def test_variables_of_another_place_may_be_written():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    beside = rx.Variable(0.0)  # of the default strategy
    with strategy.scope():
        w = rx.Variable(2.0)

    strategy.run(lambda: beside.assign(w.value * 2, read_value=False))

    assert beside.numpy() == 4


def test_several_steps_in_one_program():
    strategy = CentralStorageStrategy(jax.devices()[1:3], "cpu:0")
    with strategy.scope():
        w = rx.Variable(0.0)

    def step(context, x):
        strategy.run(lambda x: w.assign_add(rx.get_replica_context().all_reduce("sum", x.sum())), (x,))

    strategy.run_steps(step, iter(strategy.distribute_dataset([np.ones(4, np.float32)] * 3)), 3)

    assert w.numpy() == 12
    assert w.devices == (jax.devices()[0],)


def test_the_second_step_compiles_nothing(compilations):
    strategy = CentralStorageStrategy(jax.devices()[:2])
    step, *_ = trained(strategy, steps=2)

    with compilations() as names:
        strategy.run(step, (rows_for(strategy),))

    assert names == []


def test_devices_by_default():
    alone = CentralStorageStrategy(["cpu:3"])
    assert alone.extended.parameter_devices == alone.extended.worker_devices == (jax.devices()[3],)

    several = CentralStorageStrategy(["cpu:3", "cpu:4"])
    assert several.extended.parameter_devices == (jax.devices()[0],)
    assert several.extended.worker_devices == tuple(jax.devices()[3:5])
    assert several.extended.experimental_between_graph

    assert CentralStorageStrategy().extended.worker_devices == (jax.devices()[0],)


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(rx.DeviceError, match="cpu:99"):
        CentralStorageStrategy(["cpu:0"], "cpu:99")
    with pytest.raises(rx.DeviceError, match=r"worker.*task:7"):
        CentralStorageStrategy(["cpu:0"], "/job:worker/task:7/cpu:0")
    with pytest.raises(rx.DeviceError, match="CentralStorageStrategy.*more than once"):
        CentralStorageStrategy(["cpu:0", "cpu:0"])
    with pytest.raises(rx.DeviceError, match="takes a list of devices"):
        CentralStorageStrategy("cpu:0")


def test_state_of_no_variable_goes_beside_the_variable_with_the_first_name():
    strategy = CentralStorageStrategy(jax.devices()[:2])
    with strategy.scope():
        b, a = rx.Variable(0.0, name="b"), rx.Variable(0.0, name="a")

    assert strategy.extended.non_slot_devices([b, a]) is a


def test_two_strategies_of_different_size_do_not_meet_in_the_caches_of_jax():
    """Copying a variable is a program that JAX keeps; the first strategy must leave nothing of its mesh in it."""

    def variable_and_step(replicas):
        strategy = CentralStorageStrategy(jax.devices()[1 : 1 + replicas], "cpu:0")
        with strategy.scope():
            w = rx.Variable(np.ones(17, np.float32))
        return w, lambda: strategy.run(lambda: w.assign(w.value * 2.0, read_value=False))

    w, step = variable_and_step(1)
    for _ in range(2):
        step()
        w.numpy()  # whoever holds the array gets a copy of it at the next step
    step()
    other, step = variable_and_step(2)
    other.numpy()
    step()

    assert (w.numpy()[0], other.numpy()[0]) == (8.0, 2.0)
