"""How do callers of ``strategy.extended`` still find their names? A thin view; nothing in replicax goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context, _errors
from replicax._input import distribute
from replicax._input.rows import ArrayRows
from replicax._options import CommunicationOptions, ReduceOp
from replicax._strategy import destinations as _destinations
from replicax._strategy import logical as _logical
from replicax._strategy import update as _update
from replicax._variables import creation, sync
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

PyTree = Any


class StrategyExtended:
    """What algorithms need that know of replicas: reductions to a place, updates of a variable, places.

    Get it as ``strategy.extended``. It holds nothing of its own.

    The usual way of updating a variable by hand, from inside a step:

    >>> import jax, replicax as rx
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0)
    >>> def apply(strategy, gradient):
    ...     gradient = strategy.extended.reduce_to("mean", gradient, w)
    ...     strategy.extended.update(w, lambda w, g: w.assign_sub(0.5 * g), args=(gradient,))
    >>> def step(gradient):
    ...     rx.get_replica_context().merge_call(apply, args=(gradient,))
    >>> strategy.run(step, args=(rx.PerReplica((1.0, 3.0)),))
    >>> print(w.numpy())
    0.0
    """

    def __init__(self, container_strategy: Strategy) -> None:
        self._strategy = container_strategy

    def __repr__(self) -> str:
        return f"<rx.StrategyExtended of {self._strategy!r}>"

    # -- combining

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """Combines a value per replica and puts the result where `destinations` lies.

        Args:
          destinations: A variable, a value or a device. On one device the result is an array there, on several an
            array with a copy on each. Inside a run it is on every replica.

        >>> import jax, replicax as rx
        >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
        >>> total = strategy.extended.reduce_to("sum", rx.PerReplica((1.0, 3.0)), "cpu:1")
        >>> print(total, total.devices() == {jax.devices()[1]})
        4.0 True
        """
        return _destinations.reduce_to(self._strategy, reduce_op, value, _one(destinations), options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[PyTree, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """As `reduce_to` for many values at once; inside a run small ones travel together."""
        if not isinstance(value_destination_pairs, Iterable):
            raise _errors.not_pairs(value_destination_pairs)
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if isinstance(pair, tuple) and len(pair) == 2:
                _one(pair[1])
        return _destinations.batch_reduce_to(self._strategy, reduce_op, pairs, options)

    def broadcast_to(self, tensor: PyTree, destinations: Any) -> PyTree:
        """Copies one value to the devices of `destinations`; Python numbers stay what they are."""
        if self._strategy is _context.default_strategy():
            if destinations is not None:
                raise _errors.broadcast_by_default(destinations)
            return tensor
        return _destinations.broadcast_to(self._strategy, tensor, _one(destinations))

    # -- running and updating

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> PyTree:
        """The former name of `Strategy.run`."""
        return self._strategy.run(fn, args, kwargs)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Runs ``fn(var, *args, **kwargs)``; an assignment in it sets the copies of `var` as it is written.

        Nothing is combined on the way, so the arguments must be equal for all replicas: reduce them first. For code
        that speaks for all replicas; inside a replica it meets the others first, like `merge_call`.

        Args:
          group: True returns what `fn` returned; False one component for each replica, as a tuple.

        Raises:
          LocalityError: An argument differs per replica.
        """
        return _update.update(self._strategy, var, fn, args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Runs ``fn(*args, **kwargs)`` for state that belongs to no variable; see `non_slot_devices`."""
        return _update.update_non_slot(self._strategy, colocate_with, fn, args, kwargs, group)

    def experimental_run_steps_on_iterator(
        self, fn: Callable[..., Any], iterator: Any, iterations: int = 1, initial_loop_values: Any = None
    ) -> Any:
        """As `Strategy.run_steps`, but an element that is a tuple stays one argument: ``fn(context, element)``."""
        one_each = map(_alone, iterator) if hasattr(iterator, "__next__") else iterator
        return self._strategy.run_steps(fn, one_each, iterations, initial_loop_values)

    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: None = None) -> ArrayRows:
        """The rows of arrays as a dataset: ``.shuffle(...)``, ``.batch(global_batch_size)``, then distribute it."""
        return distribute.make_numpy(self._strategy, numpy_input)

    # -- variables

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Variables made in this block lie where `colocate_with_variable` lies, as an optimizer's slots must."""
        return creation.colocated(self._strategy, colocate_with_variable)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made under this strategy."""
        return isinstance(v, Variable) and v.strategy is self._strategy

    def value_container(self, value: Any) -> Any:
        """The variable that `value` is a component of. Components are plain arrays here, so it is `value` itself."""
        return value

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable across replicas, also from inside one: an on-read variable is combined."""
        return sync.read_across(v)

    # -- places

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process's replicas, in replica order."""
        self._refuse_default("worker_devices")
        return _logical.devices(self._strategy)

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold the variables."""
        self._refuse_default("parameter_devices")
        device = self._strategy.placement.parameter_device
        return self.worker_devices if device is None else (device,)

    def experimental_logical_device(self, logical_device_id: int) -> AbstractContextManager[None]:
        """In this block `worker_devices` are the devices of this number in each replica that is made of several.

        How a replica's computation is divided over its devices is left to XLA, so nothing else changes.
        """
        return _logical.scope(self._strategy, logical_device_id)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Where to keep and update state that belongs to no one variable, a step counter of an optimizer say."""
        return _update.non_slot_devices(self._strategy, var_list)

    # -- what this process is to the others

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every process runs the program for itself and they meet in their variables or reductions."""
        return self._strategy.between_graph

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process must initialize variables. They always have a value here, so it is harmless."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process should write checkpoints."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process should write summaries."""
        return self._strategy.is_chief

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all batches must have one shape. None of ours must: short ones are padded."""
        return False

    def _refuse_default(self, what: str) -> None:
        if self._strategy is _context.default_strategy():
            raise _errors.no_devices_by_default(f"extended.{what}")


def _alone(element: Any) -> tuple[Any]:
    return (element,)


def _one(destinations: Any) -> Any:
    """tf.distribute takes a list of devices only in the algorithms themselves."""
    if destinations is None or isinstance(destinations, (list, tuple)):
        raise _errors.destinations_as_a_list(destinations)
    return destinations
