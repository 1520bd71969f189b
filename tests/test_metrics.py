"""Losses and metrics that count each real example once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax import data, metrics
from replicax._errors import ContextError, InputError
from replicax._losses import compute_average_loss, mean, scale_regularization_loss

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(11, 4)).astype(np.float32)
SCORES[:, 3] = [
    0.02,
    0.9,
    0.4,
    0.62,
    0.62,
    0.1,
    0.3,
    0.81,
    0.55,
    0.55,
    0.97,
]  # probabilities, none on the edge of a bin
LABELS = RNG.integers(0, 4, size=11).astype(np.int32)


@functools.cache
def mirrored(replicas):
    return rx.MirroredStrategy(jax.devices()[:replicas])


def over_replicas(strategy, step, batch):
    """The mean over the replicas of what `step` returns for one global batch."""
    (element,) = strategy.distribute_dataset([batch])
    return float(strategy.reduce("mean", strategy.run(step, args=(element,)), axis=None))


# -- rx.mean


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), replicas=st.integers(2, 4), trailing=st.integers(1, 3))
def test_the_mean_over_replicas_is_the_mean_over_real_rows(rows, replicas, trailing):
    strategy = mirrored(replicas)
    values = np.random.default_rng(rows).normal(size=(9, trailing)).astype(np.float32)

    elements = list(strategy.distribute_dataset([values, values[:rows]]))

    for element, expected in zip(elements, (values.mean(), values[:rows].mean()), strict=True):
        found = strategy.reduce("mean", strategy.run(mean, args=(element,)), axis=None)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_without_padding_it_is_the_mean():
    assert float(mean(np.array([1.0, 2.0, 6.0]))) == 3.0
    assert over_replicas(mirrored(2), mean, np.arange(8.0)) == 3.5


def test_integers_are_averaged_as_floats():
    assert over_replicas(mirrored(2), mean, np.array([1, 2, 4])) == pytest.approx(7 / 3)


def test_its_gradients_averaged_over_replicas_are_those_of_the_whole_batch():
    x = SCORES[:5, 0]

    def loss(w, rows):
        return mean(jnp.square(w * rows - 1.0))

    (element,) = mirrored(4).distribute_dataset([x])
    gradient = mirrored(4).run(lambda rows: jax.grad(loss)(2.0, rows), args=(element,))

    expected = jax.grad(lambda w: jnp.square(w * x - 1.0).mean())(2.0)
    np.testing.assert_allclose(mirrored(4).reduce("mean", gradient, axis=None), expected, rtol=1e-6)


def test_padding_that_would_be_infinite_does_not_reach_the_gradient():
    def loss(w, rows):
        return mean(jnp.log(w * rows))

    (element,) = mirrored(4).distribute_dataset([np.array([1.0, 2.0])])
    gradient = mirrored(4).run(lambda rows: jax.grad(loss)(2.0, rows), args=(element,))

    assert float(mirrored(4).reduce("mean", gradient, axis=None)) == pytest.approx(0.5)


@pytest.mark.parametrize("call", [mean, compute_average_loss])
def test_a_mean_taken_already_is_refused(call):
    with pytest.raises(InputError, match="(?s)got a scalar.*float32.*before any `mean`"):
        over_replicas(mirrored(2), lambda x: call(x.mean()), np.arange(3.0))


def test_values_of_other_rows_than_the_batch_are_refused():
    with pytest.raises(InputError, match=r"(?s)rows are not those of the batch.*float32\[8\].*x.reshape\(rows, -1\)"):
        over_replicas(mirrored(2), lambda x: mean(x.reshape(-1)), np.zeros((3, 4)))


# -- losses of tf.distribute


def test_average_losses_summed_over_replicas_are_the_mean_of_the_batch():
    (element,) = mirrored(4).distribute_dataset([SCORES[:, 0]])

    loss = mirrored(4).run(compute_average_loss, args=(element,))

    np.testing.assert_allclose(mirrored(4).reduce("sum", loss, axis=None), SCORES[:, 0].mean(), rtol=1e-5)


def test_the_global_batch_size_may_be_given():
    (element,) = mirrored(2).distribute_dataset([np.array([1.0, 2.0, 3.0])])

    loss = mirrored(2).run(lambda x: compute_average_loss(x, global_batch_size=10), args=(element,))

    assert float(mirrored(2).reduce("sum", loss, axis=None)) == pytest.approx(0.6)


def test_weights_scale_the_losses_of_their_rows():
    assert float(compute_average_loss(np.array([1.0, 2.0]), sample_weight=np.array([1.0, 3.0]))) == 3.5
    rows = np.ones((2, 3))
    assert float(compute_average_loss(rows, sample_weight=np.array([1.0, 0.0]), global_batch_size=3)) == 1.0


def test_a_batch_of_no_rows_has_no_loss():
    assert float(compute_average_loss(np.zeros(0), global_batch_size=0)) == 0.0


@pytest.mark.parametrize("size", [-1, 2.5, np.array([1, 2]), True], ids=["negative", "fraction", "several", "bool"])
def test_a_batch_size_must_count_rows(size):
    with pytest.raises(ValueError, match="does not count rows") as caught:
        compute_average_loss(np.ones(2), global_batch_size=size)
    assert isinstance(caught.value, TypeError)  # which tf.distribute raises for all but the negative one


def test_a_batch_size_may_be_traced():
    assert float(jax.jit(lambda n: compute_average_loss(np.ones(2), global_batch_size=n))(4)) == 0.5


def test_a_regularization_loss_is_shared_by_the_replicas():
    share = mirrored(4).run(lambda: scale_regularization_loss(np.array([1.0, 3.0])))

    assert float(share) == 1.0


@pytest.mark.parametrize("call", [compute_average_loss, scale_regularization_loss])
def test_a_replicas_part_needs_a_replica(call):
    with mirrored(2).scope(), pytest.raises(ContextError, match="expected in replica context"):
        call(np.ones(2))


# -- metrics

CLASSES = {
    metrics.Mean: (lambda x, y: (x[:, 0],), lambda x, y: x[:, 0].mean()),
    metrics.Sum: (lambda x, y: (x[:, 0],), lambda x, y: x[:, 0].sum()),
    metrics.Accuracy: (lambda x, y: (x, y), lambda x, y: (x.argmax(1) == y).mean()),
    metrics.MeanSquaredError: (lambda x, y: (x[:, 0], x[:, 1]), lambda x, y: np.square(x[:, 0] - x[:, 1]).mean()),
    metrics.RootMeanSquaredError: (
        lambda x, y: (x[:, 0], x[:, 1]),
        lambda x, y: np.sqrt(np.square(x[:, 0] - x[:, 1]).mean()),
    ),
    metrics.MeanAbsoluteError: (lambda x, y: (x, x * 2), lambda x, y: np.abs(x).mean()),
    metrics.TopKAccuracy: (
        lambda x, y: (x, y),
        lambda x, y: np.mean([label in np.argsort(-row)[:2] for row, label in zip(x, y, strict=True)]),
    ),
}
OPTIONS = {metrics.TopKAccuracy: {"k": 2}}


def area_by_pairs(scores, labels):
    """The part of all pairs of a positive and a negative in which the positive has the higher score."""
    positive, negative = scores[labels][:, None], scores[~labels][None]
    return ((positive > negative) + 0.5 * (positive == negative)).mean()


YES_OR_NO = {
    metrics.BinaryAccuracy: lambda p, y: ((p > 0.5) == y).mean(),
    metrics.Precision: lambda p, y: y[p > 0.5].mean(),
    metrics.Recall: lambda p, y: (p > 0.5)[y].mean(),
    metrics.F1: lambda p, y: 2 * (y & (p > 0.5)).sum() / (y.sum() + (p > 0.5).sum()),
    metrics.AUC: area_by_pairs,
}
CLASSES |= {
    kind: (lambda x, y: (x[:, 3], y == 1), lambda x, y, exact=exact: exact(x[:, 3], y == 1))
    for kind, exact in YES_OR_NO.items()
}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_metrics_over_short_batches_are_those_of_all_rows(replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        made = {kind: kind(**OPTIONS.get(kind, {})) for kind in CLASSES}

    def step(x, y):
        for kind, metric in made.items():
            metric.update(*CLASSES[kind][0](x, y))

    for x, y in strategy.distribute_dataset(data.from_arrays((SCORES, LABELS), batch_size=5)):
        strategy.run(step, args=(x, y))

    found = {kind.__name__: float(metric.result()) for kind, metric in made.items()}
    expected = {kind.__name__: exact(SCORES, LABELS) for kind, (_, exact) in CLASSES.items()}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_metric_as_a_value_gives_the_same(kind):
    inputs, expected = CLASSES[kind]
    state = kind.empty(**OPTIONS.get(kind, {}))

    for rows in (slice(0, 4), slice(4, 11)):
        state = state.update(*inputs(SCORES[rows], LABELS[rows]))

    np.testing.assert_allclose(state.compute(), expected(SCORES, LABELS), rtol=1e-5)


@settings(deadline=None)
@given(cut=st.integers(0, 11))
def test_parts_merged_are_the_whole(cut):
    whole = metrics.Accuracy.empty().update(SCORES, LABELS)

    parts = metrics.Accuracy.empty().update(SCORES[:cut], LABELS[:cut])
    parts = parts.merge(metrics.Accuracy.empty().update(SCORES[cut:], LABELS[cut:]))

    assert float(parts.compute()) == pytest.approx(float(whole.compute()))


def test_a_state_goes_through_a_step_and_is_reduced_there():
    strategy = mirrored(4)

    def step(so_far, x):
        here = metrics.Mean.empty().update(x)
        return so_far.merge(rx.get_replica_context().all_reduce("sum", here))

    so_far = metrics.Mean.empty()
    for x in strategy.distribute_dataset([np.arange(8.0), np.array([100.0])]):
        so_far = strategy.run(step, args=(so_far, x))

    assert float(so_far.compute()) == pytest.approx(128 / 9)


def test_reset_forgets():
    metric = metrics.Mean()
    metric.update(np.ones(3))

    metric.reset()
    assert np.isnan(metric.result())
    metric.update(np.full(3, 5.0))

    assert float(metric.result()) == 5.0


def test_reset_forgets_on_every_replica():
    with mirrored(2).scope():
        metric = metrics.Sum()
    for _ in range(2):
        metric.reset()
        (x,) = mirrored(2).distribute_dataset([np.arange(5.0)])
        mirrored(2).run(lambda x: metric.update(x), args=(x,))

    assert float(metric.result()) == 10.0


def test_a_mask_and_weights_say_what_counts():
    values = np.array([[1.0, 2.0], [3.0, np.nan]])

    masked = metrics.Mean.empty().update(values, mask=np.array([[1, 1], [1, 0]]))
    weighted = metrics.Mean.empty().update(np.array([1.0, 2.0]), sample_weight=np.array([1.0, 3.0]))
    by_row = metrics.Mean.empty().update(values, mask=np.array([True, False]))

    assert float(masked.compute()) == 2.0
    assert float(weighted.compute()) == 1.75
    assert float(by_row.compute()) == 1.5


def test_a_scalar_counts_as_one_value():
    state = metrics.Mean.empty().update(1.0).update(np.float32(4.0))

    assert float(state.compute()) == 2.5


def test_weights_count_in_every_kind_of_metric():
    scores, labels = np.array([0.9, 0.8, 0.3, 0.1]), np.array([1, 0, 1, 0])
    weights = np.array([2.0, 1.0, 3.0, 0.0])

    found = {
        kind: float(kind.empty().update(scores, labels, sample_weight=weights).compute())
        for kind in (metrics.Precision, metrics.Recall, metrics.F1, metrics.AUC, metrics.BinaryAccuracy)
    }

    assert [round(value, 4) for value in found.values()] == [0.6667, 0.4, 0.5, 0.4, 0.3333]


def test_a_metric_of_nothing_is_not_a_number():
    nothing_found = metrics.Precision.empty().update(np.array([0.1, 0.2]), np.array([1, 0]))
    one_class = metrics.AUC.empty().update(np.array([0.1, 0.2]), np.array([1, 1]))

    assert np.isnan(nothing_found.compute()) and np.isnan(one_class.compute())


def test_metrics_take_in_what_others_have_seen():
    with mirrored(2).scope():
        one, other = metrics.AUC(), metrics.AUC()
    whole = metrics.AUC.empty().update(SCORES[:, 3], LABELS == 1)
    one.update(SCORES[:4, 3], LABELS[:4] == 1)
    other.update(SCORES[4:7, 3], LABELS[4:7] == 1)

    one.merge(other)
    one.merge(metrics.AUC.empty().update(SCORES[7:, 3], LABELS[7:] == 1))

    assert float(one.result()) == pytest.approx(float(whole.compute()))


def test_states_of_different_metrics_are_not_merged():
    with pytest.raises(InputError, match=r"(?s)another metric.*Mean\(\).*Sum\(\)"):
        metrics.Mean.empty().merge(metrics.Sum.empty())
    with pytest.raises(InputError, match=r"(?s)TopKAccuracy\(k=1\).*TopKAccuracy\(k=2\)"):
        metrics.TopKAccuracy(k=1).merge(metrics.TopKAccuracy(k=2))


ROWS, COLUMN = np.zeros(4, np.float32), np.zeros((4, 1), np.float32)


@pytest.mark.parametrize(
    ("kind", "inputs", "text"),
    [
        (
            metrics.MeanSquaredError,
            (COLUMN, ROWS),
            r"(?s)different shape.*float32\[4,1\].*float32\[4\].*predictions\[:, 0",
        ),
        (metrics.AUC, (COLUMN, ROWS), "different shape"),
        (metrics.F1, (COLUMN, ROWS), "different shape"),
        (metrics.Accuracy, (ROWS, COLUMN), "different shape"),
        (metrics.Accuracy, (np.eye(4), np.eye(4)), r"(?s)no label for each row.*labels.argmax\(-1\)"),
        (metrics.Accuracy, (np.eye(4), np.zeros((4, 1), int)), r"(?s)no label for each row.*labels\[:, 0\]"),
        (metrics.TopKAccuracy, (np.eye(4), np.eye(4)), "(?s)one class for each row.*argmax"),
    ],
)
def test_predictions_and_labels_that_would_be_spread_over_each_other_are_refused(kind, inputs, text):
    with pytest.raises(InputError, match=text):
        kind.empty().update(*inputs)


@pytest.mark.parametrize("name", ["mask", "sample_weight"])
@pytest.mark.parametrize("shape", [(3,), (4, 1, 1), (4, 2)])
def test_weights_that_do_not_fit_are_refused(name, shape):
    with pytest.raises(InputError, match=rf"(?s)`{name}` of a shape.*{name} .*values +\[4, 3\]"):
        metrics.Mean.empty().update(np.ones((4, 3)), **{name: np.ones(shape)})


def test_losses_and_weights_must_fit():
    with pytest.raises(
        InputError, match=r"(?s)`sample_weight` of a shape.*\[2, 1\].*\[2\].*sample_weight.reshape\(-1\)"
    ):
        compute_average_loss(np.ones(2), sample_weight=np.ones((2, 1)))


def test_what_a_metric_does_not_take_is_refused_by_its_public_name():
    with pytest.raises(TypeError, match=r"rx.metrics.Accuracy.update\(...\)` takes predictions, labels, and got 1"):
        metrics.Accuracy.empty().update(ROWS)
    with pytest.raises(TypeError, match="rx.metrics.Mean has no option k"):
        metrics.Mean(k=3)
    with pytest.raises(InputError, match="nothing is among the best 0"):
        metrics.TopKAccuracy.empty(k=0).update(np.eye(2), np.arange(2))


def test_a_metric_says_what_it_is():
    metric = metrics.TopKAccuracy(k=3, name="top 3")

    assert repr(metric) == "<rx.metrics.TopKAccuracy(k=3) 'top 3'>"
    assert repr(metric.state()) == "<rx.metrics.State of TopKAccuracy(k=3)>"


def test_predicted_classes_may_be_given_instead_of_scores():
    assert float(metrics.Accuracy.empty().update(np.array([1, 2, 3]), np.array([1, 2, 0])).compute()) == pytest.approx(
        2 / 3
    )


def test_a_score_that_is_no_number_is_not_among_the_best():
    scores = np.array([[0.1, np.nan], [0.1, 0.9]])

    assert float(metrics.TopKAccuracy.empty(k=1).update(scores, np.array([1, 1])).compute()) == 0.5


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["as-written", "compiled"])
def test_counting_goes_on_where_a_float_stands_still(jit):
    @jit
    def count_on(state):
        return jax.lax.fori_loop(0, 1000, lambda i, s: s.update(1.0), state)

    state = metrics.State(jnp.array([[2.0**24, 0.0], [2.0**24, 0.0]]), metrics.Sum.empty().measure)

    counted = np.asarray(count_on(state).sums, np.float64).sum(axis=1)

    assert counted.tolist() == [2.0**24 + 1000] * 2


def test_counting_outside_a_step_loses_nothing_when_replicas_share_it():
    with mirrored(3).scope():
        metric = metrics.Sum()
    metric.merge(metrics.State(jnp.array([[2.0**24 + 2, 1.0], [2.0**24 + 2, 1.0]]), metric.measure))

    for _ in range(20):
        metric.update(1.0)

    shares = np.asarray(metric.variable.values, np.float64)
    np.testing.assert_allclose(shares.sum(axis=(0, 2)), [2.0**24 + 23] * 2, atol=1e-4)


def test_a_metric_in_a_step_compiles_once(compilations):
    strategy = mirrored(2)
    with strategy.scope():
        metric = metrics.Accuracy()
    batches = list(strategy.distribute_dataset(data.from_arrays((SCORES, LABELS), batch_size=4)))

    def step(x, y):
        metric.update(x, y)

    strategy.run(step, args=batches[0])
    with compilations() as names:
        for batch in batches[1:]:
            strategy.run(step, args=batch)

    assert names == []
