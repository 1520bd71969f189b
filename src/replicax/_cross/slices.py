"""What is a gradient that touches only a few rows? `IndexedSlices`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from replicax import _errors
from replicax._options import ReduceOp


@functools.partial(register_dataclass, data_fields=["values", "indices"], meta_fields=["dense_shape"])
@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of a larger array: ``values[i]`` belongs at row ``indices[i]`` of an array of shape `dense_shape`.

    The gradient of an embedding table is mostly zero; sending only its rows saves the rest. Reducing over replicas
    concatenates the rows of all of them; an index that occurs twice counts twice.

    >>> import jax.numpy as jnp, replicax as rx
    >>> slices = rx.IndexedSlices(jnp.array([[1.0, 2.0]]), jnp.array([1]), (3, 2))
    >>> print(slices.to_dense())
    [[0. 0.]
     [1. 2.]
     [0. 0.]]
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("values", "indices"):
            if isinstance(getattr(self, name), (list, tuple)):  # which JAX would take apart
                object.__setattr__(self, name, jnp.asarray(getattr(self, name)))
        if self.dense_shape is not None and type(self.dense_shape) is not tuple:
            object.__setattr__(self, "dense_shape", tuple(map(int, self.dense_shape)))  # it must be hashable

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def to_dense(self) -> jax.Array:
        """The array these rows stand for; rows with the same index are added up."""
        if self.dense_shape is None:
            raise ValueError(
                "IndexedSlices.to_dense() needs `dense_shape`, which says how many rows the array has. Write "
                "IndexedSlices(values, indices, dense_shape=(rows, ...))."
            )
        values, indices = jnp.asarray(self.values), jnp.asarray(self.indices)
        if indices.ndim != 1 or values.shape != (*indices.shape, *self.dense_shape[1:]):
            raise _errors.slices_of_no_rows(values, indices, self.dense_shape)
        return jnp.zeros(self.dense_shape, values.dtype).at[indices].add(values)


def is_slices(x: Any) -> bool:
    return isinstance(x, IndexedSlices)


def joined(op: ReduceOp, parts: Sequence[IndexedSlices]) -> IndexedSlices:
    """The slices of all replicas as one: their rows one after the other; a mean divides the values."""
    check_op(op)
    values = jnp.concatenate([jnp.asarray(part.values) for part in parts])
    indices = jnp.concatenate([jnp.asarray(part.indices) for part in parts])
    return averaged(op, IndexedSlices(values, indices, parts[0].dense_shape), len(parts))


def averaged(op: ReduceOp, slices: IndexedSlices, replicas: int) -> IndexedSlices:
    """`slices` of all replicas together, as the result of `op`."""
    values = slices.values / replicas if op is ReduceOp.MEAN else slices.values
    return dataclasses.replace(slices, values=values)


def check_op(op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise _errors.slices_op(op)
