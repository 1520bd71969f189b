"""An adopted NNX module behaves in a step as if there were one replica: statistics, random streams and optimizer included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
Y = np.arange(8, dtype=np.int32) % 4


class Net(nnx.Module):
    def __init__(self, axis_name=None, rate=0.0):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(6, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, axis_name=axis_name, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.outer = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


def two(**options):
    return rx.MirroredStrategy(jax.devices()[:2], **options)


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def made(strategy, make=Net, **options):
    with strategy.scope():
        model = make(**options)
        return model, rx.nnx.adopt(model)


def global_batch(strategy):
    (batch,) = strategy.distribute_dataset([(X, Y)])
    return batch


def state_of(*modules):
    return {
        f"{i}/{path}": v.numpy() for i, m in enumerate(modules) for path, v in rx.nnx.variables(m).items() if _array(v)
    }


def _array(variable):
    return not jnp.issubdtype(variable.dtype, jax.dtypes.prng_key)


def same(ours, exact):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, exact)


# -- the optimizer of NNX, unchanged


def optimizer_of(model):
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def with_nnx_optimizer(strategy):
    """The step is what one writes with NNX alone, and one line that reduces."""
    with strategy.scope():
        model = Net(axis_name="replica")
        optimizer = optimizer_of(model)
        rx.nnx.adopt(model)
        rx.nnx.adopt(optimizer)

    def step(x, y):
        value, gradients = nnx.value_and_grad(lambda model: rx.mean(cross_entropy(model(x), y)))(model)
        gradients = rx.get_replica_context().all_reduce("mean", gradients)
        optimizer.update(model, gradients)
        return value

    return step, model, optimizer


def alone(steps):
    """NNX alone, on one device with the whole batch."""
    model = Net()
    optimizer = optimizer_of(model)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(X), Y).mean())(model)
        optimizer.update(model, gradients)
        return value

    losses = [step(model, optimizer) for _ in range(steps)]
    rx.nnx.adopt(model)
    rx.nnx.adopt(optimizer)
    return losses, state_of(model, optimizer)


def test_an_nnx_step_gives_the_numbers_of_one_device():
    strategy = two()
    step, model, optimizer = with_nnx_optimizer(strategy)

    losses = [strategy.reduce("mean", strategy.run(step, global_batch(strategy))) for _ in range(3)]

    same((losses, state_of(model, optimizer)), alone(3))


def test_the_second_step_compiles_nothing(compilations):
    strategy = two()
    step, *_ = with_nnx_optimizer(strategy)
    batch = global_batch(strategy)
    strategy.run(step, batch)

    with compilations() as names:
        strategy.run(step, batch)

    assert names == []


# -- gradients


def test_gradients_of_nnx_and_of_replicax_are_the_replicas_own():
    strategy = two()
    model, weights = made(strategy)

    def step(x, y):
        def loss(model):
            return cross_entropy(model(x), y).mean()

        by_nnx = nnx.grad(loss)(model)
        by_us = rx.grad(lambda: loss(model), weights)()
        return [by_nnx[layer][name][...] for layer, name in PATHS], by_us

    by_nnx, by_us = strategy.run(step, global_batch(strategy))

    for i, rows in enumerate((slice(0, 4), slice(4, 8))):
        gradients = nnx.grad(lambda model, rows=rows: cross_entropy(model(X[rows]), Y[rows]).mean())(Net())
        exact = {f"{layer}/{name}": np.asarray(gradients[layer][name][...]) for layer, name in PATHS}
        for (layer, name), found in zip(PATHS, by_nnx, strict=True):
            same(strategy.experimental_local_results(found)[i], exact[f"{layer}/{name}"])
        for variable, found in zip(weights, by_us, strict=True):
            same(strategy.experimental_local_results(found)[i], exact[variable.name])


PATHS = [("inner", "kernel"), ("norm", "scale"), ("norm", "bias"), ("outer", "kernel"), ("outer", "bias")]


# -- state


def test_batch_statistics_without_an_axis_name_are_averaged_over_the_replicas():
    strategy = two()
    model, _ = made(strategy)

    strategy.run(lambda x, y: rx.mean(model(x).sum(-1)), global_batch(strategy))

    halves = []
    for rows in (slice(0, 4), slice(4, 8)):
        net = Net()
        net(X[rows])
        halves.append(net.norm.var[...])
    same(model.norm.var[...], (halves[0] + halves[1]) / 2)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_replicas_drop_different_units_while_streams_advance_together(eager):
    strategy = two(eager=eager)
    model, _ = made(strategy, make=lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    first, second = (strategy.run(lambda: model(jnp.ones(64))) for _ in range(2))

    masks = [np.asarray(m) for run in (first, second) for m in strategy.experimental_local_results(run)]
    assert len({mask.tobytes() for mask in masks}) == 4
    assert model.rngs.count[...] == 2


def test_one_replica_draws_what_nnx_alone_draws():
    strategy = rx.OneDeviceStrategy("cpu:1")
    model, _ = made(strategy, make=lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    same(strategy.run(lambda: model(jnp.ones(64))), nnx.Dropout(0.5, rngs=nnx.Rngs(0))(jnp.ones(64)))


def test_streams_may_be_handed_to_the_call():
    strategy = two()
    with strategy.scope():
        rngs, dropout = nnx.Rngs(dropout=0), nnx.Dropout(0.5)
        rx.nnx.adopt(rngs)

    one, other = strategy.experimental_local_results(strategy.run(lambda: dropout(jnp.ones(64), rngs=rngs)))

    assert (np.asarray(one) != np.asarray(other)).any()
    assert rngs.dropout.count[...] == 1


class Counting(nnx.Module):
    def __init__(self, **metadata):
        self.seen = nnx.Variable(jnp.zeros(()), **metadata)

    def __call__(self, x):
        self.seen[...] += x


def test_other_variables_say_how_replicas_combine():
    strategy = two()
    value = rx.PerReplica((1.0, 3.0))

    for aggregation, expected in (("sum", 4.0), ("mean", 2.0)):
        model, _ = made(strategy, make=lambda how=aggregation: Counting(aggregation=how))
        strategy.run(model.__call__, (value,))
        assert model.seen[...] == expected

    model, _ = made(strategy, make=Counting)
    with pytest.raises(rx.LocalityError, match="seen"):
        strategy.run(model.__call__, (value,))


def test_a_checkpoint_goes_on_under_another_strategy(tmp_path):
    def setting(strategy):
        model, weights = made(strategy, axis_name="replica")
        with strategy.scope():
            optimizer = rx.Optimizer(optax.adam(0.1), gradients="mean")
            optimizer.build(weights)

        def step(x, y):
            value, gradients = rx.value_and_grad(lambda: rx.mean(cross_entropy(model(x), y)), weights)()
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return value

        def run():
            return strategy.reduce("mean", strategy.run(step, global_batch(strategy)))

        return run, rx.Checkpoint(model=model, optimizer=optimizer), model

    run, checkpoint, model = setting(two())
    run()
    path = checkpoint.save(tmp_path / "saved")
    expected = run(), state_of(model)

    run, checkpoint, model = setting(rx.MirroredStrategy(jax.devices()[:4]))
    checkpoint.restore(path).assert_consumed()

    same((run(), state_of(model)), expected)


def test_a_module_is_restored_in_place_adopted_or_not(tmp_path):
    """Random streams and batch statistics included, and an optimizer of NNX with its slots."""

    def plain():
        model = Net(rate=0.5)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        return model, optimizer, rx.Checkpoint(model=model, optimizer=optimizer)

    model, optimizer, checkpoint = plain()
    model(X)
    model.outer.bias[...] = jnp.arange(4.0)
    optimizer.step[...] = optimizer.step[...] + 3
    path = checkpoint.save(tmp_path / "saved")
    expected = model(X)

    restored, optimizer, checkpoint = plain()
    checkpoint.restore(path).assert_consumed()
    adopted, _ = made(two(), rate=0.5)
    rx.Checkpoint(model=adopted).restore(path).expect_partial()

    assert int(optimizer.step[...]) == 3
    np.testing.assert_array_equal(restored(X), expected)
    np.testing.assert_allclose(adopted(X), expected, rtol=1e-6)


# -- on the host


def test_an_adopted_module_is_used_on_the_host_as_before():
    model, _ = made(two(), axis_name=None, rate=0.5)
    plain = Net(rate=0.5)

    same(model(X), plain(X))
    model.eval(), plain.eval()
    same(model(X), plain(X))
    same(nnx.state(model, nnx.BatchStat)["norm"]["mean"][...], plain.norm.mean[...])
    copy = nnx.clone(model)
    copy.outer.bias[...] += 1
    same(model.outer.bias[...], plain.outer.bias[...])


def test_state_in_state_out_needs_no_adoption():
    strategy = two()
    graph, params, rest = nnx.split(Net(axis_name="replica"), nnx.Param, ...)

    def step(params, rest, x, y):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            return rx.mean(cross_entropy(model(x), y)), nnx.state(model, nnx.Not(nnx.Param))

        gradients, rest = jax.grad(loss, has_aux=True)(params)
        return rx.get_replica_context().all_reduce("mean", gradients), rest

    gradients, rest = strategy.run(step, (params, rest, *global_batch(strategy)))

    plain = Net()
    exact = nnx.grad(lambda model: cross_entropy(model(X), Y).mean())(plain)
    same(gradients["outer"]["kernel"][...], exact["outer"]["kernel"][...])
    same(rest["norm"]["mean"][...], plain.norm.mean[...])


def test_adopting_again_changes_nothing():
    strategy = two()
    model, weights = made(strategy)

    with strategy.scope():
        assert rx.nnx.adopt(model) == weights
    assert [w.name for w in weights] == sorted(f"{layer}/{name}" for layer, name in PATHS)


# -- refusals


@pytest.mark.parametrize("adopted", [False, True], ids=["plain", "adopted"])
def test_a_module_as_an_argument_is_refused(adopted):
    strategy = two()
    model = made(strategy)[0] if adopted else Net()

    def step(model, x):
        return model(x)

    with pytest.raises(rx.NotAvailableError, match=r"strategy\.run\(step, \.\.\.\).*as an argument[\s\S]*nnx\.split"):
        strategy.run(step, (model, X))


def test_a_module_may_be_bound_to_the_step():
    strategy = two()
    model, _ = made(strategy)

    def step(model, x):
        return rx.get_replica_context().all_reduce("mean", model(x).mean())

    same(strategy.run(partial(step, model), (X,)), Net()(X).mean())


def test_variables_of_a_module_that_was_not_adopted():
    with pytest.raises(rx.ContextError, match="not adopted"):
        rx.nnx.variables(Net())


def test_what_cannot_be_an_array_cannot_be_adopted():
    class Odd(nnx.Module):
        def __init__(self):
            self.pair = nnx.Variable((jnp.ones(1), jnp.ones(2)))

    with pytest.raises(rx.NotAvailableError, match="pair.*holding a tuple"):
        rx.nnx.adopt(Odd())
