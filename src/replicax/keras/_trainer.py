"""How do `fit`, `evaluate` and `predict` find the strategy of a model? Its constructor notes the scope it was made in.

Keras has no public place to say either "this model belongs to that distribution" or "lay out each batch by itself", so this
file wraps the constructor and the entry points of Keras's trainer and replaces its epoch iterator. These are the only
names of Keras that we change, and a model that was made outside of any scope passes through them untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from replicax import _context
from replicax._input.arrays import ArrayBatches
from replicax._input.dataset import DistributedDataset
from replicax._input.files import FileBatches
from replicax._strategy.base import Strategy
from replicax.keras import _errors
from replicax.keras._placed import Placed

ENTRIES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
OF_MODEL = "_replicax_strategy"


def put_in_force(strategy: Strategy) -> Any:
    """Tells Keras of the strategy whose scope is entered, and returns the distribution it had so far."""
    _install()
    before = keras.distribution.distribution()
    if keras.backend.backend() == "jax":
        keras.distribution.set_distribution(Placed(strategy))
    return before


@functools.cache
def _install() -> None:
    base_trainer.Trainer.__init__ = _remembering(base_trainer.Trainer.__init__)
    if keras.backend.backend() != "jax":
        return  # the constructor refuses
    from keras.src.backend.jax import trainer

    trainer.JAXEpochIterator = _epoch_iterator(trainer.JAXEpochIterator)
    for name in ENTRIES:
        setattr(trainer.JAXTrainer, name, _under_its_strategy(getattr(trainer.JAXTrainer, name)))


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _context.has_strategy():
            strategy = _context.get_strategy()
            if keras.backend.backend() != "jax":
                raise _errors.other_backend(self, keras.backend.backend())
            if len(strategy.placement.local_replicas) != strategy.num_replicas_in_sync:
                raise _errors.several_processes(self, strategy)
            setattr(self, OF_MODEL, strategy)

    return __init__


def _under_its_strategy(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = getattr(self, OF_MODEL, None)
        if strategy is None:
            if _context.has_strategy():
                raise _errors.made_outside(self, method.__name__, _context.get_strategy())
            return method(self, *args, **kwargs)
        _context.require_cross(strategy, f"model.{method.__name__}(...)")
        placed = Placed(strategy)
        with placed.scope():
            _settle(self, placed)
            return method(self, *args, **kwargs)

    return call


def _settle(model: Any, placed: Placed) -> None:
    """Lays out the variables that were made outside the scope: by `build`, by an optimizer made before, by `compile`."""
    optimizer = getattr(model, "optimizer", None)
    for variable in [*model.variables, *model.metrics_variables, *(optimizer.variables if optimizer else ())]:
        if variable._layout is None:
            variable._layout = placed.get_variable_layout(variable)
            if variable._value is not None:
                variable._direct_assign(variable._value)


# -- input


def _epoch_iterator(base: type[Any]) -> type[Any]:
    class EpochIterator(base):
        """Keras's epoch iterator, which also reads replicax's datasets and lays out every batch by its own shape."""

        def __init__(
            self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, class_weight: Any = None, **kwargs: Any
        ) -> None:
            if isinstance(x, ArrayBatches | FileBatches | DistributedDataset):
                if y is not None or sample_weight is not None:
                    raise _errors.targets_beside_dataset(x)
                x = Batches(x, class_weight)
            super().__init__(x, y, sample_weight, *args, class_weight=class_weight, **kwargs)

        def _get_distributed_iterator(self, distribution: Any) -> Iterator[Any]:
            if isinstance(distribution, Placed):
                return map(distribution.feed, self.data_adapter.get_jax_iterator())
            return super()._get_distributed_iterator(distribution)

    return EpochIterator


class Batches(DataAdapter):
    """A dataset of replicax in the form that Keras reads."""

    def __init__(self, dataset: Any, class_weight: dict[int, float] | None) -> None:
        self._dataset = dataset
        self._class_weight = class_weight

    def get_numpy_iterator(self) -> Iterator[Any]:
        for batch in self._dataset:
            if self._class_weight is not None:
                x, y, given = data_adapter_utils.unpack_x_y_sample_weight(batch)
                weights = data_adapter_utils.class_weight_to_sample_weights(y, self._class_weight)
                batch = x, y, weights if given is None else given * weights
            yield batch

    get_jax_iterator = get_numpy_iterator

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._dataset)
        except TypeError:  # endless, or of unknown length
            return None

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None
