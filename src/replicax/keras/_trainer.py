"""How do `fit`, `evaluate` and `predict` find the strategy of a model? Its constructor notes the scope it was made in.

Keras has no public place to say either "this model belongs to that distribution" or "lay out each batch by itself", so this
file wraps the constructor and the entry points of Keras's trainer and replaces its epoch iterator; and layers and variables
learn to ask whether they are used in a step of `strategy.run`. These are the only names of Keras that we change, and a
model that was made outside of any scope passes through them untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from replicax import _context
from replicax._input.arrays import ArrayBatches
from replicax._input.dataset import DistributedDataset
from replicax._input.files import FileBatches
from replicax._strategy.base import Strategy
from replicax.keras import _errors
from replicax.keras._adopt import Adopted
from replicax.keras._placed import AtRest, Placed

ENTRIES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
OF_MODEL, TAKEN = "_replicax_placed", "_replicax_taken"


def put_in_force(strategy: Strategy) -> Any:
    """Tells Keras of the strategy whose scope is entered, and returns the distribution it had so far."""
    _install()
    before = keras.distribution.distribution()
    if keras.backend.backend() == "jax":
        keras.distribution.set_distribution(AtRest(strategy))
    return before


@functools.cache
def _install() -> None:
    base_trainer.Trainer.__init__ = _remembering(base_trainer.Trainer.__init__)
    if keras.backend.backend() != "jax":
        return  # the constructor refuses
    from keras.src.backend.jax import core, trainer

    trainer.JAXEpochIterator = _epoch_iterator(trainer.JAXEpochIterator)
    for name in ENTRIES:
        setattr(trainer.JAXTrainer, name, _under_its_strategy(getattr(trainer.JAXTrainer, name)))
    trainer.JAXTrainer._purge_model_variables = _noting(trainer.JAXTrainer._purge_model_variables)
    keras.Layer.__call__ = _refused_in_steps(keras.Layer.__call__, lambda layer: layer.variables)
    core.JaxVariable._direct_assign = _refused_in_steps(core.JaxVariable._direct_assign, lambda variable: [variable])


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
            vars(self)[OF_MODEL] = Placed(strategy), AtRest(strategy)  # not setattr, which Keras searches for weights

    return __init__


def _under_its_strategy(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if OF_MODEL not in vars(self):
            if _context.has_strategy():
                raise _errors.made_outside(self, method.__name__, _context.get_strategy())
            return method(self, *args, **kwargs)
        placed, at_rest = vars(self)[OF_MODEL]
        if keras.distribution.distribution() is placed:  # `fit` evaluates
            return method(self, *args, **kwargs)
        _context.require_cross(placed.strategy, f"model.{method.__name__}(...)")
        with placed.scope():
            _lay_out(self, placed)
            try:
                return method(self, *args, **kwargs)
            except BaseException:
                _put_back(self)
                raise
            finally:
                if placed.placement.apart:
                    _lay_out(self, at_rest)

    return call


def _variables(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    given = [variable for metric in _metrics_given(model) for variable in metric.variables]
    return [*model.variables, *model.metrics_variables, *given, *(optimizer.variables if optimizer else ())]


def _metrics_given(model: Any) -> list[Any]:
    """The metrics that `compile` was given as objects: until the first batch Keras lists none of them."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return []
    given = keras.tree.flatten((compiled._user_metrics, compiled._user_weighted_metrics))
    return [metric for metric in given if isinstance(metric, keras.metrics.Metric)]


def _lay_out(model: Any, placed: Placed) -> None:
    """Moves what lies elsewhere: made outside the scope (by `build`, by `compile`), or at rest under central storage."""
    for variable in _variables(model):
        if isinstance(variable, Adopted):
            if placed.placement.apart:
                raise _errors.adopted_in_central_storage(model, variable)
            continue
        layout = variable._layout
        devices = None if layout is None else getattr(layout, "backend_layout", layout).mesh.devices.flat
        if devices is not None and not placed.strategy_has(devices):
            raise _errors.lies_elsewhere(model, variable, placed.strategy)
        if devices is None or placed.placement.apart:
            variable._layout = placed.get_variable_layout(variable)
            if variable._value is not None:
                variable._direct_assign(variable._value)


# -- a call that fails
#
# While an epoch runs, Keras takes the values out of the variables and keeps them to itself. After an error it does not
# always put them back, and from then on every call fails.


def _noting(purge: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(purge)
    def _purge_model_variables(self: Any, *args: Any, **kwargs: Any) -> None:
        if OF_MODEL in vars(self):
            vars(self)[TAKEN] = [(variable, variable._value) for variable in _variables(self)]
        purge(self, *args, **kwargs)

    return _purge_model_variables


def _put_back(model: Any) -> None:
    model.jax_state_sync()  # what the steps before the failing one have reached
    model._jax_state, model._jax_state_synced = None, True
    for variable, value in vars(model).pop(TAKEN, ()):
        if variable._value is None and value is not None and not value.is_deleted():
            variable._value = value


# -- steps of `strategy.run`


def _refused_in_steps(method: Callable[..., Any], variables: Callable[[Any], list[Any]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _context.current()
        if mode is not None and mode.replica is not None and mode.ledger is not None and not in_stateless_scope():
            plain = [variable for variable in variables(self) if not isinstance(variable, Adopted)]
            if plain:
                raise _errors.not_adopted(self, plain)
        return method(self, *args, **kwargs)

    return call


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
