"""Steps and their monitor: training loops as they were written in 2018."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.compat import tower

DEVICES = jax.devices()[:2]

STRATEGIES = {
    "mirrored-2": lambda: tower.MirroredStrategy(DEVICES),
    "mirrored-2-eager": lambda: tower.MirroredStrategy(DEVICES, eager=True),
    "mirrored-1": lambda: tower.MirroredStrategy(DEVICES[:1]),
    "one-device": lambda: tower.OneDeviceStrategy("cpu:0"),
    "parameter-server": lambda: tower.ParameterServerStrategy(),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def distribution(request):
    return request.param()


def ones(count):
    return lambda: [np.ones((1, 1), np.float32)] * count


def single_loss(distribution, count=40, optimizer=None, **options):
    """A step that draws `w` towards 1."""
    with distribution.scope():
        w = rx.Variable(jnp.full((1, 1), 3.0), name="w")
        rx.Variable(0.0, name="unused")

    def loss_fn(context, x):
        return jnp.sum((x @ w.value - 1.0) ** 2)

    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return w, tower.StandardSingleLossStep(ones(count), loss_fn, optimizer, distribution, **options)


def test_a_monitor_drives_a_step(distribution):
    w, step = single_loss(distribution)
    monitor = tower.Monitor(step)

    monitor.run_steps(1)
    early = abs(float(w.numpy()[0, 0]) - 1)
    monitor.run_steps(9)
    late = abs(float(w.numpy()[0, 0]) - 1)

    assert late < early < 2.0


def test_gradients_are_summed_over_towers():
    changes = []
    for towers in (1, 2):
        w, step = single_loss(tower.MirroredStrategy(DEVICES[:towers]))
        step()
        changes.append(float(3.0 - w.numpy()[0, 0]))

    np.testing.assert_allclose(changes, [0.4, 0.8], rtol=1e-6)


def test_an_optimizer_with_a_choice_of_its_own_keeps_it(distribution):
    w, step = single_loss(distribution, optimizer=rx.Optimizer(optax.sgd(0.1), gradients="mean"))
    step()

    np.testing.assert_allclose(w.numpy(), [[2.6]], rtol=1e-6)


def test_several_iterations_are_one_call(distribution):
    w, step = single_loss(distribution, iterations_per_step=3)
    v, single = single_loss(distribution)
    step()
    for _ in range(3):
        single()

    np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=1e-6)


def test_a_monitor_stops_at_the_end_of_the_data(distribution):
    w, step = single_loss(distribution, count=3 * distribution.num_towers)

    tower.Monitor(step).run_steps()

    rate = 0.2 * distribution.num_towers
    np.testing.assert_allclose(w.numpy(), [[1 + 2 * (1 - rate) ** 3]], rtol=1e-5)
    with pytest.raises(rx.OutOfRangeError):
        step()
    assert step.initialize() == []
    step()


def test_a_step_inside_the_scope(distribution):
    w, step = single_loss(distribution)

    with distribution.scope():
        assert step() is None
    assert step.distribution is distribution
    assert float(w.numpy()[0, 0]) < 3.0


def test_a_loss_may_set_outputs(distribution):
    seen = []
    with distribution.scope():
        w = rx.Variable(2.0)

    class Watched(tower.StandardSingleLossStep):
        def __call__(self):
            with self.distribution.scope():
                self._variables = self._variables or self._trainable()
                seen.append(self.distribution.run_steps_on_dataset(self._step, self._iterator, self._iterations))

    def loss_fn(context, x):
        loss = jnp.sum((w.value * x) ** 2)
        context.set_last_step_output("loss", loss, aggregation="mean")
        context.set_non_tensor_output("tower", "one")
        return loss

    Watched(ones(4), loss_fn, optax.sgd(0.1), distribution)()

    (context,) = seen
    assert float(context.last_step_outputs["loss"]) == 4.0
    assert context.non_tensor_outputs == {"tower": ["one"]}


def test_only_what_the_loss_reads_and_may_be_trained_is_trained(distribution):
    with distribution.scope():
        frozen = rx.Variable(2.0, trainable=False)
        w = rx.Variable(1.0)

    def loss_fn(context, x):
        return jnp.sum(frozen.value * w.value * x)

    step = tower.StandardSingleLossStep(ones(2), loss_fn, optax.sgd(0.1), distribution)
    step()

    np.testing.assert_allclose(w.numpy(), 1.0 - 0.2 * distribution.num_towers, rtol=1e-6)
    assert frozen.numpy() == 2.0


def test_a_layer_may_make_its_weights_at_first_use(distribution):
    made = []

    def layer(x):
        if not made:
            made.append(rx.Variable(jnp.ones((1, 1)), name="kernel"))
        return x @ made[0].value

    step = tower.StandardSingleLossStep(
        ones(8), lambda context, x: jnp.sum((layer(x) - 3.0) ** 2), optax.sgd(0.05), distribution
    )
    tower.Monitor(step).run_steps(3)

    assert len(made) == 1
    assert 1.0 < float(made[0].numpy()[0, 0]) < 5.0


def test_there_are_no_sessions():
    with pytest.raises(ValueError, match="Should not provide a session"):
        tower.Monitor(lambda: None, session=object())


def test_abstract_steps_say_what_to_fill_in(distribution):
    for step in (tower.Step(distribution), tower.StandardInputStep(ones(1), distribution)):
        assert step.distribution is distribution and step.initialize() == []
        with pytest.raises(NotImplementedError, match="__call__"):
            step()


def test_a_step_of_ones_own_owns_its_data(distribution):
    class Count(tower.StandardInputStep):
        def __init__(self, dataset_fn, distribution):
            super().__init__(dataset_fn, distribution)
            with distribution.scope():
                self.rows = rx.Variable(0.0, aggregation="sum")

        def __call__(self):
            with self.distribution.scope():
                self.distribution.call_for_each_tower(
                    lambda x: self.rows.assign_add(x.sum()), self._iterator.get_next()
                )

    step = Count(ones(4), distribution)

    assert isinstance(step, tower.Step)
    assert tower.Monitor(step).run_steps() == 4 // distribution.num_towers
    assert step.rows.numpy() == 4.0
    step.initialize()
    step()
    assert step.rows.numpy() == 4.0 + distribution.num_towers


def test_losses_are_means():
    assert tower.get_loss_reduction() is tower.VariableAggregation.MEAN


# -- by hand, as algorithms of that time were written


@pytest.mark.parametrize("global_step", [False, True], ids=["no-counter", "counter"])
def test_gradients_are_applied_across_towers(global_step):
    """A dense layer of ones on ones, whose loss is its output; the gradients are summed over towers."""
    distribution = tower.MirroredStrategy(DEVICES)
    with distribution.scope():
        kernel, bias = rx.Variable(jnp.ones((10, 1)), name="kernel"), rx.Variable(jnp.ones(1), name="bias")
        count = rx.Variable(0, name="global_step", trainable=False)
        optimizer = rx.Optimizer(optax.sgd(0.25), gradients="sum")

        def tower_fn(x):
            gradients = rx.grad(lambda: (x @ kernel.value + bias.value).sum(), [kernel, bias])()
            return list(zip(gradients, [kernel, bias], strict=True))

        pairs = distribution.call_for_each_tower(tower_fn, jnp.ones((1, 10)))
        optimizer._distributed_apply(distribution, pairs, count if global_step else None)

    assert kernel.numpy().tolist() == [[0.5]] * 10 and bias.numpy().tolist() == [0.5]
    assert int(count) == global_step


@pytest.mark.parametrize("momentum", [0.8, 0.9, 0.99])
def test_a_moving_mean_follows_the_mean_of_the_towers_batches(momentum):
    distribution = tower.MirroredStrategy(DEVICES)
    batches = np.random.default_rng(0).normal(3.0, 2.0, (20, 8, 2)).astype(np.float32)
    with distribution.scope():
        moving = rx.Variable(jnp.zeros(2), name="moving_mean", trainable=False, aggregation="mean")

        def tower_fn(x):
            moving.assign_sub((moving.value - x.mean(axis=0)) * (1 - momentum))

        iterator = distribution.distribute_dataset(lambda: list(batches)).make_one_shot_iterator()
        for _ in range(10):
            distribution.call_for_each_tower(tower_fn, iterator.get_next())

    expected = np.zeros(2)
    for pair in batches.reshape(10, 2, 8, 2):
        expected -= (expected - pair.mean(axis=(0, 1))) * (1 - momentum)
    np.testing.assert_allclose(moving.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("towers", [1, 2])
def test_a_loss_decreases_with_a_hand_written_update(towers):
    distribution = tower.MirroredStrategy(DEVICES[:towers])
    with distribution.scope():
        w = rx.Variable(jnp.full((1, 1), 3.0))

        def tower_fn(x):
            (gradient,) = rx.grad(lambda: jnp.sum((x @ w.value - 1.0) ** 2), [w])()
            tower.get_tower_context().merge_call(apply, gradient)

        def apply(distribution, gradient):
            gradient = distribution.reduce(tower.VariableAggregation.SUM, gradient, w)
            distribution.update(w, lambda v, g: v.assign_sub(0.2 * g), gradient)

        iterator = distribution.distribute_dataset(ones(20)).make_one_shot_iterator()
        distances = [2.0]
        for _ in range(10):
            distribution.call_for_each_tower(tower_fn, iterator.get_next())
            distances.append(abs(float(w.numpy()[0, 0]) - 1))

    assert all(later < earlier for earlier, later in zip(distances, distances[1:], strict=False))


@pytest.mark.parametrize(("loss", "expected"), [("mean", {1: 12.6, 2: 12.6}), ("sum", {1: 23.2, 2: 44.4})])
@pytest.mark.parametrize("towers", [1, 2])
def test_one_step_of_a_linear_model_gives_the_known_numbers(loss, expected, towers):
    distribution = tower.MirroredStrategy(DEVICES[:towers])
    x, y = np.array([[2.0], [7.0]], np.float32), np.array([[6.0], [21.0]], np.float32)

    with distribution.scope():
        w = rx.Variable(2.0)
        optimizer = rx.Optimizer(optax.sgd(0.2), gradients=loss)

        def tower_fn(x, y):
            combine = jnp.mean if loss == "mean" else jnp.sum
            gradients = rx.grad(lambda: combine((x * w.value - y) ** 2), [w])()
            optimizer.apply_gradients(zip(gradients, [w], strict=True))

        iterator = distribution.distribute_dataset(lambda: [(x, y)] * towers).make_one_shot_iterator()
        distribution.call_for_each_tower(tower_fn, *iterator.get_next())

    np.testing.assert_allclose(w.numpy(), expected[towers], rtol=1e-6)
