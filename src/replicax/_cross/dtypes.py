"""In which dtype are values added up, and in which do they come back?

The same for every road a value may take, so that compiled, eager and host code agree: sums keep the dtype of what is
summed, except that Trues are counted; the mean of integers is a float; eight bits are too few to add in.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax import _errors
from replicax._options import ReduceOp


def checked(op: ReduceOp, leaf: Any) -> jax.Array:
    """A leaf as an array that `op` can combine; `TypeError` for text, keys, and the smallest of complex numbers."""
    word = op.name.lower()
    if not is_key(leaf):
        array = as_array(word, leaf)
        if op in (ReduceOp.SUM, ReduceOp.MEAN) or not jnp.issubdtype(array.dtype, jnp.complexfloating):
            return array
    raise _errors.not_reducible(word, leaf)


def as_array(word: str, leaf: Any) -> jax.Array:
    """A leaf as an array; `TypeError` for text and objects. `word` names the operation."""
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise _errors.not_reducible(word, leaf) from error


def is_key(leaf: Any) -> bool:
    """Whether this is an array of random keys, with which one cannot calculate."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def widened(word: str, array: jax.Array, beside_auto_axes: bool = False) -> jax.Array:
    """The operand of a reduction (`word` is its name in lower case) in the dtype in which it is carried out."""
    if word == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
        return array.astype(jnp.result_type(float))  # floats first: a sum of int8 wraps around before it is divided
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    # Eight bits cannot hold a sum; and a 16-bit psum beside an Auto axis aborts the process on CPU.
    narrow = array.dtype.itemsize < (4 if beside_auto_axes else 2)
    return array.astype(jnp.float32) if narrow and is_float(array) else array


def in_full(op: ReduceOp, array: jax.Array) -> jax.Array:
    """An array some of whose axes `op` will reduce: a mean of many is added up in floats of at least 32 bits."""
    if op is not ReduceOp.MEAN:
        return array
    array = widened("mean", array)
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def narrowed(word: str, result: jax.Array, operand: jax.Array) -> jax.Array:
    """The result in the operand's dtype, except where that could not hold it."""
    if word == "sum" and operand.dtype == jnp.bool_:
        return result
    if word == "mean" and not jnp.issubdtype(operand.dtype, jnp.inexact):
        return result
    return result.astype(operand.dtype)


def is_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def divided(total: jax.Array, replicas: int) -> jax.Array:
    """`total` divided by the number of replicas, the same bits in every program: the mean of seven 3s is 3."""
    if replicas & (replicas - 1) == 0:
        return total / replicas
    # XLA multiplies by 1/N instead, which is not quite the same, and joins that with what the user's step multiplies by
    # next. It does so for whatever divisor is a broadcast number, behind an optimization barrier too. This one is N
    # wherever it matters, and not to be seen through: the total might be a NaN.
    return total / jnp.where(total == total, replicas, replicas + 1).astype(jnp.finfo(total.dtype).dtype)
