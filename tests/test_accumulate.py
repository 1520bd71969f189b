"""k microbatches of B/k rows are one batch of B rows, and the replicas meet once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

STRATEGIES = {
    "one-device": lambda: rx.OneDeviceStrategy("cpu:0"),
    **{f"mirrored-{n}": (lambda n=n: rx.MirroredStrategy(jax.devices()[:n])) for n in (2, 4)},
    "mirrored-2-eager": lambda: rx.MirroredStrategy(jax.devices()[:2], eager=True),
    "central-2": lambda: rx.experimental.CentralStorageStrategy(jax.devices()[:2], jax.devices()[2]),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def strategy(request):
    return request.param()


@pytest.fixture
def two():
    return rx.MirroredStrategy(jax.devices()[:2])


def data(rows=32):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    return x, np.sin(x.sum(1))


def build(strategy, gradients="mean"):
    with strategy.scope():
        w, b = rx.Variable(jnp.full((4, 3), 0.2), name="w"), rx.Variable(jnp.zeros(3), name="b")
        return [w, b], rx.Optimizer(optax.sgd(0.1, momentum=0.9), gradients=gradients)


def per_example(variables, x, y):
    w, b = variables
    return (jnp.tanh(x @ w.value + b.value).sum(1) - y) ** 2


def train(strategy, batches, microbatches, loss=rx.mean, gradients="mean"):
    variables, optimizer = build(strategy, gradients)

    def step(x, y):
        gradients_of = rx.value_and_grad(lambda x, y: loss(per_example(variables, x, y)), variables)
        if microbatches:
            gradients_of = rx.accumulate(gradients_of, microbatches, combine=gradients)
        value, grads = gradients_of(x, y)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return value

    for x, y in strategy.distribute_dataset(batches):
        value = strategy.run(step, (x, y))
    return [v.numpy() for v in variables], float(strategy.reduce(gradients, value))


def assert_same(one, other):
    for mine, theirs in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
    assert one[1] == pytest.approx(other[1], rel=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_microbatches_give_the_numbers_of_the_batch(strategy, microbatches):
    batches = [data(), data()]

    assert_same(train(strategy, batches, microbatches), train(strategy, batches, None))


def test_a_loss_divided_by_the_global_batch_is_summed(strategy):
    how = {"loss": rx.compute_average_loss, "gradients": "sum"}

    assert_same(train(strategy, [data()], 4, **how), train(strategy, [data()], None, **how))
    assert_same(train(strategy, [data()], 4, **how), train(strategy, [data()], 4))


@pytest.mark.parametrize("how", [("mean", rx.mean), ("sum", rx.compute_average_loss)], ids=["mean", "sum"])
@pytest.mark.parametrize("rows", [3, 11, 31])
def test_padding_is_left_out_of_microbatches_too(two, rows, how):
    batches = [data(), tuple(a[:rows] for a in data())]
    gradients, loss = how

    assert_same(train(two, batches, 4, loss, gradients), train(two, batches, None, loss, gradients))


def test_a_microbatch_tells_which_of_its_rows_are_real(two):
    def step(x):
        def real(x):
            mask = rx.valid_rows()
            return mask.sum(), (x * mask).sum()

        return rx.accumulate(real, 4)(x)

    _, short = two.distribute_dataset([np.ones(16, np.float32), np.arange(1.0, 12.0, dtype=np.float32)])

    count, total = two.run(step, (short,))

    assert int(two.reduce("sum", count)) == 11
    assert float(two.reduce("sum", total)) * 4 == 66


def test_averaged_padding_is_refused(two):
    def step(x):
        return rx.accumulate(jnp.mean, 4)(x)

    with pytest.raises(rx.LocalityError, match="test_accumulate.py"):
        for x in two.distribute_dataset([np.ones(16), np.ones(11)]):
            two.run(step, (x,))


def all_reduces(text):
    return len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)) + len(re.findall(r"= \([^=]*\) all-reduce\(", text))


@pytest.mark.parametrize("microbatches", [None, 2, 8])
def test_the_replicas_meet_once(two, microbatches):
    variables, optimizer = build(two)

    def step(x, y):
        gradients_of = rx.grad(lambda x, y: rx.mean(per_example(variables, x, y)), variables)
        grads = (rx.accumulate(gradients_of, microbatches) if microbatches else gradients_of)(x, y)
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    (batch,) = two.distribute_dataset([data()])

    assert all_reduces(two.lower(step, batch).compile().as_text()) == 1


def test_a_variable_assigned_in_each_microbatch(two):
    with two.scope():
        w, seen = rx.Variable(2.0), rx.Variable(0.0)

    def step(x):
        def loss(x):
            seen.assign_add(1.0)
            return (w.value * x).mean()

        return rx.accumulate(rx.grad(loss, [w]), 4)(x)[0]

    (x,) = two.distribute_dataset([np.arange(8, dtype=np.float32)])
    gradient = two.run(step, (x,))

    assert float(two.reduce("mean", gradient)) == 3.5
    assert float(seen) == 4.0


def test_the_function_is_traced_once():
    calls = []
    strategy = rx.OneDeviceStrategy("cpu:0")

    strategy.run(lambda x: rx.accumulate(lambda x: calls.append(x) or x.sum(), 4)(x), (np.ones(8),))

    assert len(calls) == 1


def test_integers_are_counts():
    strategy = rx.OneDeviceStrategy("cpu:0")

    def step(x):
        return rx.accumulate(lambda x: {"hits": (x > 2).sum(), "mean": x.mean()}, 3)(x)

    out = strategy.run(step, (np.arange(6.0),))

    assert int(out["hits"]) == 3
    assert float(out["mean"]) == 2.5


def test_keyword_arguments_are_passed_on_whole():
    strategy = rx.OneDeviceStrategy("cpu:0")

    def step(x, table):
        return rx.accumulate(lambda x, table: table[x].sum(), 2)(x, table=table)

    assert float(strategy.run(step, (np.array([0, 1, 1, 2]), np.array([1.0, 10.0, 100.0])))) == 60.5


def test_on_the_host_it_is_a_plain_loop():
    calls = []

    total = rx.accumulate(lambda x: calls.append(x.tolist()) or x.sum(), 2)(np.arange(4.0))

    assert calls == [[0, 1], [2, 3]]
    assert float(total) == 3.0


def test_rows_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match=r"argument \[1\]\['y'\]  7 rows = 2 x 3 \+ 1 left over"):
        rx.accumulate(lambda x, y: x, 2)(np.ones(8), {"y": np.ones(7)})
    with pytest.raises(ValueError, match="a scalar"):
        rx.accumulate(lambda x: x, 2)(1.0)
    with pytest.raises(ValueError, match="at least one microbatch"):
        rx.accumulate(lambda x: x, 0)
    for wrong in ((3, 2), (len, 2.5), (len, "2"), (len, 2, "max")):
        with pytest.raises(ValueError, match="does not say what to do"):
            rx.accumulate(*wrong)
