"""A replica over several devices: parameters partitioned by rules, the numbers of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.compat import tower
from replicax.train import Checkpoint

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(8, 16)).astype(np.float32)
PARAMS = {
    "in/kernel": RANDOM.normal(size=(16, 32)).astype(np.float32) / 8,
    "out/kernel": RANDOM.normal(size=(32, 8)).astype(np.float32) / 8,
    "out/bias": np.zeros(8, np.float32),
}
RULES = rx.partition_rules([("in/kernel", P(None, "model")), ("out/kernel", P("model", None)), (".*", P())])


def grid(replicas, model, **options):
    devices = jax.devices()[: replicas * model]
    return rx.MirroredStrategy(devices, replica_mesh={"model": model}, **options)


def rows_for(strategy):
    parts = np.split(ROWS, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])


def loss_of(params, x):
    hidden = rx.shard(jax.nn.relu(x @ params["in/kernel"]), None, "model")
    return ((hidden @ params["out/kernel"] + params["out/bias"] - 1) ** 2).mean()


def trained(strategy, steps=20):
    with strategy.scope():
        weights = {name: rx.Variable(value, name=name) for name, value in PARAMS.items()}
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), gradients="mean")
        optimizer.build(weights.values())
    listed = list(weights.values())

    def step(x):
        hidden = x @ weights["in/kernel"].value

        def loss():
            return loss_of({name: weight.value for name, weight in weights.items()}, x)

        value, gradients = rx.value_and_grad(loss, listed)()
        optimizer.apply_gradients(zip(gradients, listed, strict=True))
        return value, hidden

    x = rows_for(strategy)
    for _ in range(steps):
        results = strategy.run(step, (x,))
    return step, weights, optimizer, results


@pytest.mark.parametrize(("replicas", "model"), [(2, 2), (1, 2), (2, 4)])
def test_the_numbers_are_those_of_one_device(replicas, model):
    _, expected, _, _ = trained(rx.OneDeviceStrategy("cpu:0"))

    _, weights, _, _ = trained(grid(replicas, model, variables=RULES))

    for name, weight in weights.items():
        exact = expected[name].numpy()
        np.testing.assert_allclose(weight.numpy(), exact, rtol=0, atol=1e-5 * np.abs(exact).max(), err_msg=name)


@pytest.mark.parametrize("model", [2, 4])
def test_each_device_holds_its_part_of_parameters_and_slots(model):
    _, weights, optimizer, _ = trained(grid(2, model, variables=RULES), steps=2)
    slots = [leaf for leaf in jax.tree.leaves(optimizer.state) if isinstance(leaf, rx.Variable) and leaf.ndim == 2]

    assert len(slots) == 2
    for variable in [weights["in/kernel"], weights["out/kernel"], *slots]:
        held = {shard.data.nbytes for shard in variable.value.addressable_shards}
        assert held == {variable.value.nbytes // model}, variable.name


def test_per_replica_results_have_whole_blocks():
    strategy = grid(2, 2, variables=RULES)
    *_, (loss, hidden) = trained(strategy, steps=1)

    assert [value.shape for value in strategy.experimental_local_results(hidden)] == [(4, 32)] * 2
    np.testing.assert_allclose(strategy.gather(hidden, axis=0), ROWS @ PARAMS["in/kernel"], atol=1e-5)
    assert np.ndim(strategy.reduce("mean", loss)) == 0


def test_the_second_step_compiles_nothing(compilations):
    strategy = grid(2, 2, variables=RULES)
    step, *_ = trained(strategy, steps=2)
    x = rows_for(strategy)

    with compilations() as names:
        strategy.run(step, (x,))

    assert names == []


def test_sixteen_bit_gradients_are_reduced():
    strategy = grid(2, 2, variables=RULES)
    with strategy.scope():
        w = rx.Variable(jnp.ones(8, jnp.bfloat16), name="w", layout=P("model"))

    strategy.run(lambda: w.assign(rx.get_replica_context().all_reduce("sum", w.value), read_value=False))

    assert w.numpy().astype(np.float32).tolist() == [2.0] * 8


def test_state_in_and_state_out():
    def step(params, x):
        gradients = rx.get_replica_context().all_reduce("mean", jax.grad(loss_of)(params, x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    ends = []
    for strategy in (rx.OneDeviceStrategy("cpu:0"), grid(2, 2)):
        with strategy.scope():
            params = RULES.place(PARAMS)
        for _ in range(3):
            params = strategy.run(step, (params, rows_for(strategy)))
        ends.append(params)

    for exact, ours in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-6)
    assert ends[1]["in/kernel"].addressable_shards[0].data.shape == (16, 16)


def test_state_keeps_its_layout_from_step_to_step(compilations):
    """XLA alone would cut the bias as well, as it sees fit, and the second call would be another program."""
    strategy = grid(2, 2)
    with strategy.scope():
        state = RULES.place(rx.TrainState.create(PARAMS, optax.adam(0.1)))
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    x = rows_for(strategy)

    def step(state, x):
        value, gradients = jax.value_and_grad(loss_of)(state.params, x)
        return state.apply(rx.get_replica_context().all_reduce("mean", gradients)), value

    state, _ = strategy.run(step, (state, x))
    with compilations() as names:
        state, _ = strategy.run(step, (state, x))

    assert names == []
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before


def test_state_that_was_cut_over_the_replicas_by_hand_stays_cut(compilations):
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    cut = jax.sharding.NamedSharding(strategy.placement.mesh, P("replica"))
    params = {"w": jax.device_put(np.ones(8, np.float32), cut)}

    def step(params, x):
        gradients = jax.grad(lambda p: (p["w"] * x).sum())(params)
        return jax.tree.map(lambda p, g: p - g, params, rx.get_replica_context().all_reduce("mean", gradients))

    params = strategy.run(step, (params, rx.PerReplica((1.0, 3.0))))
    with compilations() as names:
        params = strategy.run(step, (params, rx.PerReplica((1.0, 3.0))))

    assert names == []
    assert [shard.data.tolist() for shard in params["w"].addressable_shards] == [[-3.0] * 4] * 2


def test_the_first_rule_found_in_a_path_decides():
    tree = {"layers": [{"kernel": np.ones((4, 4))}, {"kernel": np.ones((4, 4)), "scale": np.ones(())}]}
    rules = rx.partition_rules([("layers/0/.*", P("model")), ("kernel$", P(None, "model"))])

    assert rules.specs(tree) == {"layers": [{"kernel": P("model")}, {"kernel": P(None, "model"), "scale": P()}]}, (
        "a scalar cannot be cut and needs no rule"
    )
    with grid(1, 2).scope():
        placed = rules.place({"step": 3, "rate": 0.5, "activation": jax.nn.relu})
    assert placed["rate"].devices() == set(jax.devices()[:2]) and placed["activation"] is jax.nn.relu


def test_parameters_without_a_rule_are_listed():
    rules = rx.partition_rules([("in/", P())])

    with pytest.raises(rx.VariableError) as error:
        rules.specs(PARAMS)

    assert "'out/kernel'  [32, 8]" in str(error.value)
    assert "'out/bias'  [8]" in str(error.value)
    assert "'in/'" in str(error.value)


def test_a_variable_without_a_rule_is_refused_where_it_is_made():
    strategy = grid(2, 2, variables=rx.partition_rules([("kernel", P(None, "model"))]))
    with strategy.scope(), pytest.raises(rx.VariableError, match="'bias'"):
        rx.Variable(np.ones(4), name="bias")


def test_rules_hold_in_a_block_and_give_way_to_what_a_variable_says():
    strategy = grid(2, 2)
    with strategy.scope():
        with rx.partition_rules([(".*", P("model"))]):
            cut = rx.Variable(np.ones(4), name="cut")
            whole = rx.Variable(np.ones(4), name="whole", layout=P())
        after = rx.Variable(np.ones(4), name="after")

    assert [v.layout for v in (cut, whole, after)] == [P("model"), P(), None]


def test_axes_that_do_not_divide_are_refused_with_the_numbers():
    with grid(2, 2).scope(), pytest.raises(rx.VariableError, match=re.escape("3 = 2 x 1 + 1 left over")):
        rx.Variable(np.ones((2, 3)), name="w", layout=P(None, "model"))


def test_more_entries_than_axes_are_refused():
    with grid(2, 2).scope(), pytest.raises(rx.VariableError, match=re.escape("2 entries, shape [4]")):
        rx.Variable(np.ones(4), name="w", layout=P(None, "model"))


def test_a_misspelt_axis_is_refused_where_there_are_axes_and_ignored_where_there_are_none():
    with grid(2, 2).scope(), pytest.raises(rx.VariableError, match="'modle'"):
        rx.Variable(np.ones(4), name="w", layout=P("modle"))
    with rx.MirroredStrategy(jax.devices()[:2]).scope():
        assert rx.Variable(np.ones(4), layout=P("model")).layout == P()


def test_shard_does_nothing_where_there_is_no_axis():
    x = jnp.ones((2, 4))

    assert rx.shard(x, None, "model") is x
    assert rx.MirroredStrategy(jax.devices()[:2]).run(lambda: rx.shard(x, None, "model").sum()) == 8


@pytest.mark.parametrize(("axes", "found"), [(("replica",), "'replica'"), (("model",), "left over")])
def test_shard_refuses_what_cannot_be(axes, found):
    with pytest.raises(rx.VariableError, match=found):
        grid(2, 2).run(lambda: rx.shard(jnp.ones(3), *axes))


def test_devices_that_do_not_make_replicas_are_refused():
    with pytest.raises(rx.DeviceError, match=r"(?s)3 devices, 2 for each replica.*2 of them: .*jax.devices\(\)\[:2\]"):
        rx.MirroredStrategy(jax.devices()[:3], replica_mesh={"model": 2})
    with pytest.raises(rx.DeviceError, match="6 devices, 2 x 2 = 4 for each replica"):
        rx.MirroredStrategy(jax.devices()[:6], replica_mesh={"data": 2, "model": 2})
    with pytest.raises(rx.DeviceError, match="'replica'"):
        rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"replica": 2})


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: tower.MirroredStrategy(jax.devices()[:4], **options),
        lambda **options: rx.TPUStrategy(num_cores=4, **options),
    ],
    ids=["tower", "tpu"],
)
def test_other_mirrored_strategies_have_replicas_of_several_devices_too(make):
    strategy = make(replica_mesh={"model": 2}, variables=RULES)
    with strategy.scope():
        w = rx.Variable(np.ones((4, 6), np.float32), name="in/kernel")

    assert strategy.num_replicas_in_sync == 2
    assert {shard.data.shape for shard in w.value.addressable_shards} == {(4, 3)}
    with pytest.raises(rx.DeviceError, match="4 devices, 3 for each replica"):
        make(replica_mesh={"model": 3})


def test_a_worker_has_them_too_if_it_has_the_devices():
    with pytest.raises(rx.DeviceError, match="1 devices, 2 for each replica"):
        rx.MultiWorkerMirroredStrategy(replica_mesh={"model": 2})
    assert rx.MultiWorkerMirroredStrategy(replica_mesh={"model": 1}, variables=RULES).num_replicas_in_sync == 1


@pytest.mark.parametrize("given", [{"model": 0}, {"model": 2.0}, {"model": "2"}, {"model": True}, {2: 2}, 2], ids=repr)
def test_what_does_not_name_axes_and_sizes_is_refused(given):
    with pytest.raises(rx.DeviceError, match="positive whole number of devices"):
        rx.MirroredStrategy(jax.devices()[:4], replica_mesh=given)


def test_an_axis_cuts_once():
    strategy = grid(2, 2)
    with strategy.scope(), pytest.raises(rx.VariableError, match="names an axis of the devices twice"):
        rx.Variable(jnp.ones((4, 4)), layout=P("model", "model"))
    with pytest.raises(rx.VariableError, match="names an axis of the devices twice"):
        strategy.run(lambda: rx.shard(jnp.ones((4, 4)), "model", "model"))


@pytest.mark.parametrize("layout", ["model", ("model", None)], ids=repr)
def test_a_layout_is_a_partition_spec_or_a_policy(layout):
    with grid(2, 2).scope(), pytest.raises(rx.VariableError, match="does not say how parameters lie"):
        rx.Variable(jnp.ones((4, 4)), layout=layout)
    with pytest.raises(rx.VariableError, match="does not say how parameters lie"):
        rx.MirroredStrategy(jax.devices()[:4], variables=layout)


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ([("(", P())], "unterminated subpattern"),
        ([("w", "model")], "'model'"),
        (["w"], "a pattern and a"),
        ([("w", None)], "a pattern and a"),
        ([(1, P())], "a regular expression first"),
    ],
    ids=["regex", "word", "no-layout", "none", "number"],
)
def test_what_is_no_rule_is_refused(rules, found):
    with pytest.raises(rx.VariableError, match=f"(?s)no rule.*{found}"):
        rx.partition_rules(rules)


def test_rules_may_be_a_dictionary():
    rules = {"kernel": P(None, "model"), ".*": P()}

    assert (
        rx.partition_rules(rules)
        == rx.partition_rules(rules.items())
        == rx.partition_rules([*map(list, rules.items())])
    )


def test_shard_takes_a_partition_spec_and_whatever_is_an_array():
    strategy = grid(2, 2)

    assert strategy.run(lambda: rx.shard(np.ones((4, 4)), P(None, "model")).sum()) == 16
    assert strategy.run(lambda: rx.shard(2.0) + 1) == 3


def test_line_by_line_is_refused():
    with pytest.raises(rx.NotAvailableError, match="model"):
        rx.MirroredStrategy(jax.devices()[:4], replica_mesh={"model": 2}, eager=True)
    with pytest.raises(rx.NotAvailableError, match="model"):
        grid(2, 2).run(lambda: None, options=rx.RunOptions(eager=True))
    with jax.disable_jit(), pytest.raises(rx.NotAvailableError, match="model"):
        grid(2, 2).run(lambda: None)


def test_a_checkpoint_moves_between_layouts(tmp_path):
    _, weights, optimizer, _ = trained(grid(2, 2, variables=RULES), steps=3)
    saved = {name: weight.numpy() for name, weight in weights.items()}
    path = Checkpoint(weights=weights, optimizer=optimizer).save(tmp_path / "checkpoint")

    strategy = rx.MirroredStrategy(jax.devices()[:2], variables=rx.fully_sharded(min_size=2))
    _, others, optimizer, _ = trained(strategy, steps=1)
    Checkpoint(weights=others, optimizer=optimizer).restore(path)

    for name, weight in others.items():
        np.testing.assert_array_equal(weight.numpy(), saved[name])
    assert others["in/kernel"].layout == P(None, "replica")
    assert others["in/kernel"].value.addressable_shards[0].data.shape == (16, 16)
