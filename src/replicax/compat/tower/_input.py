"""How did data reach the towers? `PerDeviceDataset` and its iterators, over distributed datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from replicax._input import distribute
from replicax._input.dataset import DistributedDataset
from replicax._input.dataset import DistributedIterator as InputIterator
from replicax._input.options import InputContext, InputReplicationMode
from replicax._strategy.base import Strategy
from replicax.compat.tower import _refusals

PyTree = Any


class PerDeviceDataset:
    """Data for the towers: an element has a component for each, which is one batch of the dataset.

    Made by `DistributionStrategy.distribute_dataset`. The only thing to do with it is to go through it.

    >>> import jax, numpy as np
    >>> from replicax.compat import tower
    >>> distribution = tower.MirroredStrategy(devices=jax.devices()[:2])
    >>> with distribution.scope():
    ...     dataset = distribution.distribute_dataset(lambda: [np.array([1.0]), np.array([2.0])])
    ...     iterator = dataset.make_one_shot_iterator()
    ...     doubled = distribution.call_for_each_tower(lambda x: 2 * x, iterator.get_next())
    ...     print(distribution.unwrap(doubled))
    [Array([2.], dtype=float32), Array([4.], dtype=float32)]
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def make_one_shot_iterator(self) -> InputIterator:
        """A pass over the data, ready for ``get_next()``."""
        return iter(self._dataset)

    def make_initializable_iterator(self) -> InputIterator:
        """A pass over the data, ready too; calling its `initializer` starts it again."""
        return iter(self._dataset)

    def __iter__(self) -> Iterator[PyTree]:
        return iter(self._dataset)


def distribute_dataset(engine: Strategy, dataset_fn: Callable[[], Any]) -> PerDeviceDataset:
    """What `dataset_fn` returns, each tower taking whole batches in turn."""
    if not callable(dataset_fn):
        raise _refusals.not_a_dataset_function(dataset_fn)

    def fed(context: InputContext) -> Any:
        return dataset_fn()

    call = "distribution.distribute_dataset(dataset_fn)"
    return PerDeviceDataset(distribute.distribute_from_function(engine, fed, call=call))


def dataset_iterator(engine: Strategy, dataset: Any) -> InputIterator:
    """A pass over global batches."""
    return distribute.make_dataset_iterator(engine, dataset)


def input_fn_iterator(
    engine: Strategy, input_fn: Callable[[InputContext], Any], replication_mode: InputReplicationMode
) -> InputIterator:
    """A pass over one worker's batches, each for one tower."""
    return distribute.make_input_fn_iterator(engine, input_fn, replication_mode)
