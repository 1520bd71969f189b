"""How do arrays become a dataset of single rows that is batched later? What tf.distribute calls a NumPy dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from replicax._input.arrays import ArrayBatches, from_arrays

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayRows:
    """The rows of arrays, one at a time, until `batch` makes global batches of them.

    >>> import numpy as np, replicax as rx
    >>> rows = rx.OneDeviceStrategy("cpu:0").experimental_make_numpy_dataset(np.arange(6))
    >>> [batch.tolist() for batch in rows.repeat(2).batch(4)]
    [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]]
    """

    tree: PyTree
    order: bool | int = False
    epochs: int | None = 1

    def shuffle(self, buffer_size: int | None = None, seed: int = 0) -> ArrayRows:
        """All rows in an order drawn from `seed`, another one in each epoch. There is no buffer to give a size to."""
        return dataclasses.replace(self, order=seed)

    def repeat(self, count: int | None = None) -> ArrayRows:
        """The rows `count` times over; None goes on for ever."""
        return dataclasses.replace(self, epochs=None if count is None or self.epochs is None else self.epochs * count)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> ArrayBatches:
        """Global batches of `batch_size` rows. A batch does not mix two epochs."""
        return from_arrays(self.tree, batch_size, self.order, self.epochs, drop_remainder)

    def __iter__(self) -> Iterator[PyTree]:
        for batch in self.batch(1):
            yield jax.tree.map(lambda leaf: leaf[0], batch)


def rows_of(tree: PyTree) -> ArrayRows:
    """The rows of `tree`, copied, so that they stay what they are when the arrays are written to."""
    rows = ArrayRows(jax.tree.map(np.array, tree))
    rows.batch(1)  # refuses what has no rows
    return rows
