"""How is a variable changed in a few of its rows? `scatter_add` and its relatives, as methods of every variable.

==============  =======================================================  ==========================================
called in ...   add, sub, mul, div                                       min, max, update
==============  =======================================================  ==========================================
replica, NONE   the rows given, which must be equal on every replica     likewise
replica, SUM    the rows of all replicas, one after the other            refused: which replica's row would it be?
replica, MEAN   likewise, their values divided by the replicas' number   refused
replica, FIRST  replica 0's rows                                         likewise
across, update  the rows given                                           likewise, unless SUM or MEAN
==============  =======================================================  ==========================================

On-read variables refuse all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _errors
from replicax._cross.slices import IndexedSlices, is_slices
from replicax._options import VariableAggregation
from replicax._values import PerReplica

Rule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_ONE_SPEAKER = (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA)


class Scatters:
    """The scatter methods of `rx.Variable`.

    Each takes `IndexedSlices`, rows and where they belong, and returns what `assign` returns. An index that occurs
    twice counts twice, in order; rows that lie outside of the variable are left out.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        name: str
        shape: tuple[int, ...]
        on_read: bool
        aggregation: VariableAggregation

        def _assign(self, method: str, change: Any, value: Any, read_value: bool) -> Any: ...

    def scatter_add(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Adds rows to some of the variable's rows.

        >>> import jax.numpy as jnp, replicax as rx
        >>> table = rx.Variable(jnp.zeros((3, 2)))
        >>> rows = rx.IndexedSlices(jnp.ones((2, 2)), jnp.array([2, 2]))
        >>> print(table.scatter_add(rows).numpy())
        [[0. 0.]
         [0. 0.]
         [2. 2.]]
        """
        return self._scatter("scatter_add", _add, slices, read_value)

    def scatter_sub(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Subtracts rows from some of the variable's rows."""
        return self._scatter("scatter_sub", _subtract, slices, read_value)

    def scatter_mul(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Multiplies some of the variable's rows."""
        return self._scatter("scatter_mul", _multiply, slices, read_value)

    def scatter_div(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Divides some of the variable's rows; integers are rounded towards zero."""
        return self._scatter("scatter_div", _divide, slices, read_value)

    def scatter_min(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Lowers some of the variable's rows to the rows given, where those are smaller."""
        return self._scatter("scatter_min", _lower, slices, read_value)

    def scatter_max(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Raises some of the variable's rows to the rows given, where those are larger."""
        return self._scatter("scatter_max", _raise, slices, read_value)

    def scatter_update(self, slices: IndexedSlices, read_value: bool = True) -> Any:
        """Replaces some of the variable's rows; of several rows for one index the last counts."""
        return self._scatter("scatter_update", _replace, slices, read_value)

    def _scatter(self, method: str, rule: Rule, slices: Any, read_value: bool) -> Any:
        self._check_scatter(method, rule, slices)

        def change(array: jax.Array, slices: IndexedSlices) -> jax.Array:
            indices, values = jnp.asarray(slices.indices), jnp.asarray(slices.values)
            self._check_rows(method, indices, values, slices.dense_shape)
            return rule(array, indices, values.astype(array.dtype))

        return self._assign(method, change, slices, read_value)

    def _check_scatter(self, method: str, rule: Rule, slices: Any) -> None:
        if not is_slices(slices):
            raise _errors.scatter_of_no_slices(self, method, slices)
        if self.on_read:
            raise _errors.scatter_on_read(self, method)
        if rule in _NEED_ONE_SPEAKER and self.aggregation not in _ONE_SPEAKER:
            raise _errors.scatter_of_many(self, method)
        for held in (slices.values, slices.indices):
            if isinstance(held, PerReplica):
                raise _errors.per_replica_assigned(self, held, method)

    def _check_rows(self, method: str, indices: jax.Array, values: jax.Array, dense_shape: Any) -> None:
        rows = (*indices.shape, *self.shape[1:])
        fits = self.shape and indices.ndim == 1 and jnp.issubdtype(indices.dtype, jnp.integer) and values.shape == rows
        if not fits or dense_shape not in (None, self.shape):
            raise _errors.scatter_shapes(self, method, indices, values, dense_shape)


def _add(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[indices].add(values)


def _subtract(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[indices].add(-values)


def _multiply(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[indices].multiply(values)


def _divide(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    divisor = jnp.ones_like(array).at[indices].multiply(values)
    return lax.div(array, divisor)


def _lower(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[indices].min(values)


def _raise(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[indices].max(values)


def _replace(array: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    # XLA leaves open which of two rows for one index is written, and replicas might differ: all but the last are
    # pointed at a row that does not exist.
    rows = array.shape[0]
    indices = jnp.where(indices < 0, indices + rows, indices)
    order = jnp.argsort(indices, stable=True)
    indices = indices[order]
    followed = jnp.append(indices, rows)[1:] == indices
    return array.at[jnp.where(followed, rows, indices)].set(values[order], mode="drop")


_NEED_ONE_SPEAKER = (_lower, _raise, _replace)
