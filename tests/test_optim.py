"""An optimizer under a strategy gives what plain Optax gives on one device with the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from tests.strategies import COMPILED

ROWS, STEPS = 16, 20

SOME = ("one_device", "mirrored_2", "mirrored_4", "central_2")

schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 5, 20)

TRANSFORMS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.02),
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.1),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.02, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.02),
    "rmsprop": lambda: optax.rmsprop(0.01, momentum=0.9),
    "adagrad": lambda: optax.adagrad(0.05),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05)),
    "schedule": lambda: optax.sgd(schedule, momentum=0.9),
    "multi-steps": lambda: optax.MultiSteps(optax.sgd(0.05, momentum=0.9), every_k_schedule=3),
    "inject-hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), [True, False]), optax.scale(-0.05)),
    "ema": lambda: optax.chain(optax.ema(0.5), optax.scale(-0.05)),
    "sm3": lambda: optax.sm3(0.05),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(3)), optax.sgd(0.05)),
}


@pytest.fixture(params=SOME)
def strategy(request):
    return COMPILED[request.param]()


@pytest.fixture
def two():
    return rx.MirroredStrategy(jax.devices()[:2])


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, ROWS, 4)).astype(np.float32)
    return x, np.tanh(x @ rng.standard_normal((4, 8)).astype(np.float32))


def start():
    rng = np.random.default_rng(1)
    return [rng.standard_normal((4, 8)).astype(np.float32) * 0.3, np.zeros(8, np.float32)]


def squared_error(params, x, y):
    return jnp.mean((x @ params[0] + params[1] - y) ** 2)


def plain(transform, steps=STEPS):
    """What Optax gives on one device."""
    transform = optax.with_extra_args_support(transform)
    params = [jnp.asarray(p) for p in start()]
    state = transform.init(params)

    @jax.jit
    def step(params, state, x, y):
        gradients = jax.grad(squared_error)(params, x, y)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for x, y in list(zip(*data(), strict=True))[:steps]:
        params, state = step(params, state, x, y)
    return [np.asarray(p) for p in params]


def train(strategy, *optimizers, steps=STEPS):
    """A model for each optimizer, all trained in one program."""
    with strategy.scope():
        models = [[rx.Variable(value, name=f"v{i}") for i, value in enumerate(start())] for _ in optimizers]

    def step(x, y):
        for variables, optimizer in zip(models, optimizers, strict=True):
            loss = lambda: squared_error([v.value for v in variables], x, y)  # noqa: B023, E731
            _, gradients = rx.value_and_grad(loss, variables)()
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for x, y in strategy.distribute_dataset(list(zip(*data(), strict=True))[:steps]):
        strategy.run(step, (x, y))
    return models


def assert_equal(variables, expected, name="", bound=1e-5):
    for variable, array in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), array, rtol=0, atol=bound * np.abs(array).max(), err_msg=name)


@pytest.fixture(scope="module")
def expected():
    return {name: plain(make()) for name, make in TRANSFORMS.items()}


@pytest.mark.parametrize("name", COMPILED)
def test_twenty_steps_of_any_transformation_are_those_of_plain_optax(name, expected):
    optimizers = [rx.Optimizer(make(), gradients="mean") for make in TRANSFORMS.values()]

    models = train(COMPILED[name](), *optimizers)

    for transform, variables in zip(TRANSFORMS, models, strict=True):
        assert_equal(variables, expected[transform], transform)


def test_line_by_line_gives_the_same():
    names = ["momentum", "adam", "clipped"]
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=True)

    models = train(strategy, *[rx.Optimizer(TRANSFORMS[name](), gradients="mean") for name in names], steps=4)

    for name, variables in zip(names, models, strict=True):
        assert_equal(variables, plain(TRANSFORMS[name](), steps=4), name)


def test_cut_slots_give_what_whole_ones_give(strategy):
    names = ["momentum", "adam", "adafactor", "multi-steps"]

    whole = train(strategy, *[rx.Optimizer(TRANSFORMS[name](), gradients="mean") for name in names])
    cut = train(strategy, *[rx.Optimizer(TRANSFORMS[name](), gradients="mean", shard_state=True) for name in names])

    for name, variables, others in zip(names, cut, whole, strict=True):
        assert_equal(variables, [v.numpy() for v in others], name, bound=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_each_device_holds_its_share_of_cut_slots(replicas):
    strategy = rx.MirroredStrategy(jax.devices()[:replicas])

    def held(shard_state):
        optimizer = rx.Optimizer(optax.adam(0.02), gradients="mean", shard_state=shard_state)
        train(strategy, optimizer)
        arrays = [slot for slot in optimizer.slots if slot.ndim]
        assert len(arrays) == 4
        return sum(slot.value.addressable_shards[0].data.nbytes for slot in arrays)

    assert held(True) * replicas == held(False)


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_the_norm_that_clips_is_that_of_the_reduced_gradients(strategy, gradients):
    with strategy.scope():
        v = rx.Variable(np.zeros(2, np.float32))
        optimizer = rx.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), gradients=gradients)

    def step(local):
        optimizer.apply_gradients([(local, v)])

    replicas = strategy.num_replicas_in_sync
    local = [np.array([3.0, 4.0 * i], np.float32) for i in range(replicas)]
    strategy.run(step, (rx.PerReplica(tuple(local)),))

    reduced = np.sum(local, axis=0) / (replicas if gradients == "mean" else 1)
    np.testing.assert_allclose(v.numpy(), -reduced / max(1.0, np.linalg.norm(reduced)), rtol=1e-6)


def test_sum_and_mean_differ_by_the_number_of_replicas(strategy):
    def after(gradients):
        with strategy.scope():
            v = rx.Variable(1.0)
            optimizer = rx.Optimizer(optax.sgd(0.5), gradients=gradients)
        strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), v)]))
        return float(v)

    assert after("mean") == 0.5
    assert after("sum") == 1 - 0.5 * strategy.num_replicas_in_sync


def test_an_optimizer_is_made_of_a_transformation():
    with pytest.raises(TypeError, match="got 'sgd' where it takes an Optax transformation"):
        rx.Optimizer("sgd", gradients="sum")


def test_gradients_has_no_default():
    with pytest.raises(TypeError):
        rx.Optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match="global batch size"):
        rx.Optimizer(optax.sgd(0.1), gradients="average")


WRONG_TRANSFORMS = {"a number": 0.1, "a function": optax.adam, "a schedule": schedule}


@pytest.mark.parametrize("kind", WRONG_TRANSFORMS)
def test_what_is_no_transformation_is_refused(kind):
    with pytest.raises(TypeError, match="takes an Optax transformation"):
        rx.Optimizer(WRONG_TRANSFORMS[kind], gradients="mean")
    with pytest.raises(TypeError, match="takes an Optax transformation"):
        rx.TrainState.create({"w": jnp.ones(2)}, WRONG_TRANSFORMS[kind])


def test_gradients_that_would_be_stretched_or_lost_are_refused(two):
    with two.scope():
        v = rx.Variable([1.0, 2.0], name="v")
        optimizer = rx.Optimizer(optax.sgd(0.5), gradients=rx.ReduceOp.MEAN)

    for gradient in (jnp.ones(()), jnp.ones(3), jnp.ones((2, 1))):
        with pytest.raises(rx.VariableError, match=r"'v' float32\[2\] mirrored>  gradient of shape \["):
            two.run(lambda: optimizer.apply_gradients([(gradient, v)]))  # noqa: B023
    with pytest.raises(rx.VariableError, match="more than one gradient for a variable"):
        two.run(lambda: optimizer.apply_gradients([(jnp.ones(2), v)] * 2))
    with pytest.raises(TypeError, match=r"what is no gradient:\n\n  <rx.Variable 'v' float32\[2\] mirrored>  list"):
        two.run(lambda: optimizer.apply_gradients([([1.0, 2.0], v)]))
    assert v.numpy().tolist() == [1.0, 2.0]


def test_integers_are_not_trained():
    count = rx.Variable(3, name="count")
    optimizer = rx.Optimizer(optax.sgd(0.5), gradients="mean")

    with pytest.raises(rx.VariableError, match=r"no real numbers:\n\n  <rx.Variable 'count' int32\[\] mirrored>"):
        optimizer.apply_gradients([(jnp.ones(()), count)])
    assert int(count) == 3


def test_slots_are_called_what_the_transformation_calls_them(two):
    with two.scope():
        variables = [rx.Variable(jnp.ones((2, 3)), name="kernel"), rx.Variable(jnp.ones(3), name="bias")]
    transforms = {
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1): [
            "optimizer/count", "optimizer/learning_rate", "optimizer/b1", "optimizer/b2", "optimizer/eps",
            "optimizer/eps_root", "optimizer/count", "kernel/mu", "bias/mu", "kernel/nu", "bias/nu",
        ],
        optax.scale_by_lbfgs(memory_size=2): [
            "optimizer/count", "kernel/params", "bias/params", "kernel/updates", "bias/updates",
            "kernel/diff_params_memory", "bias/diff_params_memory", "kernel/diff_updates_memory",
            "bias/diff_updates_memory", "optimizer/weights_memory",
        ],
    }  # fmt: skip

    for transform, names in transforms.items():
        optimizer = rx.Optimizer(transform, gradients="mean")
        assert repr(optimizer) == '<rx.Optimizer gradients="mean": no slots yet>'
        optimizer.build(variables)

        assert sorted(slot.name for slot in optimizer.slots) == sorted(names)


def test_a_learning_rate_may_be_changed_between_steps(two, compilations):
    with two.scope():
        v = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5), gradients="mean")

    def step():
        optimizer.apply_gradients([(jnp.float32(1.0), v)])

    two.run(step)
    rate = optimizer.state.hyperparams["learning_rate"]
    rate.assign(0.25)
    with compilations() as names:
        two.run(step)

    assert (float(v), names) == (0.25, [])


def test_an_optimizer_made_outside_of_the_scope_keeps_its_slots_with_the_variables(two):
    optimizer = rx.Optimizer(optax.adam(0.02), gradients="mean")

    (variables,) = train(two, optimizer)

    assert {slot.strategy for slot in optimizer.slots} == {two}
    assert_equal(variables, plain(optax.adam(0.02)))


def test_a_gradient_of_none_leaves_variable_and_slots_untouched(two):
    with two.scope():
        a, b = rx.Variable(jnp.ones(2), name="a"), rx.Variable(jnp.ones(2), name="b")
        optimizer = rx.Optimizer(optax.sgd(0.5, momentum=0.9), gradients="mean")

    two.run(lambda: optimizer.apply_gradients([(jnp.ones(2), a), (jnp.ones(2), b)]))
    slots = [slot.numpy() for slot in optimizer.slots]
    with pytest.warns(UserWarning, match="no gradients for 'b', which stay as they are") as told:
        two.run(lambda: optimizer.apply_gradients([(jnp.ones(2), a), (None, b)]))

    assert [warning.filename for warning in told] == [__file__]
    assert b.numpy().tolist() == [0.5, 0.5]
    assert a.numpy().tolist() == pytest.approx([-0.45, -0.45])
    changed = [not np.array_equal(slot.numpy(), old) for slot, old in zip(optimizer.slots, slots, strict=True)]
    assert changed == [True, False]


def test_no_gradient_at_all(two):
    with two.scope():
        v = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.sgd(0.5), gradients="mean")

    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        two.run(lambda: optimizer.apply_gradients([(None, v)]))
    two.run(lambda: optimizer.apply_gradients([]))
    assert float(v) == 1.0


def test_rows_of_a_gradient_add_up(strategy):
    """Each replica sends two rows, one of them twice."""
    with strategy.scope():
        table = rx.Variable(np.zeros((4, 2), np.float32))
        optimizer = rx.Optimizer(optax.sgd(1.0), gradients="sum")

    def step():
        slices = rx.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 3, 1]), (4, 2))
        optimizer.apply_gradients([(slices, table)])

    strategy.run(step)

    n = strategy.num_replicas_in_sync
    assert table.numpy()[:, 0].tolist() == [0, -2 * n, 0, -n]


def test_without_aggregation_unequal_gradients_are_refused(two):
    with two.scope():
        v = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.sgd(0.5), gradients="mean")

    def unequal(x):
        optimizer.apply_gradients([(x, v)], aggregate=False)

    def equal(x):
        gradient = rx.get_replica_context().all_reduce("mean", x)
        optimizer.apply_gradients([(gradient, v)], aggregate=False)

    x = rx.PerReplica((np.float32(1.0), np.float32(3.0)))
    with pytest.raises(rx.LocalityError, match="test_optim.py"):
        two.run(unequal, (x,))
    two.run(equal, (x,))
    assert float(v) == 0.0


def test_a_constraint_holds_after_each_update(two):
    with two.scope():
        v = rx.Variable(jnp.array([0.3, 2.0]), constraint=lambda value: jnp.maximum(value, 0.0))
        optimizer = rx.Optimizer(optax.sgd(1.0), gradients="mean")

    two.run(lambda: optimizer.apply_gradients([(jnp.ones(2), v)]))

    assert v.numpy().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("happens", [True, False])
def test_an_update_that_depends_on_a_flag(two, happens):
    with two.scope():
        v, flag = rx.Variable(1.0), rx.Variable(happens)
        optimizer = rx.Optimizer(optax.adam(0.5), gradients="mean")

    two.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), v)], when=flag.value))

    assert (float(v) == 1.0) != happens
    assert [bool(np.any(slot.numpy())) for slot in optimizer.slots] == [happens] * 3


def test_across_replicas_it_is_refused(two):
    with two.scope():
        v = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.sgd(0.5), gradients="mean")
        with pytest.raises(RuntimeError, match="cross-replica"):
            optimizer.apply_gradients([(jnp.float32(1.0), v)])


def test_second_step_compiles_nothing(strategy, compilations):
    with strategy.scope():
        v = rx.Variable(jnp.ones(3))
        optimizer = rx.Optimizer(optax.adamw(1e-2), gradients="mean")

    def step():
        optimizer.apply_gradients([(v.value, v)])

    strategy.run(step)
    with compilations() as names:
        strategy.run(step)

    assert names == []


# -- as in 2018


def test_distributed_apply_in_a_merge_function_sums_and_counts_once(strategy):
    """Dense weights of ones, a gradient of one on each replica, a learning rate of 0.25."""
    with strategy.scope():
        v, count = rx.Variable(jnp.ones(3)), rx.Variable(0)
        optimizer = rx.Optimizer(optax.sgd(0.25), gradients="sum")

    def step():
        pairs = [(jnp.ones(3), v), (None, count)]
        rx.get_replica_context().merge_call(optimizer._distributed_apply, (pairs, count))

    strategy.run(step)

    assert v.numpy().tolist() == [1 - 0.25 * strategy.num_replicas_in_sync] * 3
    assert int(count) == 1


def test_a_global_step_counts_steps_and_not_replicas(strategy):
    with strategy.scope():
        v, count = rx.Variable(1.0), rx.Variable(0)
        optimizer = rx.Optimizer(optax.sgd(0.5), gradients="mean")

    for due in (True, True, False):
        strategy.run(lambda due: optimizer.apply_gradients([(v.value, v)], count, when=due), (jnp.asarray(due),))

    assert (float(v), int(count)) == (0.25, 2)


def test_distributed_apply_on_the_host(two):
    with two.scope():
        v, count = rx.Variable(1.0), rx.Variable(0)
        optimizer = rx.Optimizer(optax.sgd(0.5, momentum=0.9), gradients="sum")
        gradient = two.run(lambda: rx.get_replica_context().replica_id_in_sync_group + 1.0)
        optimizer._distributed_apply(two, [(gradient, v)], count)

    assert float(v) == 1 - 0.5 * 3
    assert int(count) == 1


def test_distributed_apply_inside_a_replica_is_refused(two):
    with two.scope():
        v = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.sgd(0.5), gradients="sum")

    with pytest.raises(rx.ContextError):
        two.run(lambda: optimizer._distributed_apply(two, [(jnp.float32(1.0), v)]))


# -- state in, state out


def test_a_state_that_goes_in_and_comes_out_stays_mirrored(strategy):
    state = rx.TrainState.create(start(), optax.adamw(0.02))

    def step(state, x, y):
        gradients = jax.grad(squared_error)(state.params, x, y)
        return state.apply(rx.get_replica_context().all_reduce("mean", gradients))

    for x, y in strategy.distribute_dataset(list(zip(*data(), strict=True))):
        state = strategy.run(step, (state, x, y))

    assert int(state.step) == STEPS
    for array, expected in zip(state.params, plain(optax.adamw(0.02)), strict=True):
        assert isinstance(array, jax.Array)
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_state_updated_with_unreduced_gradients_comes_out_per_replica(two):
    state = rx.TrainState.create({"w": jnp.float32(1.0)}, optax.sgd(0.1))

    state = two.run(lambda state, x: state.apply({"w": x}), (state, rx.PerReplica((1.0, 2.0))))

    assert isinstance(state.params["w"], rx.PerReplica)


def test_pairs_the_wrong_way_round_are_refused():
    w = rx.Variable(1.0)
    opt = rx.Optimizer(optax.sgd(0.1), gradients="mean")

    with pytest.raises(TypeError, match=r"got pairs \(variable, gradient\)"):
        opt.apply_gradients([(w, jnp.float32(1.0))])
