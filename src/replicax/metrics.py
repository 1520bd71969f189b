"""What has been measured so far, over all steps and replicas, each real example counted once?

A metric is a fraction: a numerator and a denominator that are added up and divided only when somebody looks. Such a
fraction may be held in two ways. As a value, `State`, which a functional step takes and returns; and in a variable, by
an object that a step updates by closure. Padding rows of a short batch are left out without being told to.
"""

# Why are there two numbers for each sum?
#
# A float32 cannot count past 2**24: adding 1 to 16,777,216 changes nothing, so the accuracy of a long run would stand
# still. 64-bit sums are switched off in JAX unless a user asks for them. So each sum is held as a value and what its
# rounding has lost so far (Knuth's TwoSum), which counts to 2**48. Adding two such pairs is exact enough, and adding
# them entry by entry, as a sum over replicas does, is right too.

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from replicax._errors import InputError, message
from replicax._losses import valid_and_total, weights_along
from replicax._variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Measure:
    """Which metric it is and with which options: what two states must have in common to be merged."""

    kind: type[Metric]
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options)})"

    def sums_of(self, inputs: tuple[Any, ...], mask: Any, sample_weight: Any) -> jax.Array:
        """Numerator and denominator of these examples, in the form of `State.sums`."""
        call = f"rx.metrics.{self.kind.__name__}.update(...)"
        options = dict(self.options)
        self._check(call, inputs, options)
        values = jnp.asarray(self.kind.values(*inputs, **options), jnp.float32)
        weights = _weights(call, values, len(self.kind.bins), mask, sample_weight)
        if self.kind.counts is not None:
            weights = weights * self.kind.counts(*inputs, **options)
        summed = tuple(range(values.ndim - len(self.kind.bins)))
        added = jnp.stack([jnp.where(weights == 0, 0, values * weights).sum(summed), weights.sum(summed)])
        return jnp.stack([added, jnp.zeros_like(added)], axis=1)

    def _check(self, call: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        signature = inspect.signature(self.kind.values)
        try:
            signature.bind(*inputs, **options)
        except TypeError as error:
            wanted = ", ".join(name for name in signature.parameters if name not in options)
            raise TypeError(f"`{call}` takes {wanted}, and got {len(inputs)} of them") from error


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class State:
    """A metric as a value, for steps that take their state and return it.

    It is a pytree of one array. Make it with `empty()` of a metric, e.g. ``rx.metrics.Mean.empty()``. Inside a step on
    several replicas each has the state of its own rows: sum it over the replicas before merging it into a running one.

    >>> import jax, numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> def step(so_far, x):
    ...     here = rx.metrics.Mean.empty().update(x)
    ...     return so_far.merge(rx.get_replica_context().all_reduce("sum", here))
    >>> so_far = rx.metrics.Mean.empty()
    >>> for x in strategy.distribute_dataset([np.arange(4.0), np.array([9.0])]):
    ...     so_far = strategy.run(step, args=(so_far, x))
    >>> float(so_far.compute())
    3.0
    """

    sums: jax.Array
    """``[[numerator, its rounding], [denominator, its rounding]]``, each a number or, for some metrics, one per bin."""
    measure: Measure = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"<rx.metrics.State of {self.measure}>"

    def update(self, *inputs: Any, mask: Any = None, sample_weight: Any = None) -> State:
        """The state after these examples as well.

        Args:
          inputs: What the metric is about, e.g. predictions and labels, with the examples along axis 0.
          mask: Which values count; padding of a short batch does not count in any case.
          sample_weight: How much each value counts.
        """
        return State(_plus(self.sums, self.measure.sums_of(inputs, mask, sample_weight)), self.measure)

    def merge(self, other: State) -> State:
        """The state after all examples of both."""
        if self.measure != other.measure:
            raise _other_measure(self.measure, other.measure)
        return State(_plus(self.sums, other.sums), self.measure)

    def compute(self) -> jax.Array:
        """The metric over everything seen so far; NaN for a mean over nothing."""
        numerator, denominator = self.sums.sum(axis=1)
        return self.measure.kind.finish(numerator, denominator)


class Metric:
    """A metric in a variable: a step updates it, the program around the steps reads it.

    Make it under ``strategy.scope()``. Each replica adds up its own rows without communication; `result` adds up the
    replicas.

    >>> import jax, numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     mean = rx.metrics.Mean()
    >>> def step(x):
    ...     mean.update(x)
    >>> for x in strategy.distribute_dataset([np.arange(4.0), np.array([9.0])]):
    ...     strategy.run(step, args=(x,))
    >>> float(mean.result())
    3.0

    One of your own says what is measured of each example (`values`), how often it counts if not once (`counts`), and how
    the sum of the values and the sum of the counts become the result (`finish`).
    """

    values: ClassVar[Callable[..., Any]]
    counts: ClassVar[Callable[..., Any] | None] = None
    finish: ClassVar[Callable[[jax.Array, jax.Array], jax.Array]] = staticmethod(jnp.divide)
    bins: ClassVar[tuple[int, ...]] = ()
    """The trailing axes of `values` that are not summed over."""

    def __init__(self, name: str | None = None, **options: Any) -> None:
        self.name = name or type(self).__name__
        empty = self.empty(**options)
        self.measure = empty.measure
        self.variable = Variable(empty.sums, name=self.name, synchronization="on_read", aggregation="sum")

    def __repr__(self) -> str:
        return f"<rx.metrics.{self.measure} {self.name!r}>"

    @classmethod
    def empty(cls, **options: Any) -> State:
        """The metric as a value, before any example."""
        unknown = options.keys() - inspect.signature(cls.values).parameters.keys()
        if unknown:
            raise TypeError(f"rx.metrics.{cls.__name__} has no option {', '.join(sorted(unknown))}")
        return State(jnp.zeros((2, 2, *cls.bins), jnp.float32), Measure(cls, tuple(sorted(options.items()))))

    def state(self) -> State:
        """The metric as a value. In a step, of this replica's part."""
        return State(self.variable.value, self.measure)

    def update(self, *inputs: Any, mask: Any = None, sample_weight: Any = None) -> None:
        """Takes these examples in as well. See `State.update` for the arguments."""
        self._keep(self.state().update(*inputs, mask=mask, sample_weight=sample_weight))

    def merge(self, other: Metric | State) -> None:
        """Takes in what another one has seen: of another part of the data, say, or before the program was restarted."""
        self._keep(self.state().merge(other.state() if isinstance(other, Metric) else other))

    def result(self) -> jax.Array:
        """The metric over everything seen so far; NaN for a mean over nothing. In a step, of this replica's part."""
        return self.state().compute()

    def reset(self) -> None:
        """Forgets what was seen, for the next epoch."""
        self.variable.assign(jnp.zeros_like(self.variable.value))

    def _keep(self, state: State) -> None:
        self.variable.assign(_divisible(state.sums, self.variable.strategy.num_replicas_in_sync))


# -- what is measured of each example


def _itself(values: Any) -> jax.Array:
    return jnp.asarray(values)


def _correct(predictions: Any, labels: Any) -> jax.Array:
    predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
    if predictions.ndim == labels.ndim + 1:
        predictions = predictions.argmax(axis=-1)
    elif predictions.ndim > 1 and jnp.issubdtype(predictions.dtype, jnp.floating):
        raise _scores_like_labels(predictions, labels)
    return jnp.equal(*_alike(predictions, labels))


def _correct_decision(scores: Any, labels: Any, threshold: float = 0.5) -> jax.Array:
    scores, labels = _alike(scores, labels)
    return _decided(scores, threshold) == _decided(labels)


def _among_best(scores: Any, labels: Any, k: int = 5) -> jax.Array:
    scores, labels = jnp.asarray(scores), jnp.asarray(labels)
    if operator.index(k) < 1:
        raise InputError(f"`rx.metrics.TopKAccuracy(k={k!r})`: nothing is among the best {k}. Give 1 or more.")
    if scores.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise _no_label_for_each(scores, labels)
    of_label = jnp.take_along_axis(scores, labels[..., None], axis=-1)
    return ((scores > of_label).sum(axis=-1) < k) & ~jnp.isnan(of_label[..., 0])


def _squared_error(predictions: Any, targets: Any) -> jax.Array:
    return jnp.square(jnp.subtract(*_alike(predictions, targets)))


def _absolute_error(predictions: Any, targets: Any) -> jax.Array:
    return jnp.abs(jnp.subtract(*_alike(predictions, targets)))


def _labelled(predictions: Any, labels: Any, threshold: float = 0.5) -> jax.Array:
    return _decided(_alike(predictions, labels)[1])


def _found(predictions: Any, labels: Any, threshold: float = 0.5) -> jax.Array:
    return _decided(_alike(predictions, labels)[0], threshold)


def _found_plus_labelled(predictions: Any, labels: Any, threshold: float = 0.5) -> jax.Array:
    """2 for a positive that was found, so that F1 is a fraction: 2 TP / (positives predicted + positives)."""
    predictions, labels = _alike(predictions, labels)
    return _decided(predictions, threshold).astype(jnp.int32) + _decided(labels)


def _found_and_labelled(predictions: Any, labels: Any, threshold: float = 0.5) -> jax.Array:
    return _found_plus_labelled(predictions, labels, threshold) == 2


_BINS = 199


def _labelled_in_each_bin(scores: Any, labels: Any) -> jax.Array:
    labels = _decided(_alike(scores, labels)[1])
    return jnp.broadcast_to(labels[..., None], (*labels.shape, _BINS))


def _binned(scores: Any, labels: Any) -> jax.Array:
    """1 for the bin that a score lies in."""
    bin_of = jnp.clip(jnp.ceil(jnp.asarray(scores) * _BINS) - 1, 0, _BINS - 1)
    return jax.nn.one_hot(bin_of.astype(jnp.int32), _BINS)


def _decided(scores: Any, threshold: float = 0.5) -> jax.Array:
    """Which are positive: those above the threshold, of scores; those that are true, of decisions and labels."""
    scores = jnp.asarray(scores)
    return scores if scores.dtype == jnp.bool_ else scores > threshold


def _numerator(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    return numerator


def _root(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    return jnp.sqrt(numerator / denominator)


def _area(positives: jax.Array, all_: jax.Array) -> jax.Array:
    """The part of all pairs of a positive and a negative in which the positive lies in a higher bin."""
    negatives = all_ - positives
    below = jnp.cumsum(negatives) - negatives / 2  # a pair in one bin is half right
    return (positives * below).sum() / (positives.sum() * negatives.sum())


# -- the metrics


class Mean(Metric):
    """The mean of all values: of losses per example, say. A scalar counts as one value."""

    values = staticmethod(_itself)


class Sum(Metric):
    """The sum of all values."""

    values = staticmethod(_itself)
    finish = staticmethod(_numerator)


class Accuracy(Metric):
    """How often predictions are right. They are classes, or scores for each class along one more axis than the labels.

    >>> import numpy as np, replicax as rx
    >>> scores, labels = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]]), np.array([1, 0, 0])
    >>> print(f"{rx.metrics.Accuracy.empty().update(scores, labels).compute():.3f}")
    0.667
    """

    values = staticmethod(_correct)


class BinaryAccuracy(Metric):
    """How often a yes or no is right: one score for each label, which says yes above `threshold`. Of logits that is 0.

    >>> import numpy as np, replicax as rx
    >>> rx.metrics.BinaryAccuracy.empty().update(np.array([0.9, 0.2, 0.6, 0.1]), np.array([1, 0, 0, 0])).compute()
    Array(0.75, dtype=float32)
    """

    values = staticmethod(_correct_decision)

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold)


class TopKAccuracy(Metric):
    """How often the label is among the `k` classes with the highest scores."""

    values = staticmethod(_among_best)

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(name, k=k)


class MeanSquaredError(Metric):
    """The mean of squared differences between predictions and targets."""

    values = staticmethod(_squared_error)


class RootMeanSquaredError(Metric):
    """The square root of the mean of squared differences between predictions and targets."""

    values = staticmethod(_squared_error)
    finish = staticmethod(_root)


class MeanAbsoluteError(Metric):
    """The mean of absolute differences between predictions and targets."""

    values = staticmethod(_absolute_error)


class Precision(Metric):
    """Of what was predicted positive, the part that is. Predictions are decisions, or scores compared with `threshold`.

    >>> import numpy as np, replicax as rx
    >>> scores, labels = np.array([0.9, 0.8, 0.3, 0.1]), np.array([1, 0, 1, 0])
    >>> float(rx.metrics.Precision.empty().update(scores, labels).compute())
    0.5
    """

    values = staticmethod(_labelled)
    counts = staticmethod(_found)

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold)


class Recall(Metric):
    """Of what is positive, the part that was predicted so. Predictions are as in `Precision`."""

    values = staticmethod(_found)
    counts = staticmethod(_labelled)

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold)


class F1(Metric):
    """The harmonic mean of precision and recall. Predictions are as in `Precision`."""

    values = staticmethod(_found_and_labelled)
    counts = staticmethod(_found_plus_labelled)

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(name, threshold=threshold)


class AUC(Metric):
    """The area under the receiver operating characteristic: how well scores from 0 to 1 tell positives from negatives.

    Scores are counted in 199 bins of equal width, so that the state stays small and parts of the data can be merged.
    Those in one bin count as equal. Give probabilities, not logits: what lies outside goes to the bin at that end.

    >>> import numpy as np, replicax as rx
    >>> scores, labels = np.array([0.9, 0.4, 0.6, 0.1]), np.array([1, 1, 0, 0])
    >>> float(rx.metrics.AUC.empty().update(scores, labels).compute())
    0.75
    """

    bins = (_BINS,)
    values = staticmethod(_labelled_in_each_bin)
    counts = staticmethod(_binned)
    finish = staticmethod(_area)


# -- shapes and weights


def _weights(call: str, values: jax.Array, bins: int, mask: Any, sample_weight: Any) -> jax.Array:
    """How much each value counts: nothing where it is padding or masked."""
    weights = jnp.ones(values.shape, jnp.float32)
    shape = values.shape[: values.ndim - bins]
    valid = valid_and_total(values, call)[0] if shape else None
    for name, factor in (("valid", valid), ("mask", mask), ("sample_weight", sample_weight)):
        if factor is not None:
            along = weights_along(call, name, jnp.asarray(factor, jnp.float32), shape)
            weights = weights * along.reshape(along.shape + (1,) * bins)
    return weights


def _alike(predictions: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    """Both as arrays, of one shape. ``[8, 1]`` and ``[8]`` would be compared each with each."""
    predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
    if predictions.shape != labels.shape:
        raise _other_shape(predictions, labels)
    return predictions, labels


def _plus(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two pairs (value, rounding), with what rounding loses kept."""
    high = a[:, 0] + b[:, 0]
    back = high - a[:, 0]
    lost = (a[:, 0] - (high - back)) + (b[:, 0] - back)
    return jnp.stack([high, lost + a[:, 1] + b[:, 1]], axis=1)


def _divisible(sums: jax.Array, replicas: int) -> jax.Array:
    """The same pairs, so split that nothing is lost when code outside a step divides them among the replicas.

    A third of a float32 is rounded, and so is the sum of three thirds. The share is cut to so many bits that the sum of
    the shares is exact; what is cut off joins the rounding.
    """
    if replicas == 1:
        return sums
    share = jax.lax.reduce_precision(sums[:, 0] / replicas, exponent_bits=8, mantissa_bits=23 - replicas.bit_length())
    high = share * replicas
    return jnp.stack([high, sums[:, 1] + (sums[:, 0] - high)], axis=1)


# -- errors


def _kinds(predictions: jax.Array, labels: jax.Array) -> list[str]:
    return [f"predictions  {predictions.aval.str_short()}", f"labels       {labels.aval.str_short()}"]


def _other_shape(predictions: jax.Array, labels: jax.Array) -> InputError:
    return InputError(
        message(
            "`metric.update(predictions, labels)` got arrays of different shape",
            _kinds(predictions, labels),
            "Each prediction is compared with its own label.",
            [
                "drop an axis of length 1: `predictions[:, 0]`, or `labels[:, 0]`",
                "turn one-hot labels into classes: `labels.argmax(-1)`",
            ],
        )
    )


def _scores_like_labels(predictions: jax.Array, labels: jax.Array) -> InputError:
    return InputError(
        message(
            "`rx.metrics.Accuracy.update(predictions, labels)` got scores, and no label for each row of them",
            _kinds(predictions, labels),
            "It takes scores for each class along one more axis than the labels have. Scores that are compared with "
            "labels one by one are hardly ever equal to them.",
            [
                "turn one-hot labels into classes: `labels.argmax(-1)`",
                "drop an axis of length 1: `labels[:, 0]`",
                "a yes or no for each score: `rx.metrics.BinaryAccuracy()`",
            ],
        )
    )


def _no_label_for_each(scores: jax.Array, labels: jax.Array) -> InputError:
    return InputError(
        message(
            "`rx.metrics.TopKAccuracy.update(scores, labels)` takes scores for each class and one class for each row",
            _kinds(scores, labels),
            "The classes stand along the last axis of the scores, and the labels count them from 0.",
            [
                "turn one-hot labels into classes: `labels.argmax(-1)`",
                "drop an axis of length 1: `labels[:, 0]`",
            ],
        )
    )


def _other_measure(one: Measure, other: Measure) -> InputError:
    return InputError(
        message(
            "`merge` got the state of another metric",
            [f"this one  {one}", f"that one  {other}"],
            "Numerators and denominators of different things cannot be added up.",
            ["merge states of one metric, made with the same options"],
        )
    )
