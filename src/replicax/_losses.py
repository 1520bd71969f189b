"""What is this replica's share of the loss? Means that come out right when batches are short and replicas many."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context
from replicax._errors import ContextError, InputError, NotACountError, message
from replicax._validity import valid_counts


def mean(per_example: Any) -> jax.Array:
    """This replica's share of the mean over the global batch.

    Write the loss of a step with it. Where every replica has as many real rows it is ``jnp.mean``. Where a short batch
    was divided, a replica with fewer rows counts for less, one with none for nothing, and padding never: the mean over
    the replicas of what this returns is the mean over all real rows. It needs no communication, so gradients
    taken through it are local ones, to be averaged: ``rx.Optimizer(tx, gradients="mean")``.

    Args:
      per_example: One value for each row of this replica's batch, or several (axes after the first are averaged too).

    Example:
      Five rows over two replicas; the second has two of them.

      >>> import jax, jax.numpy as jnp, numpy as np, replicax as rx
      >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
      >>> (batch,) = strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 4.0, 5.0])])
      >>> float(strategy.reduce("mean", strategy.run(rx.mean, args=(batch,)), axis=None))
      3.0
    """
    values = _floating(per_example)
    valid, total = valid_and_total(values, "rx.mean(per_example)")
    if valid is None:
        return values.mean()
    share = _context.get_strategy().num_replicas_in_sync / (total * (values.size // values.shape[0]))
    return (_only(values, valid).sum(dtype=jnp.float32) * share).astype(values.dtype)


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> jax.Array:
    """The sum of this replica's losses, divided by the size of the *global* batch.

    The loss of tf.distribute's custom loops: gradients through it are to be summed over the replicas,
    ``rx.Optimizer(tx, gradients="sum")``. Padding is left out. `rx.mean` says the same for gradients that are averaged.

    Args:
      per_example_loss: One value for each row of this replica's batch.
      sample_weight: What to multiply each row's loss by.
      global_batch_size: What to divide by; by default the real rows of the global batch.

    >>> import jax, numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> (batch,) = strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 4.0])])
    >>> loss = strategy.run(rx.compute_average_loss, args=(batch,))
    >>> [float(x) for x in strategy.experimental_local_results(loss)]
    [0.75, 1.75]
    """
    call = "rx.compute_average_loss(per_example_loss)"
    if global_batch_size is None:
        _require_replica(call, "pass `global_batch_size=...`")
    losses = _floating(per_example_loss)
    if losses.ndim == 0 and global_batch_size is None:
        raise _no_rows(call, losses)
    valid, total = valid_and_total(losses, call) if losses.ndim else (None, None)
    if sample_weight is not None:
        losses = losses * weights_along(call, "sample_weight", jnp.asarray(sample_weight, losses.dtype), losses.shape)
    if valid is not None:
        losses = _only(losses, valid)
    if global_batch_size is None:
        rows = losses.shape[0] * _context.get_strategy().num_replicas_in_sync if total is None else total
    else:
        rows = _batch_size(global_batch_size)
    rows = jnp.asarray(rows, losses.dtype)
    return jnp.where(rows == 0, 0, losses.sum() / jnp.where(rows == 0, 1, rows))


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """This replica's part of a loss that does not come from examples, such as a penalty on weights.

    Every replica computes the same penalty. When gradients are summed over replicas it would count once for
    each of them, so each takes an equal part.

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> float(strategy.run(lambda: rx.scale_regularization_loss(3.0)))
    1.5
    """
    _require_replica("rx.scale_regularization_loss(loss)", "call it in the step, next to the loss of the examples")
    return _floating(regularization_loss).sum() / _context.get_strategy().num_replicas_in_sync


def valid_and_total(values: jax.Array, call: str) -> tuple[jax.Array | None, Any]:
    """Which rows of `values` are real and how many the global batch has; (None, None) for a batch without padding."""
    if values.ndim == 0:
        raise _no_rows(call, values)
    counts = valid_counts(values)
    if counts is not None:
        return jnp.arange(values.shape[0]) < counts[0], counts[1]
    if valid_counts() is not None:
        raise _other_rows(call, values)
    return None, None


def weights_along(call: str, name: str, weights: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`weights`, one for each row or each value of an array of this shape, so shaped that the two can be multiplied."""
    fits = weights.ndim <= len(shape) and all(n in (1, m) for n, m in zip(weights.shape, shape, strict=False))
    if not fits:
        raise _other_weights(call, name, weights.shape, shape)
    return weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim))


def _only(values: jax.Array, valid: jax.Array) -> jax.Array:
    return jnp.where(_along_rows(valid, values), values, 0)


def _along_rows(rows: jax.Array, like: jax.Array) -> jax.Array:
    """One value for each row, so shaped that it meets all entries of its row."""
    return rows.reshape(rows.shape + (1,) * (like.ndim - rows.ndim))


def _floating(values: Any) -> jax.Array:
    array = jnp.asarray(values)
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.result_type(float))


def _batch_size(size: Any) -> Any:
    """`size`, checked as far as it can be seen: a whole number, not negative, possibly an array."""
    array = size if hasattr(size, "dtype") else np.asarray(size)
    whole = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)
    if not whole or not isinstance(size, Tracer) and operator.index(size) < 0:
        raise NotACountError(
            message(
                f"`rx.compute_average_loss(..., global_batch_size={size!r})` does not count rows",
                why="It is what the summed losses are divided by: the rows of the whole batch, one integer.",
                instead=["pass the number of rows: `global_batch_size=256`", "leave it out: the real rows are counted"],
            )
        )
    return size


def _require_replica(call: str, instead: str) -> None:
    if _context.in_cross_replica_context():
        raise ContextError(
            message(
                f"You are calling `{call}` in cross-replica context, while it was expected in replica context",
                why="It computes one replica's part, and here the program runs once for all of them.",
                instead=["call it in the function that you give to `strategy.run`", instead],
            )
        )


def _no_rows(call: str, values: jax.Array) -> InputError:
    return InputError(
        message(
            f"`{call}` got a scalar, and takes one value for each example",
            [f"it has type {values.aval.str_short()}"],
            "From a mean that was taken already, the rows that are padding cannot be left out any more.",
            ["pass the losses of the examples, before any `mean` or `sum`: an array with the rows along axis 0"],
        )
    )


def _other_rows(call: str, values: jax.Array) -> InputError:
    return InputError(
        message(
            f"`{call}` got values whose rows are not those of the batch",
            [f"{values.aval.str_short()}: {values.shape[0]} along axis 0"],
            "Rows of this batch may be padding, and which of these values come from them cannot be told.",
            [
                "keep the rows of the batch along axis 0: `x.reshape(rows, -1)`, not `x.reshape(-1)`",
                "leave padding out yourself: `mask = rx.valid_rows()`",
            ],
        )
    )


def _other_weights(call: str, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> InputError:
    return InputError(
        message(
            f"`{call}` got `{name}` of a shape that does not fit the values",
            [f"{name:<13}  {list(found)}", f"{'values':<13}  {list(shape)}"],
            "They say of each row, or of each value, how much it counts.",
            [f"give one number for each row: `{name}.reshape(-1)`", "give as many as there are values, in their shape"],
        )
    )
