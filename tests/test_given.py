"""A step that is given several batches: each value's rows are those of the batch that it was computed from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

A = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
B = np.array([10.0, 20.0, 40.0, 80.0, 160.0], np.float32)


@functools.cache
def mirrored(eager=False):
    return rx.MirroredStrategy(jax.devices()[:3], eager=eager)


def batch(strategy, *rows):
    """One element: over 3 replicas, 4 rows and 5 rows both take blocks of 2."""
    return next(iter(strategy.distribute_dataset(list(rows))))


@pytest.fixture(params=[False, True], ids=["compiled", "eager"])
def strategy(request):
    return mirrored(request.param)


def means(a, b):
    return rx.mean(a * 2), jax.value_and_grad(lambda weight: rx.mean(weight * jnp.sin(b) + b))(1.0)


def parts(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def test_each_mean_is_over_the_rows_of_its_batch(strategy):
    found = strategy.reduce("mean", strategy.run(means, (batch(strategy, A), batch(strategy, B))))

    expected = (A.mean() * 2, ((np.sin(B) + B).mean(), np.sin(B).mean()))
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-6)


def test_each_result_has_the_rows_of_its_batch(strategy):
    def step(a, b):
        return b * 2, jnp.where(rx.valid_rows(a), a, 0)

    doubled, kept = strategy.run(step, (batch(strategy, A), batch(strategy, B)))

    assert parts(strategy, doubled) == [[20.0, 40.0], [80.0, 160.0], [320.0]]
    assert parts(strategy, kept) == [[1.0, 2.0], [4.0], [8.0]]


def test_steps_that_share_a_program_each_have_their_batch():
    strategy = mirrored()

    @rx.function
    def both(a, b):
        return [strategy.reduce("mean", strategy.run(rx.mean, (x,))) for x in (b, a)]

    def step(context, a, b):
        context.set_last_step_output("b", strategy.run(rx.mean, (b,)), "mean")

    pairs = [(batch(strategy, A), batch(strategy, B)), (batch(strategy, B), batch(strategy, A))]

    assert [float(x) for x in both(*pairs[0])] == [B.mean(), A.mean()]
    assert float(strategy.run_steps(step, iter(pairs), 2).last_step_outputs["b"]) == A.mean()


def test_noise_beside_a_short_batch_is_not_padded(strategy):
    noise, longer = (np.arange(rows, dtype=np.float32) for rows in (6, 9))

    def step(a, noise, longer):
        return rx.mean(a + noise), rx.mean(noise), rx.mean(longer)

    given = batch(strategy, A), batch(strategy, noise), batch(strategy, longer)
    found = strategy.reduce("mean", strategy.run(step, given))

    on_the_rows_of_a = [0, 1, 2, 4]  # the noise that lies beside them: two rows on replica 0, one on the others
    expected = (A + noise[on_the_rows_of_a]).mean(), 2.5, 4.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rows_of_several_batches_must_be_padded_alike(strategy):
    def step(a, b):
        return rx.mean(a + b)

    a = batch(strategy, A)
    assert float(strategy.reduce("mean", strategy.run(step, (a, batch(strategy, 2 * A))))) == 3 * A.mean()

    text = r"(?s)`step` combines rows of several batches.*'a'  \[2, 1, 1\] of 2 rows.*'b'  \[2, 2, 1\].*zip\(a, b\)"
    with pytest.raises(rx.LocalityError, match=text):
        strategy.run(step, (a, batch(strategy, B)))
    with pytest.raises(rx.LocalityError, match="several batches"):
        strategy.run(lambda a, b: a + b, (a, batch(strategy, B)))
    with pytest.raises(rx.LocalityError, match=r"several batches"):
        strategy.run(lambda a, b: (a * rx.valid_rows()).sum() + rx.mean(b), (a, batch(strategy, B)))


def test_what_cannot_be_followed_must_be_padded_alike():
    strategy = mirrored()

    def step(a, b):
        return jax.jit(lambda b: rx.mean(b))(b)

    a = batch(strategy, A)
    assert float(strategy.reduce("mean", strategy.run(step, (a, batch(strategy, 2 * A))))) == 2 * A.mean()
    with pytest.raises(rx.LocalityError, match="out of sight"):
        strategy.run(step, (a, batch(strategy, B)))
    steps = iter([(a, a), (a, batch(strategy, B))])
    with pytest.raises(rx.LocalityError, match="out of sight"):
        strategy.run_steps(lambda _, *inputs: strategy.run(step, inputs), steps, 2)


def test_to_ask_about_one_batch_is_not_to_ask_about_another(strategy):
    def step(a, b):
        return rx.mean(a) + b.mean()

    a, pair = batch(strategy, A), batch(strategy, (A, A))

    assert float(strategy.reduce("mean", strategy.run(lambda x, y: rx.mean(x) + 0 * y.max(), pair))) == A.mean()
    with pytest.raises(rx.LocalityError, match=r"`step` combines the rows of a padded batch"):
        strategy.run(step, (a, batch(strategy, B)))


def test_a_step_that_would_average_padding_is_refused_at_the_first_batch(strategy):
    full = next(iter(strategy.distribute_dataset(rx.data.from_arrays(np.arange(7.0), batch_size=6))))

    with pytest.raises(rx.LocalityError, match="this batch is full; the last one of the dataset is short"):
        strategy.run(lambda x: x.mean(), (full,))
