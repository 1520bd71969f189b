"""One script, every strategy, one result: the same step gives the numbers of one device with the whole batch."""

import functools

import jax
import numpy as np
import optax
import pytest

import replicax as rx
from tests.laws.models import MODELS, ROWS, Model
from tests.strategies import COMPILED, EAGER, STRATEGIES

STEPS = 20

# Line by line a step takes seconds, since each operation is compiled by itself, and a placement does not ask which operations
# they are. So one placement carries out all models, and the others those that show how weights and statistics are treated.
SMALL = ["mlp", "cnn_batchnorm_linen"]
TRAINED = [
    *((model, name) for model in MODELS for name in COMPILED),
    *((model, name) for model in MODELS for name in EAGER if model in SMALL or name == "mirrored_2_eager"),
]


def train(strategy: rx.Strategy, model: Model, steps: int = STEPS):
    """Training with variables: the way of tf.distribute."""
    with strategy.scope():
        params = jax.tree.map(lambda x: rx.Variable(x, name="param"), model.params)
        stats = jax.tree.map(lambda x: rx.Variable(x, name="stat", trainable=False), model.stats)
        optimizer = rx.Optimizer(optax.sgd(0.05, momentum=0.9), gradients="mean")
    weights = jax.tree.leaves(params)

    def values(tree):
        return jax.tree.map(lambda v: v.value, tree)

    def step(batch):
        def loss():
            rows, new = model.apply(values(params), values(stats), batch)
            for variable, value in zip(jax.tree.leaves(stats), jax.tree.leaves(new), strict=True):
                variable.assign(value)
            return rx.mean(rows)

        value, gradients = rx.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return value

    (batch,) = strategy.distribute_dataset([model.batch])
    losses = [float(strategy.reduce("mean", strategy.run(step, args=(batch,)))) for _ in range(steps)]
    return losses, [w.numpy() for w in weights], [s.numpy() for s in jax.tree.leaves(stats)]


@functools.cache
def by_hand(name: str, steps: int):
    """The same, in plain JAX and Optax on one device. No strategy, no variables."""
    model = MODELS[name]()
    optimizer = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(params, stats, state):
        def loss(params):
            rows, new = model.apply(params, stats, model.batch)
            return rows.mean(), new

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), stats, state

    params, stats, state = model.params, model.stats, optimizer.init(model.params)
    losses = []
    for _ in range(steps):
        value, params, stats, state = step(params, stats, state)
        losses.append(float(value))
    return losses, jax.tree.leaves(params), jax.tree.leaves(stats)


def close(ours, exact, tolerance=1e-5):
    """Within `tolerance` of the tensor's largest element."""
    for a, b in zip(ours, exact, strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize(("model", "name"), TRAINED)
def test_training_equals_one_device(model, name):
    strategy = STRATEGIES[name]()
    steps = 2 if strategy.eager else STEPS
    losses, params, stats = by_hand(model, steps)

    ours = train(strategy, MODELS[model](), steps)

    close(ours[0], losses)
    close(ours[1], params)
    close(ours[2], stats)


@pytest.mark.parametrize("name", STRATEGIES)
def test_state_in_state_out_equals_one_device(name):
    """Training the JAX way: a pytree goes in, and comes out mirrored."""
    strategy, model = STRATEGIES[name](), MODELS["mlp"]()
    optimizer = optax.sgd(0.05, momentum=0.9)

    def step(params, state, batch):
        value, gradients = jax.value_and_grad(lambda p: rx.mean(model.apply(p, {}, batch)[0]))(params)
        gradients = rx.get_replica_context().all_reduce("mean", gradients)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    (batch,) = strategy.distribute_dataset([model.batch])
    params, state = model.params, optimizer.init(model.params)
    for _ in range(2):
        _, params, state = strategy.run(step, args=(params, state, batch))

    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    close(jax.tree.leaves(params), by_hand("mlp", 2)[1])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_short_batch_counts_each_row_once(name):
    strategy, model, full = STRATEGIES[name](), MODELS["mlp"](), ROWS // 2
    with strategy.scope():
        weights = [rx.Variable(w, name="w") for w in model.params]

    def step(batch):
        def loss():
            return rx.mean(model.apply([w.value for w in weights], {}, batch)[0])

        value, gradients = rx.value_and_grad(loss, weights)()
        return value, rx.get_replica_context().all_reduce("mean", gradients)

    for rows in (1, 3, 5, 7):
        batch = jax.tree.map(lambda x, rows=rows: x[full : full + rows], model.batch)
        batches = rx.data.from_arrays(jax.tree.map(lambda x, rows=rows: x[: full + rows], model.batch), batch_size=full)
        *_, short = strategy.distribute_dataset(batches)

        value, gradients = strategy.run(step, args=(short,))

        exact, by_rows = jax.value_and_grad(lambda p, batch=batch: model.apply(p, {}, batch)[0].mean())(model.params)
        np.testing.assert_allclose(strategy.reduce("mean", value), exact, rtol=1e-6, err_msg=f"{rows} rows")
        close(gradients, by_rows, 2e-6)
