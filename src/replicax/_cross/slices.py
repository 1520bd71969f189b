"""What is a gradient that touches only a few rows? `IndexedSlices`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass


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
        return jnp.zeros(self.dense_shape, self.values.dtype).at[self.indices].add(self.values)


def is_slices(x: Any) -> bool:
    return isinstance(x, IndexedSlices)
