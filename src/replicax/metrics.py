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
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from replicax._losses import valid_and_total
from replicax._variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Measure:
    """What is measured of the examples, and how numerator and denominator become the result."""

    values: Callable[..., jax.Array]
    finish: Callable[[jax.Array, jax.Array], jax.Array]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *inputs: Any) -> jax.Array:
        return jnp.asarray(self.values(*inputs, **dict(self.options)), jnp.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sums"], meta_fields=["measure"])
@dataclasses.dataclass(frozen=True, eq=False)
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
    """``[[numerator, its rounding], [denominator, its rounding]]``."""
    measure: Measure

    def update(self, *inputs: Any, mask: Any = None, sample_weight: Any = None) -> State:
        """The state after these examples as well.

        Args:
          inputs: What the metric is about, e.g. predictions and labels, with the examples along axis 0.
          mask: Which values count; padding of a short batch does not count in any case.
          sample_weight: How much each value counts.
        """
        values = self.measure(*inputs)
        weights = _weights(values, mask, sample_weight)
        added = jnp.stack([jnp.where(weights == 0, 0, values * weights).sum(), weights.sum()])
        return State(_plus(self.sums, jnp.stack([added, jnp.zeros(2)], axis=1)), self.measure)

    def merge(self, other: State) -> State:
        """The state after all examples of both."""
        return State(_plus(self.sums, other.sums), self.measure)

    def compute(self) -> jax.Array:
        """The metric over everything seen so far; NaN for a mean over nothing."""
        numerator, denominator = self.sums.sum(axis=1)
        return self.measure.finish(numerator, denominator)


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
    """

    values: ClassVar[Callable[..., jax.Array]]
    finish: ClassVar[Callable[[jax.Array, jax.Array], jax.Array]] = staticmethod(jnp.divide)

    def __init__(self, name: str | None = None, **options: Any) -> None:
        self.name = name or type(self).__name__
        self.measure = self._measure(options)
        self.variable = Variable(
            jnp.zeros((2, 2), jnp.float32), name=self.name, synchronization="on_read", aggregation="sum"
        )

    @classmethod
    def empty(cls, **options: Any) -> State:
        """The metric as a value, before any example."""
        return State(jnp.zeros((2, 2), jnp.float32), cls._measure(options))

    @classmethod
    def _measure(cls, options: dict[str, Any]) -> Measure:
        return Measure(cls.values, cls.finish, tuple(sorted(options.items())))

    def update(self, *inputs: Any, mask: Any = None, sample_weight: Any = None) -> None:
        """Takes these examples in as well. See `State.update` for the arguments."""
        state = State(self.variable.value, self.measure)
        self.variable.assign(state.update(*inputs, mask=mask, sample_weight=sample_weight).sums)

    def result(self) -> jax.Array:
        """The metric over everything seen so far; NaN for a mean over nothing. In a step, of this replica's part."""
        return State(self.variable.value, self.measure).compute()

    def reset(self) -> None:
        """Forgets what was seen, for the next epoch."""
        self.variable.assign(jnp.zeros((2, 2), jnp.float32))


def _itself(values: Any) -> jax.Array:
    return jnp.asarray(values)


def _correct(predictions: Any, labels: Any) -> jax.Array:
    predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
    if predictions.ndim == labels.ndim + 1:
        predictions = predictions.argmax(axis=-1)
    return predictions == labels


def _among_best(predictions: Any, labels: Any, k: int = 5) -> jax.Array:
    predictions, labels = jnp.asarray(predictions), jnp.asarray(labels)
    of_label = jnp.take_along_axis(predictions, labels[..., None], axis=-1)
    return ((predictions > of_label).sum(axis=-1) < k) & ~jnp.isnan(of_label[..., 0])


def _squared_error(predictions: Any, targets: Any) -> jax.Array:
    return jnp.square(jnp.asarray(predictions) - jnp.asarray(targets))


def _absolute_error(predictions: Any, targets: Any) -> jax.Array:
    return jnp.abs(jnp.asarray(predictions) - jnp.asarray(targets))


def _numerator(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    return numerator


def _root(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    return jnp.sqrt(numerator / denominator)


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


def _weights(values: jax.Array, mask: Any, sample_weight: Any) -> jax.Array:
    """How much each value counts: nothing where it is padding or masked."""
    weights = jnp.ones(values.shape, jnp.float32)
    valid = valid_and_total(values, "metric.update(...)")[0] if values.ndim else None
    for factor in (valid, mask, sample_weight):
        if factor is not None:
            factor = jnp.asarray(factor, jnp.float32)
            weights = weights * factor.reshape(factor.shape + (1,) * (values.ndim - factor.ndim))
    return weights


def _plus(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two pairs (value, rounding), with what rounding loses kept."""
    high = a[:, 0] + b[:, 0]
    back = high - a[:, 0]
    lost = (a[:, 0] - (high - back)) + (b[:, 0] - back)
    return jnp.stack([high, lost + a[:, 1] + b[:, 1]], axis=1)
