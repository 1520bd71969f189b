"""Which rows make up a global batch, and which of them does each replica get? Arithmetic only, no data and no devices.

Two rules, stated once. *Order:* the rows of an epoch stand in one global order that depends on the seed and the epoch
alone; batch k is the k-th run of `batch_size` rows in it. So a position in the data is (seed, epoch, batch), whoever
reads it, and a run resumed on another number of replicas or processes goes on with the same sequence. *Split:* a batch
is cut into consecutive parts whose sizes differ by at most one, larger parts first, one for each replica.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Split:
    """How one global batch lies over the replicas.

    All replicas run one program, so all get a block of `block` rows. Replica r has ``sizes[r]`` rows of the batch,
    which stand first in its block; what follows is padding.

    >>> split = balanced(rows=10, replicas=4)
    >>> split.sizes, split.block
    ((3, 3, 2, 2), 3)
    >>> split.rows_of(1)
    range(3, 6)
    """

    sizes: tuple[int, ...]
    block: int

    @functools.cached_property
    def rows(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(int(start) for start in np.cumsum((0, *self.sizes[:-1])))

    @property
    def even(self) -> bool:
        """Whether no replica has padding."""
        return all(size == self.block for size in self.sizes)

    def rows_of(self, replica: int) -> range:
        """The rows of the batch that `replica` gets."""
        return range(self.starts[replica], self.starts[replica] + self.sizes[replica])

    def places(self, replicas: Sequence[int]) -> np.ndarray:
        """Which row of the batch stands at each place of the blocks of `replicas`, laid end to end.

        Padding repeats the last row before it. A row of zeros would do as well for a step that masks, were it not for
        steps that divide by a norm or take a logarithm: the NaN of a masked row still reaches the gradient, as 0 * NaN.
        """
        starts = np.array([self.starts[replica] for replica in replicas], dtype=np.intp)
        sizes = np.array([self.sizes[replica] for replica in replicas], dtype=np.intp)
        last = np.maximum(starts + sizes, 1) - 1
        return np.minimum(starts[:, None] + np.arange(self.block), last[:, None]).reshape(-1)

    def mask(self) -> np.ndarray:
        """``int32[replicas, 2]``: the valid rows of each replica, and of the whole batch."""
        return np.array([(size, self.rows) for size in self.sizes], dtype=np.int32)


@functools.lru_cache(maxsize=256)
def balanced(rows: int, replicas: int, batch_size: int | None = None) -> Split:
    """The split of a batch of `rows` rows, in blocks that would hold a batch of `batch_size`.

    With the size of the dataset's full batches as `batch_size`, a short batch has the shape of a full one:

    >>> balanced(rows=3, replicas=2, batch_size=8)
    Split(sizes=(2, 1), block=4)
    """
    low, larger = divmod(rows, replicas)
    sizes = tuple(low + (replica < larger) for replica in range(replicas))
    return Split(sizes, -(-max(rows, batch_size or 0) // replicas))


def padded(rows: int, block: int) -> np.ndarray:
    """`rows` rows in a block: which row stands at each place, the last one again and again after the end."""
    return np.minimum(np.arange(block), rows - 1)


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the data: `batch` global batches of epoch `epoch` have been read."""

    epoch: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How `rows` rows become global batches, epoch after epoch.

    A batch never mixes two epochs. The last batch of an epoch may be short, or is left out with `drop_remainder`.

    >>> schedule = Schedule(rows=10, batch_size=4, epochs=2)
    >>> schedule.batches, schedule.length
    (3, 6)
    >>> schedule.span(2)
    range(8, 10)
    """

    rows: int
    batch_size: int
    epochs: int | None = 1
    drop_remainder: bool = False
    seed: int | None = None
    """What the order of each epoch is drawn from; None keeps the rows as they stand."""

    @property
    def batches(self) -> int:
        """The global batches of one epoch."""
        full, left = divmod(self.rows, self.batch_size)
        return full + (left > 0 and not self.drop_remainder)

    @property
    def length(self) -> int | None:
        """The global batches of all epochs; None when there is no end."""
        if self.batches == 0:
            return 0
        return None if self.epochs is None else self.batches * self.epochs

    @property
    def even(self) -> bool:
        """Whether every batch has `batch_size` rows."""
        return self.drop_remainder or self.rows % self.batch_size == 0

    def settle(self, position: Position) -> Position | None:
        """`position`, or the start of the next epoch when this one has been read; None at the end of the data."""
        if position.batch >= self.batches:
            position = Position(position.epoch + 1, 0)
        ended = self.epochs is not None and position.epoch >= self.epochs
        return None if ended or self.batches == 0 else position

    def span(self, batch: int) -> range:
        """Which places in the order of its epoch batch number `batch` takes."""
        start = batch * self.batch_size
        return range(start, min(start + self.batch_size, self.rows))

    def order(self, epoch: int) -> np.ndarray | None:
        """The rows in the order of `epoch`; None when they are read as they stand."""
        return None if self.seed is None else shuffled(self.rows, self.seed, epoch)


def shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `rows` rows that (seed, epoch) fixes for good.

    Sorting the raw words of a bit generator is slower than `Generator.permutation` (about 7 ms against 0.5 for 60,000
    rows, once an epoch), but NumPy promises the same words for ever, and the same permutation it does not: a run that
    resumes under another NumPy must find the order that it left.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(rows)
    return np.argsort(words, kind="stable")
