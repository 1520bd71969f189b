"""The second call compiles nothing, whatever changes that is not a shape: numbers, masks, fresh lambdas, handed-out values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax._run import arguments
from tests.strategies import COMPILED


@pytest.fixture(params=COMPILED)
def strategy(request):
    return COMPILED[request.param]()


def make_step(strategy):
    with strategy.scope():
        w = rx.Variable(np.ones(4, np.float32), name="w")
        optimizer = rx.Optimizer(optax.adam(0.1), gradients="mean")

    def step(x, number):
        gradients = rx.grad(lambda: rx.mean(x @ w.value) * number, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return x * 2, number

    return step, w


def test_steps_of_a_dataset_with_a_short_batch(strategy, compilations):
    step, w = make_step(strategy)
    batches = rx.data.from_arrays(np.ones((13, 4), np.float32), batch_size=4)
    dataset = strategy.distribute_dataset(batches)
    for number, x in enumerate(dataset):
        strategy.run(step, args=(x, number))
        w.numpy()

    with compilations() as names:
        for number, x in enumerate(dataset):
            strategy.run(step, args=(x, number + 100))
            w.numpy()

    assert names == []


def test_lambdas_and_partials_made_anew(strategy, compilations):
    x = jnp.ones((8, 4))

    def scaled(x, k):
        return x.sum() * k

    def once():
        strategy.run(lambda x: x.sum(), args=(x,))
        strategy.run(functools.partial(scaled, k=3), args=(x,))

    once()
    with compilations() as names:
        once()

    assert names == []


NOTEBOOK_CELL = """
def loss(x):
    return (x * rate).sum()
def step(x):
    return [loss(x) for _ in range(1)][0]
result = strategy.run(step, args=(x,))
"""


def test_a_notebook_cell_run_again(strategy, compilations):
    """Its functions are made anew; what counts are the globals that they read, not what they are called."""
    notebook = {"strategy": strategy, "x": jnp.ones((8, 4)), "rate": 2.0}
    exec("step = lambda x: (x * rate).sum()\nresult = strategy.run(step, args=(x,))", notebook)
    first = float(notebook["result"])
    with compilations() as names:
        exec("step = lambda x: (x * rate).sum()\nresult = strategy.run(step, args=(x,))", notebook)

    assert names == []
    notebook["rate"] = 3.0
    exec("step = lambda x: (x * rate).sum()\nresult = strategy.run(step, args=(x,))", notebook)
    assert (first, float(notebook["result"])) == (64.0, 96.0)
    for rate in (2.0, 3.0):
        notebook["rate"] = rate
        exec(NOTEBOOK_CELL, notebook)
        assert float(notebook["result"]) == 32 * rate, "a function that a step calls was written anew"


def test_a_reduction_and_a_gather(strategy, compilations):
    def step():
        return rx.get_replica_context().replica_id_in_sync_group * jnp.ones(3)

    def once():
        out = strategy.run(step)
        return strategy.reduce("mean", out), strategy.reduce("sum", out, axis=0), strategy.gather(out, axis=0)

    once()
    with compilations() as names:
        once()

    assert names == []


def test_a_function_around_runs(strategy, compilations):
    with strategy.scope():
        w = rx.Variable(1.0)

    @rx.function
    def train(x):
        w.assign_add(1.0)
        return strategy.reduce("mean", strategy.run(lambda x: x.sum() * w.value, (x,)))

    x = jnp.ones((8, 4))
    train(x)
    with compilations() as names:
        train(x)
        jax.block_until_ready(train(x))

    assert names == []


def test_arrays_in_plain_containers_go_to_the_program_as_they_are(strategy, monkeypatch):
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(2))
    batch = ({"x": x, "y": [x]}, jnp.ones(2))

    def step(batch):
        return jax.tree.map(lambda leaf: leaf.sum(), batch)

    strategy.run(step, (batch,))
    monkeypatch.setattr(arguments, "prepared", None)
    sums = strategy.run(step, (batch,))

    def of_first(result):
        return float(strategy.experimental_local_results(result)[0])

    assert jax.tree.map(of_first, sums, is_leaf=lambda x: isinstance(x, rx.PerReplica)) == ({"x": 2.0, "y": [2.0]}, 2.0)
